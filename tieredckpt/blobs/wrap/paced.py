"""Holds puts back to a rate, so that promotion leaves bandwidth to others."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from tieredckpt.blobs.base import BlobStore
from tieredckpt.blobs.wrap.forward import Forward, Operation
from tieredckpt.errors import Invalid

__all__ = ["Paced"]

T = TypeVar("T")


class Paced(Forward):
    """Begins a put only when those before it have used up their share of time at ``rate`` bytes a second.

    Nothing is saved up while the store is idle. Raises `Invalid` for a rate that is not positive. ``clock``
    gives seconds, monotonic; ``sleep`` waits for so many.
    """

    def __init__(
        self,
        inner: BlobStore,
        *,
        rate: float,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        if rate <= 0:
            raise Invalid(f"a rate is a positive number of bytes a second, not {rate}")
        super().__init__(inner)
        self._rate, self._clock, self._sleep = rate, clock, sleep
        self._free_at = 0.0

    async def around(self, operation: Operation, call: Callable[[], Awaitable[T]]) -> T:
        if operation.verb == "put":
            now = self._clock()
            begin = max(now, self._free_at)
            self._free_at = begin + operation.nbytes / self._rate
            await self._sleep(begin - now)
        return await call()
