"""Bounds how much of a store is in use at a time, in operations and in bytes."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from typing import TypeVar

from tieredckpt.blobs.base import BlobStore
from tieredckpt.blobs.wrap.forward import Forward, Operation
from tieredckpt.errors import Invalid

__all__ = ["Limited"]

T = TypeVar("T")


class Limited(Forward):
    """Lets verbs start in the order of their arrival, while their count and bytes stay within the limits.

    A verb with more bytes than the limit goes alone. A `get` counts with its ``limit``, which is what it may
    come to hold in memory. Raises `Invalid` for limits below 1.

    Args:
        operations: how many verbs are under way at most.
        nbytes: how many bytes they move together at most.
    """

    def __init__(self, inner: BlobStore, *, operations: int, nbytes: int) -> None:
        if operations < 1 or nbytes < 1:
            raise Invalid(f"the limits must be at least 1, not {operations} operations and {nbytes} bytes")
        super().__init__(inner)
        self._nbytes = nbytes
        self._free_operations, self._free_bytes = operations, nbytes
        self._queue: deque[tuple[int, asyncio.Future[None]]] = deque()

    async def around(self, operation: Operation, call: Callable[[], Awaitable[T]]) -> T:
        nbytes = min(operation.nbytes, self._nbytes)
        await self._acquire(nbytes)
        try:
            return await call()
        finally:
            self._release(nbytes)

    async def _acquire(self, nbytes: int) -> None:
        turn = asyncio.get_running_loop().create_future()
        self._queue.append((nbytes, turn))
        self._admit()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                self._admit()  # the next in the queue may fit now
            else:
                self._release(nbytes)  # admitted and cancelled at once
            raise

    def _release(self, nbytes: int) -> None:
        self._free_operations += 1
        self._free_bytes += nbytes
        self._admit()

    def _admit(self) -> None:
        while self._queue:
            nbytes, turn = self._queue[0]
            if not turn.cancelled():
                if not self._free_operations or nbytes > self._free_bytes:
                    return
                self._free_operations -= 1
                self._free_bytes -= nbytes
                turn.set_result(None)
            self._queue.popleft()
