"""How much a verification reads: each extent once, however many steps refer to it, and no faster than asked for."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator
from typing import TypeVar

from tieredckpt.engine.restoring.reader import Place
from tieredckpt.errors import Invalid

__all__ = ["Scan"]

T = TypeVar("T")

_BATCH = 64 << 20
_BATCH_SECONDS = 0.25
"""At a bounded rate so much is read at a time, so that others wait no longer."""


class Scan:
    """What one verification of many steps on one tier has seen so far.

    ``rate`` bounds the bytes read a second. Raises `Invalid` for a rate that is not positive. ``clock`` gives
    seconds, monotonic; ``sleep`` waits for so many.
    """

    def __init__(
        self,
        rate: float | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        if rate is not None and not rate > 0:
            raise Invalid(f"a rate is a positive number of bytes a second, not {rate}")
        self.intact: dict[Place, bool] = {}
        """What was found where."""
        self._rate, self._clock, self._sleep = rate, clock, sleep
        self._free_at = 0.0

    def batches(self, items: Iterable[tuple[T, int]]) -> Iterator[list[T]]:
        """``items`` with their bytes, cut into what is read in one go; an item alone may be more."""
        limit = _BATCH if self._rate is None else min(_BATCH, self._rate * _BATCH_SECONDS)
        batch: list[T] = []
        size = 0
        for item, nbytes in items:
            if batch and size + nbytes > limit:
                yield batch
                batch, size = [], 0
            batch.append(item)
            size += nbytes
        if batch:
            yield batch

    async def turn(self, nbytes: int) -> None:
        """Return when so many bytes may be read: when those before have used up their share of time."""
        if self._rate is None:
            return
        now = self._clock()
        begin = max(now, self._free_at)
        self._free_at = begin + nbytes / self._rate
        await self._sleep(begin - now)
