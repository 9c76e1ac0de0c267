"""`CheckpointStore`: the async face of the library."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Generator, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self

from tieredckpt.arguments import checked_metrics, checked_patterns, checked_step, chosen_keys, chosen_step
from tieredckpt.blobs.settle import in_thread
from tieredckpt.capturing import Captures
from tieredckpt.checkpoint import Checkpoint, Restored
from tieredckpt.config import RamTier, StoreConfig, load
from tieredckpt.engine.collector import Collected
from tieredckpt.engine.coordinators.auto import coordinator_of
from tieredckpt.engine.engine import Engine
from tieredckpt.engine.loop import EngineLoop
from tieredckpt.engine.ranks import Coordinator
from tieredckpt.engine.specs import array_spec
from tieredckpt.engine.verifier import Verified
from tieredckpt.engine.writer import Saved
from tieredckpt.errors import Closed, Invalid
from tieredckpt.events import Event, Events
from tieredckpt.inventory import StepDetails, StepInfo, TierInfo, describe, list_steps, list_tiers, where
from tieredckpt.policyviews import Observed
from tieredckpt.restoring import restore
from tieredckpt.tree.flatten import flatten

if TYPE_CHECKING:
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

    def __init__(self, config: StoreConfig, *, read_only: bool, ranks: Coordinator | Literal["auto"] | None) -> None:
        self._config = config
        self._ranks = None if read_only else ranks
        self._events = Events()
        self._engine = Engine(config, self._events, read_only=read_only)
        self._loop: EngineLoop | None = None
        self._captures = Captures(self._engine, self._events)

    # -- life ---------------------------------------------------------------------------------------------

    @classmethod
    def open(
        cls,
        source: str | os.PathLike[str] | Mapping[str, Any] | StoreConfig,
        *,
        read_only: bool = False,
        ranks: Coordinator | Literal["auto"] | None = "auto",
    ) -> CheckpointStore:
        """A store over the tiers of a configuration.

        Use it with ``async with``, ``await`` it, or take its blocking face with `sync`; nothing is touched
        before that.

        Args:
            source: a ``.toml`` file, a `StoreConfig` or its dict, or a path: RAM and that directory.
            read_only: look at a store, also one that another process writes to; always alone.
            ranks: the processes that make every step together: ``"auto"`` for those that torchrun, mpirun, srun or
                jax.distributed has started, None for this one alone, or a coordinator. All open the store.

        Raises:
            Invalid: of the configuration, with a line for every problem.
            NotFound: there is no such file.

        Opening raises `Conflict` when another store writes there, and a tier's own error when no tier can be
        opened at all; if some can, the others are reported as events and retried.
        """
        return cls(load(source), read_only=read_only, ranks=ranks)

    async def __aenter__(self) -> Self:
        await self._open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._close(clean=kind is None)

    def __await__(self) -> Generator[Any, None, Self]:
        return self.__aenter__().__await__()

    async def _open(self) -> None:
        loop = self._new_loop()
        try:
            await loop.call(self._engine.start(await in_thread(coordinator_of, self._ranks, self._config)))
        except BaseException:
            await in_thread(loop.stop)
            raise

    def open_blocking(self) -> None:
        """Open without an event loop; for `SyncStore`."""
        loop = self._new_loop()
        try:
            loop.call_blocking(self._engine.start(coordinator_of(self._ranks, self._config)))
        except BaseException:
            loop.stop()
            raise

    def close_blocking(self, *, clean: bool) -> None:
        """Close without an event loop; for `SyncStore`."""
        if self._loop is None:
            return
        try:
            self._loop.call_blocking(self._finish(clean=clean))
        except Closed:
            return
        finally:
            self._loop.stop()

    def _new_loop(self) -> EngineLoop:
        if self._loop is not None:
            raise Invalid("this store was opened before; make a new one with CheckpointStore.open")
        self._loop = EngineLoop("tieredckpt engine")
        return self._loop

    async def close(self) -> None:
        """Wait for what is still to be promoted, on tiers that work, and release everything. Idempotent."""
        await self._close(clean=True)

    async def _close(self, *, clean: bool) -> None:
        if self._loop is None:
            return
        try:
            await self._loop.call(self._finish(clean=clean))
        except Closed:
            return
        finally:
            await in_thread(self._loop.stop)

    async def _finish(self, *, clean: bool) -> None:
        try:
            await self._captures.end()
        except asyncio.CancelledError:
            await self._engine.close(flush=False, keep_ram=True)
            raise
        nearest = self._config.tiers[0]
        await self._engine.close(flush=clean, keep_ram=not isinstance(nearest, RamTier) or nearest.keeps(clean=clean))

    def sync(self) -> SyncStore:
        """The blocking face of this store, for trainers without an event loop."""
        from tieredckpt.sync import SyncStore  # it is built on this module

        return SyncStore(self)

    @property
    def engine_loop(self) -> EngineLoop:
        """Where the store's work runs. Raises `Closed` before opening."""
        if self._loop is None:
            raise Closed("the store is not open yet: use `async with`, or await it")
        return self._loop

    @property
    def captures(self) -> Captures:
        """The saves under way behind the trainer; for the library's own parts."""
        return self._captures

    @property
    def engine(self) -> Engine:
        """What does the work; for the library's own parts."""
        return self._engine

    # -- saving -------------------------------------------------------------------------------------------

    def due(self, step: int) -> bool:
        """Whether the schedule wants a save after ``step``."""
        self.engine_loop  # noqa: B018  # raises Closed before opening
        return self._engine.is_due(checked_step(step))

    def observed(self) -> Observed:
        """What schedules see: the stall of a save, the lag of promotion, failures, and the ETTR so far."""
        self.engine_loop  # noqa: B018  # raises Closed before opening
        return self._engine.state.observe()

    def signal(self, name: str, *, on: bool = True) -> None:
        """Raise a signal that policies see, such as ``"preempt"``, or withdraw it; from any thread or handler."""
        loop = self.engine_loop
        self._engine.state.signal(name, on=on)
        loop.soon(self._engine.state.changed.beat)
        if (ranked := self._engine.ranked) is not None:
            loop.soon(partial(ranked.reports.signalled, name, on=on))

    async def save(
        self,
        step: int,
        tree: Any,
        *,
        metrics: Mapping[str, float] | None = None,
        capture: Literal["copy", "reference"] = "copy",
        overwrite: bool = False,
        replicated: Sequence[str] = (),
    ) -> Checkpoint:
        """Copy ``tree`` into RAM and commit it there; everything slower happens behind.

        Args:
            step: the trainer's number, not negative.
            tree: containers of arrays and scalars; see ``docs/reference/trees.md``.
            metrics: numbers by name that policies and people look at.
            capture: ``"copy"``: on return the tree may be changed. ``"reference"``: return at once and copy
                behind; for trees of immutable arrays (JAX) that are not donated before ``reached("ram")``.
            overwrite: save a step number again that this line has already.
            replicated: keys or glob patterns of leaves that all ranks have alike, besides those of the
                configuration: each rank stores its share of them.

        Of several ranks, each saves what it has; the step exists once all have, and it fits (`StepAgreed`).

        Raises:
            Invalid: a leaf or metric (named) cannot be stored, or not by reference; nothing was saved.
            Conflict: the step was saved before on this line.
            NoSpace, TierUnavailable: no tier can take the tree.
        """
        step, given = checked_step(step), checked_metrics(metrics)
        replicated = checked_patterns("replicated", replicated)
        if capture == "reference":
            begin = self._captures.begin
            saving = await begin(self.engine_loop, step, tree, given, overwrite=overwrite, replicated=replicated)
            return Checkpoint(step, self._engine, self.engine_loop, saving)
        if capture != "copy":
            raise Invalid(f"capture is 'copy' or 'reference', not {capture!r}")
        saved = await self.engine_loop.call(self._save(step, tree, given, overwrite, replicated))
        return Checkpoint(step, self._engine, self.engine_loop, saved)

    async def _save(
        self, step: int, tree: Any, metrics: Mapping[str, float], overwrite: bool, replicated: Sequence[str]
    ) -> Saved:
        flat = await in_thread(flatten, tree)
        return await self._engine.save(step, flat, metrics, overwrite=overwrite, replicated=replicated)

    async def flush(self) -> None:
        """Wait until every tier holds what is due on it. Raises the error of a tier that fails."""
        await self.engine_loop.call(self._flush())

    async def _flush(self) -> None:
        await self._captures.settled()
        await self._engine.flush()

    # -- restoring ----------------------------------------------------------------------------------------

    async def restore(
        self,
        step: int | None = None,
        *,
        keys: Sequence[str] | None = None,
        like: Any = None,
        into: Any = None,
        copy: bool = True,
        resume: bool | None = None,
    ) -> Restored | None:
        """Bring a step back: the newest from the nearest tier, every chunk verified, damage mended.

        A call of all ranks, which restore one step; if one fails, all raise.

        Args:
            step: which; None for the newest. A number that was saved on several lines means the live one's.
            keys: only the leaves under these keys or glob patterns (``params/**``).
            like: a tree whose containers and kinds of arrays the result takes; without it, the result is plain
                dicts, lists, tuples and NumPy arrays.
            into: a tree of writable arrays that are filled in place, which saves the page faults of new ones.
            copy: False: read-only views of RAM where the step lies there, at once; see `Restored.verified`.
            resume: whether saves from now on continue the restored step's line, and what was saved after it
                counts as abandoned; by default unless ``keys`` are given.

        Returns:
            The step, or None when the store is empty.

        Raises:
            NotFound: there is no such step or key.
            Invalid: the step does not fit ``like`` or ``into``; missing, extra and mismatched keys are listed.
            Corrupt: an array is intact on no tier; it is named. Arrays given as ``into`` may have been changed.
            TierUnavailable: nothing was found, and a tier that may hold something does not answer.
        """
        if like is not None and into is not None:
            raise Invalid("give `like` or `into`, not both: `into` says already what the tree looks like")
        if into is not None and not copy:
            raise Invalid("copy=False makes views of RAM, so there is nothing to fill `into` with")
        step, keys = chosen_step(step), chosen_keys(keys)
        resume = keys is None if resume is None else resume
        return await self.engine_loop.call(
            restore(self._engine, self.engine_loop, step, keys, like, into, copy=copy, resume=resume)
        )

    # -- what there is ------------------------------------------------------------------------------------

    @property
    def tiers(self) -> tuple[str, ...]:
        """Names of the tiers, nearest first."""
        return tuple(tier.name for tier in self._config.tiers)

    @property
    def config(self) -> StoreConfig:
        """The configuration in force."""
        return self._config

    async def steps(self) -> tuple[StepInfo, ...]:
        """Every step that some tier holds, oldest save first."""
        return await self.engine_loop.call(list_steps(self._engine.state))

    async def describe(
        self, step: int | None = None, *, serial: int | None = None, keys: Sequence[str] | None = None
    ) -> StepDetails:
        """A step (the newest without one) in full, but for the arrays' values.

        Args:
            step: which; the newest without one.
            serial: which save, where the number was saved on several lines.
            keys: only the leaves under these keys or glob patterns.

        Raises:
            NotFound: there is no such step or key.
            Corrupt: its index is intact on no tier.
            TierUnavailable: the tiers that hold it do not answer.
        """
        return await self.engine_loop.call(describe(self._engine.state, chosen_step(step), serial, chosen_keys(keys)))

    async def tier_infos(self) -> tuple[TierInfo, ...]:
        """Every tier as it is now, nearest first."""
        return await self.engine_loop.call(list_tiers(self._engine.state))

    async def where(self, step: int | None = None) -> tuple[str, ...]:
        """The tiers that hold a step (the newest without one), nearest first. Raises `NotFound`."""
        return await self.engine_loop.call(where(self._engine.state, chosen_step(step)))

    async def spec(self, step: int, key: str, tier: str | None = None) -> dict[str, Any]:
        """A TensorStore spec that opens one array of a step without this library. It has no secret of the tier's:
        credentials come from the environment. Raises `NotFound` for a step, tier or key that is not there.
        """
        return await self.engine_loop.call(array_spec(self._engine.state, checked_step(step), key, tier))

    def subscribe(self, listener: Callable[[Event], None]) -> Callable[[], None]:
        """Call ``listener`` with every event (`tieredckpt.events`); the returned function ends that."""
        return self._events.subscribe(listener)

    # -- by hand ------------------------------------------------------------------------------------------

    async def promote(self, step: int, tier: str) -> int:
        """Copy a step to a tier now, whatever the policy says; returns the bytes written. Raises `NotFound`,
        `Corrupt` when a chunk is intact nowhere, `NoSpace`, `TierUnavailable`.
        """
        return await self.engine_loop.call(self._engine.by_hand.promote(checked_step(step), tier))

    async def evict(self, step: int, tier: str) -> None:
        """Drop a step from a tier. Raises `NotFound`; `Conflict` when it is the last good copy."""
        await self.engine_loop.call(self._engine.by_hand.evict(checked_step(step), tier))

    async def collect(self) -> list[Collected]:
        """Reclaim the space that no step needs, on every tier that works."""
        return await self.engine_loop.call(self._engine.by_hand.collect())

    async def verify(
        self,
        step: int | None = None,
        tier: str | None = None,
        *,
        serial: int | None = None,
        repair: bool = False,
        progress: Callable[[int], None] | None = None,
    ) -> list[Verified]:
        """Read all of a step (the newest) on one tier, or on every tier that holds it, and compare every digest.

        Args:
            serial: which save, where the number was saved on several lines.
            repair: mend what is damaged from the tiers that have it intact.
            progress: called with the bytes of each part that was read, from any thread.
        """
        return await self.engine_loop.call(
            self._engine.by_hand.verify(chosen_step(step), serial, tier, repair=repair, progress=progress)
        )

    async def scrub(
        self,
        tier: str | None = None,
        *,
        repair: bool = False,
        rate: float | None = None,
        progress: Callable[[int], None] | None = None,
    ) -> list[Verified]:
        """Verify all that a tier, or every tier, holds, each chunk once, reading ``rate`` bytes a second at most."""
        return await self.engine_loop.call(
            self._engine.by_hand.scrub(tier, repair=repair, rate=rate, progress=progress)
        )
