"""Tracks saves under way, also those that go on after `save` returned: by reference, lazy, or of copies on a device."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from tieredckpt._arguments import checked_metrics, checked_patterns
from tieredckpt.concurrency import in_thread, outlast
from tieredckpt.devices.base import Device, Event, Stream
from tieredckpt.engine.loop import EngineLoop, Latch
from tieredckpt.engine.saving.lazy import LazyMoment
from tieredckpt.engine.saving.moment import Moment, made_ready
from tieredckpt.engine.saving.outlet import Outlet
from tieredckpt.engine.saving.save import Saved
from tieredckpt.engine.saving.snapshot import Digests, Snapshot
from tieredckpt.engine.saving.spill import may_fit
from tieredckpt.engine.state.branch import Origin
from tieredckpt.engine.state.state import State
from tieredckpt.errors import Closed, Invalid, NoSpace, TieredCkptError
from tieredckpt.events import SaveFailed
from tieredckpt.tree.changes import held
from tieredckpt.tree.copies import Memory, copies
from tieredckpt.tree.flatten import Flat
from tieredckpt.tree.form import Flattener
from tieredckpt.tree.leaf import ArrayLeaf

__all__ = ["Captures", "check_immutable"]

_log = logging.getLogger("tieredckpt")

_COPIES: Mapping[str, Memory] = {"device": "device", "pinned_host": "pinned_host"}
"""By capture that first copies the arrays near their device: the memory for these copies."""
_CAPTURES = ("copy", "lazy", "reference", *_COPIES)


def check_immutable(flat: Flat) -> None:
    """Raise `Invalid`, naming them, for arrays that can change after a save by reference has returned."""
    mutable = list(dict.fromkeys(leaf.array for leaf in flat.arrays if not leaf.immutable))
    if mutable:
        raise Invalid(
            f"capture='reference' needs immutable arrays, and {', '.join(map(repr, mutable[:5]))} "
            f"({len(mutable)} in all) can change; use capture='copy'"
        )


@dataclass(frozen=True, slots=True)
class _Call:
    """What the trainer wants saved."""

    step: int
    tree: Any
    metrics: Mapping[str, float]
    overwrite: bool
    replicated: Sequence[str]
    streams: Mapping[Device, Stream]
    begun: Latch
    """Open once the save has begun: from then on, it tells other ranks itself how it ends."""


class Captures:
    """The saves under way. Lives on the engine's loop, but for `save`."""

    def __init__(
        self,
        state: State,
        save: Callable[..., Awaitable[Saved]],
        not_begun: Callable[[int, BaseException], None],
        flattener: Flattener,
    ) -> None:
        """``save`` is `Engine.save`; ``not_begun`` is `Alone.not_begun`."""
        self._state = state
        self._save = save
        self._not_begun = not_begun
        self._flattener = flattener
        self.pending: set[asyncio.Task[Saved]] = set()
        """Saves that go on behind the trainer."""
        self._lazy: dict[LazyMoment, asyncio.Task[Saved]] = {}
        """Those of them that the trainer has to confirm, oldest first."""
        self._waiting: set[object] = set()
        """Calls that may wait for a save under way."""
        self._awaited: set[asyncio.Task[Any]] = set()
        """Saves that the trainer waits for; a close of the store beside it waits for them, too."""

    async def save(
        self,
        loop: EngineLoop,
        streams: Mapping[Device, Stream],
        step: int,
        tree: Any,
        metrics: Mapping[str, float] | None,
        capture: str,
        overwrite: bool,
        replicated: Sequence[str],
    ) -> tuple[asyncio.Task[Saved] | Saved, LazyMoment | None]:
        """See `CheckpointStore.save`; called while the trainer waits, on any loop.

        Args:
            loop: the engine's.
            streams: those on which the trainer works.

        The rest is as for `CheckpointStore.save`. Returns the result of the save, or its task if it goes on behind the
        trainer; and, for a lazy save, the moment that the trainer confirms.
        """
        begun = Latch()
        try:
            call = _Call(
                step,
                tree,
                checked_metrics(metrics),
                overwrite,
                checked_patterns("replicated", replicated),
                streams,
                begun,
            )
            if capture not in _CAPTURES:
                raise Invalid(f"capture is {', '.join(map(repr, _CAPTURES))}, and not {capture!r}")
            await self.confirmed()
            if capture == "copy":
                return await loop.call(self._copy(call)), None
            if (memory := _COPIES.get(capture)) is not None:
                return await self._begin_with_copies(loop, call, memory), None
            return await self._begin(loop, call, lazily=capture == "lazy")
        except BaseException as error:
            loop.soon(partial(self._refused, begun, step, error))  # in no variable, which its traceback would refer to
            raise

    def _refused(self, begun: Latch, step: int, error: BaseException) -> None:
        if not begun.is_open:
            self._not_begun(step, error)

    @asynccontextmanager
    async def awaiting(self, *, only_past_ram: bool = False) -> AsyncIterator[None]:
        """`confirmed`, for a call in the block that waits for saves: also confirms those that begin meanwhile."""
        call = object()
        self._waiting.add(call)
        try:
            await self.confirmed(only_past_ram=only_past_ram)
            yield
        finally:
            self._waiting.discard(call)

    async def confirmed(self, *, only_past_ram: bool = False) -> None:
        """Confirm the lazy saves, on the trainer's thread: it has called the store, and changes nothing meanwhile.

        ``only_past_ram``: only those that keep other steps from a tier. The caller may be a task that waits for such
        a step beside the trainer, and the trainer goes on.
        """
        for lazy in tuple(self._lazy):
            with suppress(TieredCkptError):
                await lazy.captured(only_past_ram=only_past_ram)

    async def _copy(self, call: _Call) -> Saved:
        """Save, and return when it is done."""
        task = asyncio.current_task()
        assert task is not None, "a coroutine runs in a task"
        self._awaited.add(task)
        try:
            origin = self._state.branch.origin  # a restore that is called from here on comes after this save
            flat = await in_thread(self._flattener.flatten, call.tree)
            if call.streams:
                flat = await in_thread(made_ready, flat, call.streams)
            await self._resolve_lazy()  # of calls since this one, which it would wait for
            call.begun.open()
            return await self._made(call, flat, origin, Moment())
        finally:
            self._awaited.discard(task)

    async def _begin(
        self, loop: EngineLoop, call: _Call, *, lazily: bool
    ) -> tuple[asyncio.Task[Saved], LazyMoment | None]:
        """Begin a save. Raises `Invalid` as flattening and `check_immutable` do."""
        called_at = time.monotonic()
        flat = made_ready(self._flattener.flatten(call.tree), call.streams)
        lazy = None
        if lazily:
            flat = dataclasses.replace(flat, arrays=tuple(map(held, flat.arrays)))
            wanted = self._state.config.lazy_guard == "digests"
            digests_now = partial(in_thread, self._digests, flat.ready)
            digests = await loop.call(digests_now(flat.arrays)) if wanted else None
            lazy = LazyMoment(loop, call.step, flat.arrays, digests, digests_now)
        else:
            check_immutable(flat)
        return await self._begun(loop, call, flat, self._state.branch.origin, called_at, lazy), lazy

    async def _begin_with_copies(self, loop: EngineLoop, call: _Call, memory: Memory) -> asyncio.Task[Saved] | Saved:
        """Begin a save of copies that lie in ``memory``, one save at a time; without room there, copy into RAM.

        Raises `Invalid` as flattening and `copies` do.
        """
        called_at = time.monotonic()
        origin = self._state.branch.origin
        await loop.call(self.drained())  # or the devices would hold the copies of several saves
        flat = await in_thread(self._flattener.flatten, call.tree)
        try:
            arrays = await in_thread(copies, flat.arrays, memory)
        except NoSpace as error:
            _log.warning("step %d: %s; the training waits for the copy into RAM instead", call.step, error)
            return await loop.call(self._copy(call))
        return await self._begun(loop, call, dataclasses.replace(flat, arrays=arrays), origin, called_at)

    async def _begun(
        self,
        loop: EngineLoop,
        call: _Call,
        flat: Flat,
        origin: Origin | None,
        called_at: float,
        lazy: LazyMoment | None = None,
    ) -> asyncio.Task[Saved]:
        call = dataclasses.replace(call, tree=None)  # a save of copies does not keep what was copied

        async def begun() -> asyncio.Task[Saved]:
            await self._resolve_lazy()  # or this save waits for that of a concurrent call, and so does who awaits both
            stall = time.monotonic() - called_at  # the trainer goes on from here
            if lazy is not None:
                lazy.returns(stall)
            moment = lazy or Moment(stall=stall)
            call.begun.open()
            task = self._start(call.step, partial(self._made, call, flat, origin, moment), origin, moment)
            if lazy is not None and self._waiting and not may_fit(self._state.tiers[0], flat.arrays):
                with suppress(TieredCkptError):  # who waits for that call and this one could confirm neither
                    await lazy.captured()
            return task

        try:
            return await loop.call(begun())
        except BaseException as error:
            if lazy is not None:  # also one that has begun: the trainer has no checkpoint of it to ask
                lazy.ended(Closed(f"step {call.step} was not saved, for its call ended with {error!r}"))
            raise

    def _digests(self, ready: Mapping[Device, Event], leaves: Sequence[ArrayLeaf]) -> Digests:
        """Of arrays as they are now, or when their devices are ``ready``. Blocking."""
        outlet = Outlet(self._state.host_memory, ready)
        return Snapshot.of(leaves, self._state.config.chunk_size, {}, outlet=outlet).digests_now()

    async def _made(self, call: _Call, flat: Flat, origin: Origin | None, moment: Moment) -> Saved:
        how = {"overwrite": call.overwrite, "replicated": call.replicated}
        return await self._save(call.step, flat, call.metrics, origin=origin, moment=moment, **how)

    def _start(
        self, step: int, work: Callable[[], Awaitable[Saved]], origin: Origin | None, moment: Moment
    ) -> asyncio.Task[Saved]:
        """Save in the background; a failure is logged and emitted as an event, for there may be no waiting caller."""

        async def save() -> Saved:
            failure: Exception | None = Closed(f"step {step} was not saved: the store was closed meanwhile")
            try:
                saved = await work()
                failure = None
                return saved
            except Exception as error:
                failure = error
                _log.error("step %d, whose save had returned, was not saved: %s", step, error)
                self._state.events.emit(SaveFailed(step, error))
                raise
            finally:
                saving.pop(step, None)
                moment.ended(failure)
                if isinstance(moment, LazyMoment):
                    self._lazy.pop(moment, None)

        saving = self._state.observation.saving
        saving[step] = time.time(), origin
        task = asyncio.create_task(save(), name=f"tieredckpt save {step}")
        self.pending.add(task)
        if isinstance(moment, LazyMoment):
            self._lazy[moment] = task
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Saved]) -> None:
        self.pending.discard(task)
        if not task.cancelled():
            task.exception()  # reported as an event; `reached` raises it again

    async def end(self) -> None:
        """Wait until no save is under way; a cancellation cancels the saves, and is raised when they have ended."""
        pending = self.pending | self._awaited
        try:
            await self._resolve_lazy()
            if pending:
                await asyncio.wait(pending)
        except asyncio.CancelledError:
            for task in pending:
                task.cancel()
            await outlast(asyncio.gather(*pending, return_exceptions=True))
            raise

    async def drained(self) -> None:
        """Wait until no save is under way; the trainer waits too, so lazy saves are confirmed."""
        while self.pending:
            await self._resolve_lazy()
            if left := set(self.pending):  # they may have ended meanwhile
                await asyncio.wait(left)

    async def settled(self, step: int | None) -> None:
        """Wait for the saves that a restore of ``step``, or of the newest (None), depends on.

        Not for saves that the trainer has yet to confirm. With several ranks for none: they vote on a save later, and
        do not wait that long for each other's restores.
        """
        if self._state.membership.size > 1 or step not in (None, *self._state.observation.saving):
            return
        if left := self.pending.difference(task for lazy, task in self._lazy.items() if lazy.may_copy_again):
            await asyncio.wait(left)

    async def drained_beside(self) -> None:
        """Wait until no save is under way except those that the trainer has to confirm; it goes on meanwhile."""
        while left := self.pending.difference(self._lazy.values()):
            await asyncio.wait(left)

    async def _resolve_lazy(self) -> None:
        """Confirm the lazy saves, also those that begin meanwhile: the trainer has called the store and waits."""
        while left := [lazy for lazy in self._lazy if lazy.may_copy_again]:
            await left[0].resolve()
