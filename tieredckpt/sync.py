"""`SyncStore`: the blocking face of a store, for trainers without an event loop.

A test compares its methods with those of `tieredckpt.CheckpointStore`: the same names, arguments and docstrings.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar

from tieredckpt.checkpoint import SyncCheckpoint, SyncRestored
from tieredckpt.devices.current import current
from tieredckpt.errors import Closed

if TYPE_CHECKING:
    from types import TracebackType

    from tieredckpt.config import StoreConfig
    from tieredckpt.engine.exporting.export import ExportInfo
    from tieredckpt.engine.inventory import Pin, StepDetails, StepInfo, TierInfo
    from tieredckpt.engine.keeping.collector import Collected
    from tieredckpt.engine.repairing.verify import Verified
    from tieredckpt.events import Event
    from tieredckpt.policy.views import Observed
    from tieredckpt.store import CheckpointStore

__all__ = ["SyncCheckpoint", "SyncRestored", "SyncStore"]

T = TypeVar("T")


class SyncStore:
    """Stores the checkpoints of a training in tiers, with calls that block until they have ended.

    ::

        store = CheckpointStore.open_sync("ckpt.toml")
        restored = store.restore(like=state)
        ...
        ckpt = store.save(step, state, metrics={"loss": loss})
        ...
        store.close()

    Or ``with CheckpointStore.open("ckpt.toml").sync() as store``, which also closes it after an exception. The work
    runs on the store's own threads, as that of a `CheckpointStore` does.
    """

    # -- life ---------------------------------------------------------------------------------------------

    def __init__(self, store: CheckpointStore) -> None:
        """Use `CheckpointStore.sync` or `CheckpointStore.open_sync`."""
        self._store = store
        self._life = store._life
        self._is_open = False

    def _open(self) -> Self:
        self._life.open_blocking()
        self._is_open = True
        return self

    def _run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        try:
            loop = self._life.loop
        except Closed:
            coroutine.close()
            raise
        return loop.call_blocking(coroutine)

    def __enter__(self) -> Self:
        if self._is_open:  # by `open_sync`
            self._is_open = False
            return self
        self._life.open_blocking()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._life.close_blocking(clean=kind is None)

    def close(self) -> None:
        """Wait until the tiers that work have every step that is due there; then release everything.

        Idempotent; concurrent calls return when the store is closed. Calls made before may end; those still running
        when everything is promoted raise `Closed`, and so do later calls. A forked process closes none of its
        parent's stores.
        """
        self._is_open = False
        self._life.close_blocking(clean=True)

    # -- saving -------------------------------------------------------------------------------------------

    def due(self, step: int) -> bool:
        """Whether the schedule wants a save after ``step``."""
        return self._store.due(step)

    def observed(self) -> Observed:
        """Observations for schedules: the stall of a save, the lag of promotion, failures, and the ETTR so far."""
        return self._store.observed()

    def signal(self, name: str, *, on: bool = True) -> None:
        """Raise a signal that policies see, such as ``"preempt"``, or withdraw it; from any thread or handler."""
        self._store.signal(name, on=on)

    def save(
        self,
        step: int,
        tree: Any,
        *,
        metrics: Mapping[str, float] | None = None,
        capture: Literal["copy", "lazy", "reference", "device", "pinned_host"] = "copy",
        overwrite: bool = False,
        replicated: Sequence[str] = (),
    ) -> SyncCheckpoint:
        """Copy ``tree`` into RAM and commit it there; slower tiers get it in the background.

        It extends the branch, or forks at the step that was restored last: see ``resume`` of `restore`.

        Args:
            step: the trainer's number, not negative.
            tree: containers of arrays and scalars; see ``docs/reference/trees.md``.
            metrics: numbers by name that policies and people look at.
            capture: ``"copy"``: on return the tree may be changed. ``"lazy"``: return at once; the tree may be changed
                after `Checkpoint.captured`, which a step of a torch optimizer calls by itself. ``"device"``,
                ``"pinned_host"``: return when JAX has begun copies there. ``"reference"``: return at once, for JAX
                arrays that are not donated before ``reached("ram")``. See ``docs/reference/trees.md``.
            overwrite: save a step number again that this branch has already.
            replicated: keys or glob patterns of leaves that are equal on all ranks, besides the configuration's.

        With several ranks, each saves its part; the step exists once all have, and the parts fit (`StepCommitted`).

        Raises:
            Invalid: a leaf or metric cannot be stored (named), or a mutable leaf captured by reference; nothing was
                saved.
            Conflict: the step was saved before on this branch.
            NoSpace, TierUnavailable: no tier can take the tree.
        """
        store, caller = self._store, current()
        saved = self._run(store._life.save(caller, step, tree, metrics, capture, overwrite, replicated))
        return SyncCheckpoint(saved, self._life.loop)

    def prepare(self, tree: Any) -> None:
        """Allocate memory for saves of trees like ``tree`` in the background, so that the first save need not wait.

        For a training that does not begin with a restore. The tree is as for `save` or the ``like`` of `restore`;
        nothing of it is read or kept. Raises `Invalid`, naming a leaf that cannot be stored.
        """
        mesh = current().mesh
        self._run(self._life.call(lambda engine: engine.prepare(tree, mesh)))

    def flush(self) -> None:
        """Wait until tiers and exports have the steps due there. Raises the error of one that fails, or has failed."""
        self._run(self._store.flush())

    # -- restoring ----------------------------------------------------------------------------------------

    def restore(
        self,
        step: int | None = None,
        *,
        keys: Sequence[str] | None = None,
        like: Any = None,
        into: Any = None,
        as_: Literal["saved", "numpy", "torch", "jax", "specs"] | None = None,
        cast: bool = False,
        copy: bool = True,
        resume: bool | None = None,
        lossy: bool = False,
    ) -> SyncRestored | None:
        """Restore a step, by default the newest, from the nearest tier: verify every chunk, and repair damage.

        The branch changes only with the next save (``resume``). With several ranks, all call it, for the same step and
        with the same ``resume``, and all or none give ``keys``; if one fails, all raise.

        Args:
            step: which; None for the newest. Waits for saves that have returned; several ranks do not wait for saves
                by reference or lazy ones. A number on several branches means the step of the branch in training.
            keys: only the leaves under these keys or glob patterns (``params/**``). Leaves of ``like`` or ``into`` that
                they do not choose come back as they are.
            like: a tree whose containers and kinds of arrays the result takes; without it, the result is plain
                dicts, lists and tuples, and arrays as ``as_`` says. A leaf `tieredckpt.AS_SAVED` of it or of ``into``
                stands for whatever the step has there.
            into: a tree of writable arrays that are filled in place, which saves the page faults of new ones. Leaves
                may be one memory where the step has the same bytes for them.
            as_: the kind of the arrays, without ``like`` and ``into``: ``"saved"`` for what each was (JAX arrays and
                PRNG keys on JAX's default device, torch tensors on the CPU), or one kind for all. None is ``"numpy"``.
                ``"specs"`` reads no array: each is an `ArraySpec`, and the rest of the tree is as it was saved.
            cast: convert arrays to the dtypes of ``like``: floats are rounded, integers must fit.
            copy: False: return at once, with read-only views where the step is in RAM; see `Restored.verified`.
            resume: True to continue training: the next save forks at the restored step. False to look: the next save
                continues as without this restore. By default it forks if its number is not above the newest step's,
                and otherwise extends the branch with a warning. Restoring part of a step only looks at it. Restoring
                the newest step cancels what an earlier restore set.
            lossy: accept a lossy copy, as a whole, if the step is not intact as it was saved, or, without ``step``, if
                the copy is of a newer one. `Restored.lossy` is set, and later saves record it. For one process only.

        Returns:
            The step, or None when the store is empty.

        Raises:
            NotFound: there is no such step or key; or only a lossy copy, without ``lossy``.
            Invalid: the step does not fit ``like`` or ``into``; all differences are listed. Or an array cannot be what
                ``as_`` says, or two leaves of ``into`` share memory for which the step has different bytes: nothing
                was changed. Or the calls of the ranks differ.
            Corrupt: an array is intact on no tier; it is named. Arrays given as ``into`` may have been changed.
            TierUnavailable: nothing was found, and a tier that may hold something does not answer.
        """
        store, caller = self._store, current()
        found = self._run(store._life.restore(caller, step, keys, like, into, as_, cast, copy, resume, lossy))
        if found is None:
            return None
        loop = self._life.loop if found.views else None
        return SyncRestored(
            found.step, found.serial, found.tree, found.metrics, found.sources, found.lossy, found, loop
        )

    # -- what there is ------------------------------------------------------------------------------------

    @property
    def tiers(self) -> tuple[str, ...]:
        """Names of the tiers, nearest first."""
        return self._store.tiers

    @property
    def config(self) -> StoreConfig:
        """The configuration in force."""
        return self._store.config

    def steps(self) -> tuple[StepInfo, ...]:
        """Every step that some tier holds, oldest save first."""
        return self._run(self._store.steps())

    def latest_step(self) -> int | None:
        """The number of the newest step of the branch, which `restore` takes; None when there is none."""
        return self._run(self._store.latest_step())

    def all_steps(self) -> tuple[int, ...]:
        """The numbers of the steps of the branch, each once, oldest save first; `steps` tells of those off it too."""
        return self._run(self._store.all_steps())

    def describe(
        self, step: int | None = None, *, serial: int | None = None, keys: Sequence[str] | None = None
    ) -> StepDetails:
        """Describe a step (by default the newest) in full, except for the arrays' values.

        Args:
            step: which; the newest without one.
            serial: which save, where the number was saved on several branches.
            keys: only the leaves under these keys or glob patterns.

        Raises:
            NotFound: there is no such step or key.
            Corrupt: its index is intact on no tier.
            TierUnavailable: the tiers that hold it do not answer.
        """
        return self._run(self._store.describe(step, serial=serial, keys=keys))

    def tier_infos(self) -> tuple[TierInfo, ...]:
        """Every tier as it is now, nearest first."""
        return self._run(self._store.tier_infos())

    def export_infos(self) -> tuple[ExportInfo, ...]:
        """Every export of the configuration as it is now, by name; empty where another process makes them."""
        return self._run(self._store.export_infos())

    def where(self, step: int | None = None) -> tuple[str, ...]:
        """The tiers that hold a step (the newest without one), nearest first. Raises `NotFound`."""
        return self._run(self._store.where(step))

    def spec(self, step: int, key: str, tier: str | None = None) -> dict[str, Any]:
        """A TensorStore spec that opens one array of a step, with stock TensorStore and without this library. It has
        none of the tier's secrets: TensorStore takes credentials from the environment. Raises `NotFound` for a step,
        tier or key that is not there.
        """
        return self._run(self._store.spec(step, key, tier))

    def subscribe(self, listener: Callable[[Event], None]) -> Callable[[], None]:
        """Call ``listener`` with every event (`tieredckpt.events`); the returned function ends that."""
        return self._store.subscribe(listener)

    # -- by hand ------------------------------------------------------------------------------------------

    def promote(self, step: int, tier: str) -> int:
        """Copy a step to a tier now, whatever the policy says; returns the bytes written. Raises `NotFound`,
        `Corrupt` when a chunk is intact nowhere, `NoSpace`, `TierUnavailable`.
        """
        return self._run(self._store.promote(step, tier))

    def evict(self, step: int, tier: str) -> None:
        """Drop a step from a tier. Raises `NotFound`; `Conflict` when it is the last good copy."""
        self._run(self._store.evict(step, tier))

    def delete(self, step: int, *, force: bool = False) -> None:
        """Delete every copy of a step, on every tier, and every save of that number on the branch.

        With several ranks, rank 0 does it for all. A process that ends meanwhile leaves the step on some tiers: call it
        again.

        Args:
            step: which; a number that is not on the branch means the newest step with that number.
            force: also delete the newest step of the branch, the last step there is, or one whose copies promise 6
                keeps; and go on if a tier does not answer, which then keeps its copies.

        Raises:
            NotFound: there is no such step.
            Conflict: it is needed, for the reason given, or is being read; nothing was deleted.
            TierUnavailable: a tier that may hold it does not answer; without ``force``, nothing was deleted.
            Invalid: on another rank than 0, or in a read-only store.
        """
        self._run(self._store.delete(step, force=force))

    def pin(self, step: int, tier: str | None = None, *, on: bool = True) -> str:
        """Keep a step on a tier, whatever its policy and its lack of room say; with ``on=False``, no longer.

        The step is copied there if need be. The pin lies on the tier, and so outlives this process; `delete` with
        ``force`` takes it away first. If the tier fails meanwhile, the pin may stay: `pins` tells.

        Args:
            step: which; ``on=False`` takes the pins of every save of that number away.
            tier: by default the slowest that holds steps as they were saved.

        Returns the tier's name. Raises as `promote`, and `Invalid` on another rank than 0 and in a read-only store.
        """
        return self._run(self._store.pin(step, tier, on=on))

    def pins(self) -> tuple[Pin, ...]:
        """The steps that are pinned on the tiers that answer, oldest save first."""
        return self._run(self._store.pins())

    def collect(self) -> list[Collected]:
        """Reclaim the space that no step needs, on every tier that works."""
        return self._run(self._store.collect())

    def verify(
        self,
        step: int | None = None,
        tier: str | None = None,
        *,
        serial: int | None = None,
        repair: bool = False,
        progress: Callable[[int], None] | None = None,
    ) -> list[Verified]:
        """Verify a step (by default the newest) on one tier, or on all that hold it: read it, compare every digest.

        Args:
            serial: which save, where the number was saved on several branches.
            repair: repair what is damaged from the tiers that have it intact.
            progress: called with the bytes of each part that was read, from any thread.
        """
        return self._run(self._store.verify(step, tier, serial=serial, repair=repair, progress=progress))

    def scrub(
        self,
        tier: str | None = None,
        *,
        repair: bool = False,
        rate: float | None = None,
        progress: Callable[[int], None] | None = None,
    ) -> list[Verified]:
        """Verify every chunk of a tier, or of all tiers, once; read ``rate`` bytes a second at most."""
        return self._run(self._store.scrub(tier, repair=repair, rate=rate, progress=progress))
