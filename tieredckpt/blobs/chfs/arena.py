"""Memory that is shared with the worker, for bytes that lie in none that is."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import numpy as np
import numpy.typing as npt

from tieredckpt.blobs.settle import in_thread
from tieredckpt.blobs.slab import Slab, aligned
from tieredckpt.errors import NoSpace
from tieredckpt.units import format_size

__all__ = ["Arena"]


class Arena:
    """Lends pieces of one memfd; who asks for more than is free waits. Belongs to one event loop."""

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
        offset = await self._borrow(nbytes)
        try:
            yield self._slab.array[offset : offset + nbytes]
        finally:
            self._slab.release(offset, nbytes)
            self._returned.set()

    async def _borrow(self, nbytes: int) -> int:
        slab = self._slab
        async with self._turn:
            if slab.spare < aligned(nbytes) and slab.reserved < slab.capacity:
                with suppress(NoSpace):  # then what is lent has to come back
                    await in_thread(slab.reserve, slab.reserved + nbytes)  # new memory takes its time
            while (offset := slab.allocate(nbytes)) is None:
                if not slab.used:
                    raise NoSpace(f"the system has no memory for a buffer of {format_size(nbytes)}; free some")
                self._returned.clear()
                await self._returned.wait()
            return offset

    def close(self) -> None:
        self._slab.close()
