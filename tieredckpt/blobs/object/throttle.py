"""Holds requests back while a server says that there are too many."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from tieredckpt.errors import TierUnavailable

__all__ = ["SlowDown", "Throttle"]

T = TypeVar("T")

_FIRST = 0.1
_LONGEST = 5.0


class SlowDown(TierUnavailable):
    """The server works, and wants fewer requests for a while: 503 SlowDown, 429."""


class Throttle:
    """Repeats a request that met `SlowDown`, after a pause in which no other request begins.

    Each such answer doubles the pause, from 0.1 s up to 5 s; each other answer halves it. It never gives up: deadlines
    are set around it.
    """

    def __init__(self) -> None:
        self._pause = 0.0
        self._free_at = 0.0

    async def __call__(self, request: Callable[[], Awaitable[T]]) -> T:
        while True:
            if (wait := self._free_at - time.monotonic()) > 0:
                # Spread, so that not all begin at once when the pause is over.
                await asyncio.sleep(wait * random.uniform(1.0, 1.5))  # noqa: S311
                continue
            try:
                result = await request()
            except SlowDown:
                now = time.monotonic()
                if now >= self._free_at:  # else this one began before the pause, and says nothing new
                    self._pause = min(_LONGEST, max(_FIRST, 2 * self._pause))
                    self._free_at = now + self._pause
                continue
            self._pause = self._pause / 2 if self._pause > _FIRST else 0.0
            return result
