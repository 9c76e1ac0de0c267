"""`CheckpointStore`: the async face of the library."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, Self

from tieredckpt._arguments import checked_listener, checked_patterns, checked_step
from tieredckpt.devices.current import current

if TYPE_CHECKING:  # what a store needs is imported when one is opened
    import os

    from tieredckpt._life import StoreLife
    from tieredckpt.checkpoint import Checkpoint, Restored
    from tieredckpt.config import StoreConfig
    from tieredckpt.engine.exporting.export import ExportInfo
    from tieredckpt.engine.inventory import Pin, StepDetails, StepInfo, TierInfo
    from tieredckpt.engine.keeping.collector import Collected
    from tieredckpt.engine.ranks.communicator import Communicator
    from tieredckpt.engine.repairing.verify import Verified
    from tieredckpt.events import Event
    from tieredckpt.policy.views import Observed
    from tieredckpt.sync import SyncStore

__all__ = ["CheckpointStore"]


class CheckpointStore:
    """Stores the checkpoints of a training in tiers.

    ::

        async with CheckpointStore.open("ckpt.toml") as store:
            restored = await store.restore(like=state)
            ...
            ckpt = await store.save(step, state, metrics={"loss": loss})

    Made by `open`; usable from any event loop and thread. All work happens on the store's own loop and threads.
    """

    def __init__(self, life: StoreLife) -> None:
        """Use `open`."""
        self._life = life

    # -- life ---------------------------------------------------------------------------------------------

    @classmethod
    def open(
        cls,
        source: str | os.PathLike[str] | Mapping[str, Any] | StoreConfig,
        *,
        read_only: bool = False,
        ranks: Communicator | Literal["auto"] | None = "auto",
        takeover: bool = False,
    ) -> CheckpointStore:
        """Make a store of the tiers of a configuration; nothing is read or written yet.

        Open it with ``async with`` or ``await``, or through its blocking form, `sync`.

        Args:
            source: a ``.toml`` file, a `StoreConfig` or its dict, a path: RAM and that directory, or a URL such as
                ``s3://bucket/run``: RAM and that object store.
            read_only: only look. Another process may write to the store, or create it later; each call tells what
                there is when it is made. ``ranks`` has no effect.
            ranks: the processes that make every step together: ``"auto"`` for those that torchrun, mpirun, srun or
                jax.distributed has started, None for this one alone, or a communicator. All open the store.
            takeover: first close a store that this process has open there, such as that of an earlier notebook cell.

        Raises:
            Invalid: the configuration is wrong; the message has a line for every problem.
            NotFound: there is no such file.

        Opening raises `Conflict` when another store writes there, and a tier's own error when no tier can be
        opened at all; if some can, the others are reported as events and retried.

        The library closes a store that nobody refers to any more, as after an exception, or that is open when the
        process ends. Steps that are on no other tier then stay in RAM.
        """
        from tieredckpt._life import StoreLife
        from tieredckpt.config import load

        return cls(StoreLife(load(source), read_only=read_only, ranks=ranks, takeover=takeover))

    @classmethod
    def open_sync(
        cls,
        source: str | os.PathLike[str] | Mapping[str, Any] | StoreConfig,
        *,
        read_only: bool = False,
        ranks: Communicator | Literal["auto"] | None = "auto",
        takeover: bool = False,
    ) -> SyncStore:
        """Open a store in its blocking form, for programs without an event loop and without a ``with`` block.

        Close it with `SyncStore.close`, or use it in ``with``. Arguments and errors are those of `open`.
        """
        return cls.open(source, read_only=read_only, ranks=ranks, takeover=takeover).sync()._open()

    async def __aenter__(self) -> Self:
        await self._life.open()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        await self._life.close(clean=kind is None)

    def __await__(self) -> Generator[Any, None, Self]:
        return self.__aenter__().__await__()

    async def close(self) -> None:
        """Wait until the tiers that work have every step that is due there; then release everything.

        Idempotent; concurrent calls return when the store is closed. Calls made before may end; those still running
        when everything is promoted raise `Closed`, and so do later calls. A forked process closes none of its
        parent's stores.
        """
        await self._life.close(clean=True)

    def sync(self) -> SyncStore:
        """The blocking face of this store, for trainers without an event loop; open it with ``with``."""
        from tieredckpt.sync import SyncStore  # it is built on this module

        return SyncStore(self)

    # -- saving -------------------------------------------------------------------------------------------

    def due(self, step: int) -> bool:
        """Whether the schedule wants a save after ``step``."""
        return self._life.open_engine.mode.is_due(checked_step(step))

    def observed(self) -> Observed:
        """Observations for schedules: the stall of a save, the lag of promotion, failures, and the ETTR so far."""
        return self._life.open_engine.state.observe()

    def signal(self, name: str, *, on: bool = True) -> None:
        """Raise a signal that policies see, such as ``"preempt"``, or withdraw it; from any thread or handler."""
        loop, engine = self._life.loop, self._life.engine
        engine.state.observation.signal(name, on=on)
        loop.soon(engine.state.changed.notify)
        loop.soon(partial(engine.mode.signalled, name, on=on))

    async def save(
        self,
        step: int,
        tree: Any,
        *,
        metrics: Mapping[str, float] | None = None,
        capture: Literal["copy", "lazy", "reference", "device", "pinned_host"] = "copy",
        overwrite: bool = False,
        replicated: Sequence[str] = (),
    ) -> Checkpoint:
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
        return await self._life.save(current(), step, tree, metrics, capture, overwrite, replicated)

    async def prepare(self, tree: Any) -> None:
        """Allocate memory for saves of trees like ``tree`` in the background, so that the first save need not wait.

        For a training that does not begin with a restore. The tree is as for `save` or the ``like`` of `restore`;
        nothing of it is read or kept. Raises `Invalid`, naming a leaf that cannot be stored.
        """
        mesh = current().mesh
        await self._life.call(lambda engine: engine.prepare(tree, mesh))

    async def flush(self) -> None:
        """Wait until tiers and exports have the steps due there. Raises the error of one that fails, or has failed."""
        await self._life.change(lambda engine: engine.flush())

    # -- restoring ----------------------------------------------------------------------------------------

    async def restore(
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
    ) -> Restored | None:
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
        return await self._life.restore(current(), step, keys, like, into, as_, cast, copy, resume, lossy)

    # -- what there is ------------------------------------------------------------------------------------

    @property
    def tiers(self) -> tuple[str, ...]:
        """Names of the tiers, nearest first."""
        return tuple(tier.name for tier in self._life.config.tiers)

    @property
    def config(self) -> StoreConfig:
        """The configuration in force."""
        return self._life.config

    async def steps(self) -> tuple[StepInfo, ...]:
        """Every step that some tier holds, oldest save first."""
        return await self._life.look(lambda engine: engine.inventory.steps())

    async def latest_step(self) -> int | None:
        """The number of the newest step of the branch, which `restore` takes; None when there is none."""
        return (await self.all_steps() or (None,))[-1]

    async def all_steps(self) -> tuple[int, ...]:
        """The numbers of the steps of the branch, each once, oldest save first; `steps` tells of those off it too."""
        return await self._life.look(lambda engine: engine.inventory.numbers())

    async def describe(
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
        step = None if step is None else checked_step(step)
        keys = None if keys is None else checked_patterns("keys", keys)
        return await self._life.look(lambda engine: engine.inventory.describe(step, serial, keys))

    async def tier_infos(self) -> tuple[TierInfo, ...]:
        """Every tier as it is now, nearest first."""
        return await self._life.look(lambda engine: engine.inventory.tiers(), packs=True)

    async def export_infos(self) -> tuple[ExportInfo, ...]:
        """Every export of the configuration as it is now, by name; empty where another process makes them."""
        return await self._life.look(lambda engine: engine.export_infos())

    async def where(self, step: int | None = None) -> tuple[str, ...]:
        """The tiers that hold a step (the newest without one), nearest first. Raises `NotFound`."""
        step = None if step is None else checked_step(step)
        return await self._life.look(lambda engine: engine.inventory.where(step))

    async def spec(self, step: int, key: str, tier: str | None = None) -> dict[str, Any]:
        """A TensorStore spec that opens one array of a step, with stock TensorStore and without this library. It has
        none of the tier's secrets: TensorStore takes credentials from the environment. Raises `NotFound` for a step,
        tier or key that is not there.
        """
        step = checked_step(step)
        return await self._life.look(lambda engine: engine.inventory.spec(step, key, tier))

    def subscribe(self, listener: Callable[[Event], None]) -> Callable[[], None]:
        """Call ``listener`` with every event (`tieredckpt.events`); the returned function ends that."""
        return self._life.events.subscribe(checked_listener(listener))

    # -- by hand ------------------------------------------------------------------------------------------

    async def promote(self, step: int, tier: str) -> int:
        """Copy a step to a tier now, whatever the policy says; returns the bytes written. Raises `NotFound`,
        `Corrupt` when a chunk is intact nowhere, `NoSpace`, `TierUnavailable`.
        """
        return await self._life.change(lambda engine: engine.admin.promote(checked_step(step), tier))

    async def evict(self, step: int, tier: str) -> None:
        """Drop a step from a tier. Raises `NotFound`; `Conflict` when it is the last good copy."""
        await self._life.change(lambda engine: engine.admin.evict(checked_step(step), tier))

    async def delete(self, step: int, *, force: bool = False) -> None:
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
        await self._life.change(lambda engine: engine.admin.delete(checked_step(step), force=force))

    async def pin(self, step: int, tier: str | None = None, *, on: bool = True) -> str:
        """Keep a step on a tier, whatever its policy and its lack of room say; with ``on=False``, no longer.

        The step is copied there if need be. The pin lies on the tier, and so outlives this process; `delete` with
        ``force`` takes it away first. If the tier fails meanwhile, the pin may stay: `pins` tells.

        Args:
            step: which; ``on=False`` takes the pins of every save of that number away.
            tier: by default the slowest that holds steps as they were saved.

        Returns the tier's name. Raises as `promote`, and `Invalid` on another rank than 0 and in a read-only store.
        """
        return await self._life.change(lambda engine: engine.admin.pin(checked_step(step), tier, on=on))

    async def pins(self) -> tuple[Pin, ...]:
        """The steps that are pinned on the tiers that answer, oldest save first."""
        return await self._life.look(lambda engine: engine.inventory.pins())

    async def collect(self) -> list[Collected]:
        """Reclaim the space that no step needs, on every tier that works."""
        return await self._life.change(lambda engine: engine.admin.collect())

    async def verify(
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
        step = None if step is None else checked_step(step)
        look = partial(self._life.look, repair=repair)
        return await look(lambda engine: engine.admin.verify(step, serial, tier, repair=repair, progress=progress))

    async def scrub(
        self,
        tier: str | None = None,
        *,
        repair: bool = False,
        rate: float | None = None,
        progress: Callable[[int], None] | None = None,
    ) -> list[Verified]:
        """Verify every chunk of a tier, or of all tiers, once; read ``rate`` bytes a second at most."""
        look = partial(self._life.look, packs=True, repair=repair)
        return await look(lambda engine: engine.admin.scrub(tier, repair=repair, rate=rate, progress=progress))
