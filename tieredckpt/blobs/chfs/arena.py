"""Memory that is shared with the worker, for bytes that lie elsewhere."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import numpy as np
import numpy.typing as npt

from tieredckpt.blobs.ram.lending import borrow
from tieredckpt.blobs.ram.slab import Slab, aligned

__all__ = ["Arena"]


class Arena:
    """Lends pieces of one memfd; callers wait while too little is free. Belongs to one event loop."""

    def __init__(self, capacity: int) -> None:
        self.capacity = aligned(capacity)
        fd = os.memfd_create("tieredckpt-chfs", os.MFD_CLOEXEC)
        try:
            os.ftruncate(fd, self.capacity)
        except BaseException:
            os.close(fd)
            raise
        self._slab = Slab(fd, self.capacity)
        self._turn = asyncio.Lock()
        self._returned = asyncio.Event()

    @asynccontextmanager
    async def lend(self, nbytes: int) -> AsyncIterator[npt.NDArray[np.uint8]]:
        """An array of ``nbytes`` for the length of the block. Raises `NoSpace` when there is no memory."""
        offset = await borrow(self._slab, nbytes, self._turn, self._wait)
        try:
            yield self._slab.array[offset : offset + nbytes]
        finally:
            self._slab.release(offset, nbytes)
            self._returned.set()

    async def _wait(self) -> None:
        self._returned.clear()
        await self._returned.wait()

    def close(self) -> None:
        self._slab.close()
