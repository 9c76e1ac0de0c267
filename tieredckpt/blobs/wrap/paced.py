"""Limits the rate of puts, so that promotion leaves bandwidth to others."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from tieredckpt.blobs.base import BlobStore
from tieredckpt.blobs.wrap.forward import Forward, Operation
from tieredckpt.errors import Invalid

__all__ = ["Pace", "Paced"]

T = TypeVar("T")


class Pace:
    """Limits a rate: work begins when the work before it has used up its share of time at ``rate`` bytes a second.

    Idle time earns no credit; a rate of None limits nothing. Raises `Invalid` for a rate that is not positive.
    ``clock`` gives seconds, monotonic; ``sleep`` waits for so many.
    """

    def __init__(
        self,
        rate: float | None,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        if rate is not None and not rate > 0:
            raise Invalid(f"a rate is a positive number of bytes a second, not {rate}")
        self.rate = rate
        self._clock, self._sleep = clock, sleep
        self._free_at = 0.0

    async def take(self, nbytes: int) -> None:
        """Wait until work on so many bytes may begin."""
        if self.rate is not None:
            now = self._clock()
            begin = max(now, self._free_at)
            self._free_at = begin + nbytes / self.rate
            await self._sleep(begin - now)


class Paced(Forward):
    """Delays each put as a `Pace` says."""

    def __init__(self, inner: BlobStore, pace: Pace) -> None:
        super().__init__(inner)
        self._pace = pace

    async def around(self, operation: Operation, call: Callable[[], Awaitable[T]]) -> T:
        if operation.verb == "put":
            await self._pace.take(operation.nbytes)
        return await call()
