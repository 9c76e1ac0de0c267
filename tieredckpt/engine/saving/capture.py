"""The saves under way, and those that go on after they returned: immutable arrays, captured by reference."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any

from tieredckpt.concurrency import in_thread, outlast
from tieredckpt.engine.loop import EngineLoop
from tieredckpt.engine.saving.save import Saved
from tieredckpt.engine.state.branch import Origin
from tieredckpt.engine.state.state import State
from tieredckpt.errors import Invalid
from tieredckpt.events import SaveFailed
from tieredckpt.tree.flatten import Flat
from tieredckpt.tree.form import Flattener

__all__ = ["Captures", "check_immutable"]

_log = logging.getLogger("tieredckpt")


def check_immutable(flat: Flat) -> None:
    """Raise `Invalid`, naming them, for arrays that can change after a save by reference has returned."""
    mutable = list(dict.fromkeys(leaf.array for leaf in flat.arrays if not leaf.immutable))
    if mutable:
        raise Invalid(
            f"capture='reference' needs immutable arrays, and {', '.join(map(repr, mutable[:5]))} "
            f"({len(mutable)} in all) can change; use capture='copy'"
        )


class Captures:
    """The saves under way behind the trainer. Lives on the engine's loop, but for `begin`."""

    def __init__(self, state: State, save: Callable[..., Awaitable[Saved]]) -> None:
        """``save`` is `Engine.save`."""
        self._state = state
        self._save = save
        self._flattener = Flattener()
        self.pending: set[asyncio.Task[Saved]] = set()
        """Saves that go on behind the trainer."""
        self._awaited: set[asyncio.Task[Any]] = set()
        """Saves that the trainer waits for, and so does who closes the store beside it."""

    async def copy(
        self, step: int, tree: Any, metrics: Mapping[str, float], *, overwrite: bool, replicated: Sequence[str]
    ) -> Saved:
        """Save, and return when it is done. Raises `Invalid` as flattening does, and as `Engine.save`."""
        task = asyncio.current_task()
        assert task is not None, "a coroutine runs in a task"
        self._awaited.add(task)
        try:
            origin = self._state.branch.origin  # a restore that is called from here on comes after this save
            flat = await in_thread(self._flattener.flatten, tree)
            return await self._save(step, flat, metrics, overwrite=overwrite, origin=origin, replicated=replicated)
        finally:
            self._awaited.discard(task)

    async def begin(
        self,
        loop: EngineLoop,
        step: int,
        tree: Any,
        metrics: Mapping[str, float],
        *,
        overwrite: bool,
        replicated: Sequence[str],
    ) -> asyncio.Task[Saved]:
        """Begin a save, from the trainer's thread. Raises `Invalid` as flattening and `check_immutable` do."""
        called_at = time.monotonic()
        flat = self._flattener.flatten(tree)
        check_immutable(flat)
        origin = self._state.branch.origin

        async def begun() -> asyncio.Task[Saved]:
            stall = time.monotonic() - called_at  # the trainer goes on from here
            save = partial(self._save, overwrite=overwrite, origin=origin, replicated=replicated, stall=stall)
            return self._start(step, partial(save, step, flat, metrics), origin)

        return await loop.call(begun())

    def _start(self, step: int, work: Callable[[], Awaitable[Saved]], origin: Origin | None) -> asyncio.Task[Saved]:
        """Save in the background; a failure is logged and emitted as an event, for there may be no waiting caller."""

        async def save() -> Saved:
            try:
                return await work()
            except Exception as error:
                _log.error("step %d, captured by reference, was not saved: %s", step, error)
                self._state.events.emit(SaveFailed(step, error))
                raise
            finally:
                saving.pop(step, None)

        saving = self._state.observation.saving
        saving[step] = time.time(), origin
        task = asyncio.create_task(save(), name=f"tieredckpt save {step}")
        self.pending.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Saved]) -> None:
        self.pending.discard(task)
        if not task.cancelled():
            task.exception()  # reported as an event; `reached` raises it again

    async def end(self) -> None:
        """Return when none is under way; a cancellation ends them, and is raised when they have ended."""
        pending = self.pending | self._awaited
        try:
            if pending:
                await asyncio.wait(pending)
        except asyncio.CancelledError:
            for task in pending:
                task.cancel()
            await outlast(asyncio.gather(*pending, return_exceptions=True))
            raise

    async def drained(self) -> None:
        """Return when none is under way."""
        while self.pending:
            await asyncio.wait(set(self.pending))
