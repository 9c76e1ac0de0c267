"""Saves that go on after they returned: trees of immutable arrays, captured by reference and copied behind."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping

from tieredckpt.engine.engine import Engine
from tieredckpt.engine.writer import Saved
from tieredckpt.events import Events, SaveFailed
from tieredckpt.tree.flatten import Flat

__all__ = ["Captures"]

_log = logging.getLogger("tieredckpt")


class Captures:
    """The saves under way behind the trainer. Lives on the engine's loop."""

    def __init__(self, engine: Engine, events: Events) -> None:
        self._engine = engine
        self._events = events
        self.pending: set[asyncio.Task[Saved]] = set()

    async def save(
        self, step: int, flat: Flat, metrics: Mapping[str, float], *, overwrite: bool
    ) -> asyncio.Task[Saved]:
        """Begin a save; a failure is logged and told as an event, for nobody may be waiting for it."""

        async def save() -> Saved:
            try:
                return await self._engine.save(step, flat, metrics, overwrite=overwrite)
            except Exception as error:
                _log.error("step %d, captured by reference, was not saved: %s", step, error)
                self._events.emit(SaveFailed(step, error))
                raise
            finally:
                saving.pop(step, None)

        saving = self._engine.state.saving
        saving[step] = time.time()
        task = asyncio.create_task(save(), name=f"tieredckpt save {step}")
        self.pending.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Saved]) -> None:
        self.pending.discard(task)
        if not task.cancelled():
            task.exception()  # reported as an event; `reached` raises it again

    async def settled(self) -> None:
        """Return when none is under way."""
        while self.pending:
            await asyncio.wait(set(self.pending))
