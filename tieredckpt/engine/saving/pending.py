"""Starts the saves of each ``save(capture=)``, and waits for those that go on after `save` returned."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any

from tieredckpt._arguments import checked_metrics, checked_patterns
from tieredckpt.concurrency import in_thread, outlast
from tieredckpt.devices.base import Device, Event, Stream
from tieredckpt.engine.loop import EngineLoop
from tieredckpt.engine.notify import Notification
from tieredckpt.engine.saving.call import SaveCall, Turn
from tieredckpt.engine.saving.capture import Capture, check_immutable, made_ready
from tieredckpt.engine.saving.lazy import DigestGuard, LazyCapture
from tieredckpt.engine.saving.outlet import Outlet
from tieredckpt.engine.saving.save import Saved
from tieredckpt.engine.saving.snapshot import Digests, Snapshot
from tieredckpt.engine.saving.spill import may_fit
from tieredckpt.engine.state.state import State
from tieredckpt.errors import Closed, Invalid, NoSpace, TieredCkptError
from tieredckpt.events import SaveFailed
from tieredckpt.tree.changes import held
from tieredckpt.tree.copies import Memory, copies
from tieredckpt.tree.flatten import Flat
from tieredckpt.tree.form import Flattener
from tieredckpt.tree.leaf import ArrayLeaf

__all__ = ["PendingSaves"]

_log = logging.getLogger("tieredckpt")

_COPIES: Mapping[str, Memory] = {"device": "device", "pinned_host": "pinned_host"}
"""By capture that first copies the arrays near their device: the memory for these copies."""
_CAPTURES = ("copy", "lazy", "reference", *_COPIES)


class PendingSaves:
    """The saves that have not ended. Lives on the engine's loop, but for `save`, `confirm` and `confirming`.

    A *background* save goes on after `save` returned. One that is lazy has to be *confirmed* before it is committed:
    by the trainer, or for it by a call of the store, while the trainer waits for that call and changes no array.
    """

    def __init__(
        self,
        state: State,
        save: Callable[[SaveCall, Capture, Flat], Coroutine[Any, Any, Saved]],
        not_begun: Callable[[int, BaseException], None],
        flattener: Flattener,
    ) -> None:
        """``save`` is `Engine.save`; ``not_begun`` is `Alone.not_begun`."""
        self._state = state
        self._save = save
        self._not_begun = not_begun
        self._flattener = flattener
        self._background: dict[asyncio.Task[Saved], Capture] = {}
        """Oldest first."""
        self._foreground: set[asyncio.Task[Any]] = set()
        """Calls that make a save, for whose end the trainer waits."""
        self._turns: dict[Turn, tuple[int, BaseException] | None] = {}
        """Calls of `save` whose save has not begun, oldest first; with step and error those whose save never will."""
        self._turn_ended = Notification()
        self._closing = False
        self._calls_that_wait: set[object] = set()
        """Calls, but for those of `save`, that may wait for a background save."""

    @property
    def background(self) -> set[asyncio.Task[Saved]]:
        """Saves that go on behind the trainer."""
        return set(self._background)

    # -- beginning ----------------------------------------------------------------------------------------

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
    ) -> tuple[asyncio.Task[Saved] | Saved, LazyCapture | None]:
        """See `CheckpointStore.save`; called while the trainer waits, on any loop.

        Args:
            loop: the engine's.
            streams: those on which the trainer works.

        The rest is as for `CheckpointStore.save`. Returns the result of the save, or its task if it goes on behind the
        trainer; and, for a lazy save, its capture, which the trainer confirms.
        """
        turn = Turn(asyncio.get_running_loop())
        try:
            self._turns[turn] = None
            metrics, replicated = checked_metrics(metrics), checked_patterns("replicated", replicated)
            if capture not in _CAPTURES:
                raise Invalid(f"capture is {', '.join(map(repr, _CAPTURES))}, and not {capture!r}")
            origin = self._state.branch.origin  # a restore that is called from here on comes after this save
            await self.confirm()
            call = SaveCall(
                step=step,
                metrics=metrics,
                overwrite=overwrite,
                replicated=replicated,
                origin=origin,
                at=time.monotonic(),
                streams=streams,
                turn=turn,
            )
            if capture == "copy":
                return await loop.call(self._copy(call, tree)), None
            if capture == "lazy":
                return await self._begin_lazily(loop, call, tree)
            if capture == "reference":
                check_immutable(flat := self._flatten(tree, streams))
                return await self._begin(loop, call, flat, Capture()), None
            return await self._begin_with_copies(loop, call, tree, _COPIES[capture]), None
        except BaseException as error:
            loop.soon(partial(self._refused, turn, step, error))  # in no variable, which its traceback would refer to
            raise

    async def _my_turn(self, turn: Turn) -> None:
        """Wait until earlier calls of the same loop have begun: saves are made, and ranks number them, in their order.

        Not for those of other loops, which may have stopped.
        """

        def is_next() -> bool:
            waiting = (each for each, refused in tuple(self._turns.items()) if refused is None)
            return self._closing or next((each for each in waiting if each.loop is turn.loop), turn) is turn

        await self._turn_ended.until(is_next)

    def _begins(self, turn: Turn) -> None:
        del self._turns[turn]
        asyncio.get_running_loop().call_soon(self._tell_refused)  # once the save has its turn among those of the ranks

    def _refused(self, turn: Turn, step: int, error: BaseException) -> None:
        if turn in self._turns:
            self._turns[turn] = step, error
            self._tell_refused()

    def _tell_refused(self) -> None:
        """Wake the call whose turn has come, and announce each refused call for which no earlier call is waiting."""
        self._turn_ended.notify()  # first: an announcement may fail, and no other call may wait for that
        for turn, refused in tuple(self._turns.items()):
            if refused is None:
                break
            del self._turns[turn]
            self._not_begun(*refused)

    async def _copy(self, call: SaveCall, tree: Any) -> Saved:
        """Save, and return when it is done."""
        task = asyncio.current_task()
        assert task is not None, "a coroutine runs in a task"
        self._foreground.add(task)
        try:
            try:
                await self._my_turn(call.turn)
                flat = await in_thread(self._flatten, tree, call.streams)
                await self._confirm_now()  # those of calls since this one, which it would wait for
            except BaseException as error:  # told before the next save begins
                self._refused(call.turn, call.step, error)
                raise
            self._begins(call.turn)
            return await self._save(call, Capture(), flat)
        finally:
            self._foreground.discard(task)

    async def _begin_lazily(
        self, loop: EngineLoop, call: SaveCall, tree: Any
    ) -> tuple[asyncio.Task[Saved], LazyCapture | None]:
        flat = self._flatten(tree, call.streams)
        flat = dataclasses.replace(flat, arrays=tuple(map(held, flat.arrays)))
        guard = None
        if self._state.config.lazy_guard == "digests":
            guard = await in_thread(DigestGuard, flat.arrays, partial(self._digests, flat.ready))
        lazy = LazyCapture(loop, call.step, flat.arrays, guard)
        return await self._begin(loop, call, flat, lazy), lazy

    async def _begin_with_copies(
        self, loop: EngineLoop, call: SaveCall, tree: Any, memory: Memory
    ) -> asyncio.Task[Saved] | Saved:
        """Begin a save of copies that lie in ``memory``, one save at a time; without room there, copy into RAM."""
        await loop.call(self.drained())  # or the devices would hold the copies of several saves
        flat = await in_thread(self._flattener.flatten, tree)
        try:
            arrays = await in_thread(copies, flat.arrays, memory)
        except NoSpace as error:
            _log.warning("step %d: %s; the training waits for the copy into RAM instead", call.step, error)
            return await loop.call(self._copy(call, tree))
        return await self._begin(loop, call, dataclasses.replace(flat, arrays=arrays), Capture())

    def _flatten(self, tree: Any, streams: Mapping[Device, Stream]) -> Flat:
        return made_ready(self._flattener.flatten(tree), streams)

    def _digests(self, ready: Mapping[Device, Event], leaves: Sequence[ArrayLeaf]) -> Digests:
        """Of arrays as they are now, or when their devices are ``ready``. Blocking."""
        outlet = Outlet(self._state.host_memory, ready)
        return Snapshot.of(leaves, self._state.config.chunk_size, {}, outlet=outlet).digests_now()

    async def _begin(self, loop: EngineLoop, call: SaveCall, flat: Flat, capture: Capture) -> asyncio.Task[Saved]:
        """Begin a background save; returns when the trainer may go on."""
        try:
            return await loop.call(self._begin_now(call, flat, capture))
        except BaseException as error:  # also of one that has begun: the trainer has no checkpoint of it to ask
            capture.ended(Closed(f"step {call.step} was not saved, for its call ended with {error!r}"))
            raise

    async def _begin_now(self, call: SaveCall, flat: Flat, capture: Capture) -> asyncio.Task[Saved]:
        await self._my_turn(call.turn)
        await self._confirm_now()  # or this save waits for that of a concurrent call, and so does who awaits both
        capture.stall = time.monotonic() - call.at  # the trainer goes on from here
        saving = self._save(call, capture, flat)
        task = asyncio.create_task(saving, name=f"tieredckpt save {call.step}")
        self._begins(call.turn)
        task.add_done_callback(partial(self._ended, call.step))
        self._background[task] = capture
        self._state.observation.saving[call.step] = time.time(), call.origin
        if (
            isinstance(capture, LazyCapture)
            and self._calls_that_wait
            and not may_fit(self._state.tiers[0], flat.arrays)
        ):
            with suppress(TieredCkptError):  # who waits for that call and this one could confirm neither
                await capture.captured()
        return task

    def _ended(self, step: int, task: asyncio.Task[Saved]) -> None:
        """Tell of a background save that failed by a log line and an event: there may be no caller who waits."""
        self._state.observation.saving.pop(step, None)
        if task.cancelled() or not isinstance(error := task.exception(), Exception | None):
            error = Closed(f"step {step} was not saved: the store was closed meanwhile")
        elif error is not None:
            _log.error("step %d, whose save had returned, was not saved: %s", step, error)
            self._state.events.emit(SaveFailed(step, error))
        self._background.pop(task).ended(error)

    # -- confirming lazy saves ----------------------------------------------------------------------------

    def _unconfirmed(self) -> dict[asyncio.Task[Saved], LazyCapture]:
        saves = tuple(self._background.items())  # at once: asked from the trainer's thread, too
        return {task: lazy for task, lazy in saves if isinstance(lazy, LazyCapture) and not lazy.arrays_may_change}

    async def confirm(self, *, only_past_ram: bool = False) -> None:
        """Confirm the lazy saves, on the trainer's thread: it has called the store, and changes nothing meanwhile.

        ``only_past_ram``: only those that keep other steps from a tier. The caller may be a task that waits for such
        a step beside the trainer, and the trainer goes on.
        """
        for lazy in self._unconfirmed().values():
            with suppress(TieredCkptError):
                await lazy.captured(only_past_ram=only_past_ram)

    @asynccontextmanager
    async def confirming(self, *, only_past_ram: bool = False) -> AsyncIterator[None]:
        """`confirm`, for a call in the block that waits for saves: also confirms those that begin meanwhile."""
        call = object()
        self._calls_that_wait.add(call)
        try:
            await self.confirm(only_past_ram=only_past_ram)
            yield
        finally:
            self._calls_that_wait.discard(call)

    async def _confirm_now(self) -> None:
        """`confirm` on the engine's loop, also those that begin meanwhile."""
        while left := self._unconfirmed():
            with suppress(TieredCkptError):
                await next(iter(left.values())).captured()

    # -- waiting for saves --------------------------------------------------------------------------------

    async def end(self) -> None:
        """Wait until no save is under way; a cancellation cancels the saves, and is raised when they have ended."""
        pending = self.background | self._foreground
        self._closing = True  # the loop of a call that others wait for may have stopped
        self._turn_ended.notify()
        try:
            await self._confirm_now()
            if pending:
                await asyncio.wait(pending)
        except asyncio.CancelledError:
            for task in pending:
                task.cancel()
            await outlast(asyncio.gather(*pending, return_exceptions=True))
            raise

    async def drained(self) -> None:
        """Wait until no background save is left; the trainer waits too, so lazy saves are confirmed."""
        while self._background:
            await self._confirm_now()
            if left := self.background:  # they may have ended meanwhile
                await asyncio.wait(left)

    async def drained_beside(self) -> None:
        """Wait until no background save is left but lazy ones to confirm; the trainer goes on meanwhile."""
        while left := self.background - self._unconfirmed().keys():
            await asyncio.wait(left)

    async def settled(self, step: int | None) -> None:
        """Wait for the saves that a restore of ``step``, or of the newest (None), depends on.

        Not for saves that the trainer has yet to confirm. With several ranks for none: they vote on a save later, and
        do not wait that long for each other's restores.
        """
        if self._state.membership.size > 1 or step not in (None, *self._state.observation.saving):
            return
        if left := self.background - self._unconfirmed().keys():
            await asyncio.wait(left)
