"""An event loop whose clock stands still while its process does.

A job may be suspended as a whole (``scontrol suspend`` sends SIGSTOP), a container frozen, a process debugged. When
they go on, the timers of asyncio fire before anything is read that came meanwhile: whoever was waited for would count
as silent without having been heard. Here a deadline counts the time in which this process ran.
"""

from __future__ import annotations

import asyncio
import selectors
import time

from tieredckpt.engine import limits

__all__ = ["RunningTimeLoop"]


class RunningTimeLoop(asyncio.SelectorEventLoop):
    """An event loop of asyncio; of a pause in which it did not run, its clock counts `Limits.longest_pause` at most."""

    def __init__(self) -> None:
        self._counted = self._looked_at = time.monotonic()
        super().__init__(_OftenLooking())

    def time(self) -> float:
        """Seconds in which this loop ran, from any beginning."""
        now = time.monotonic()
        self._counted += min(now - self._looked_at, limits.in_force.longest_pause)
        self._looked_at = now
        return self._counted


class _OftenLooking(selectors.DefaultSelector):
    """Returns often while the loop waits for a timer, so that a long pause between two looks at the time is a stop."""

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        return super().select(None if timeout is None else min(timeout, limits.in_force.longest_pause / 2))
