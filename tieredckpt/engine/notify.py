"""A signal that something changed, for waiters on one event loop."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

__all__ = ["Notification"]


class Notification:
    """Wakes everybody who waits for the next change. No wake-up is lost: look, then wait, with no await between."""

    def __init__(self) -> None:
        self._next = asyncio.Event()

    def notify(self) -> None:
        self._next.set()
        self._next = asyncio.Event()

    async def wait(self, timeout: float | None = None) -> None:
        """Return at the next `notify`, or after ``timeout`` seconds."""
        event = self._next
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                await event.wait()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Return as soon as ``condition`` holds."""
        while not condition():
            await self._next.wait()
