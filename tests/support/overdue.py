"""Deadlines of tiers that only those calls miss which a test holds up."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from typing import Any

import pytest

from tieredckpt.blobs.wrap.deadline import Deadline
from tieredckpt.blobs.wrap.forward import Operation
from tieredckpt.testing.faulty import Hold

__all__ = ["only_held_calls_are_late"]

_held: ContextVar[asyncio.Event] = ContextVar("held")


def only_held_calls_are_late(patch: pytest.MonkeyPatch, after: float = 0.2) -> None:
    """A call misses its deadline so many seconds ``after`` `Faulty.hold` holds it; others may take as long as they do.

    With a short ``deadline``, calls that are to go well would miss it as well on a machine that pauses.
    """
    around, stop_here = Deadline.around, Hold.stop_here

    async def stopping(self: Hold) -> None:
        if (held := _held.get(None)) is not None:
            held.set()
        await stop_here(self)

    async def from_then_on(self: Deadline, operation: Operation, call: Callable[[], Awaitable[Any]]) -> Any:
        self._base, held = after, asyncio.Event()
        outer = _held.set(held)
        running, holding = asyncio.ensure_future(call()), asyncio.ensure_future(held.wait())
        _held.reset(outer)
        try:
            await asyncio.wait([running, holding], return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            await self._end(operation, running)
            raise
        finally:
            holding.cancel()
        return await around(self, operation, lambda: running)

    patch.setattr(Hold, "stop_here", stopping)
    patch.setattr(Deadline, "around", from_then_on)
