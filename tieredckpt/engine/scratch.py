"""A bounded pool of page-aligned, warm memory that chunks pass through on their way to or from a device."""

from __future__ import annotations

import asyncio
import mmap
import os
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial

import numpy as np
import numpy.typing as npt

from tieredckpt.blobs.ram.lending import borrow
from tieredckpt.blobs.ram.slab import Slab, page_aligned
from tieredckpt.engine.notify import Notification
from tieredckpt.errors import Corrupt
from tieredckpt.units import format_size

__all__ = ["Scratch"]

_LARGEST = (1 << 30) + (1 << 20)
"""The largest chunk that a configuration allows, with its checksum and some room."""


class Scratch:
    """Memory lent out by the piece; who asks for more than is free waits. Used on one event loop.

    The pieces are reused, because first-touched pages cost several times what a copy does.
    """

    def __init__(self, capacity: int, *, shared: bool = True) -> None:
        """Reserve ``capacity`` bytes; other processes can map them if ``shared``."""
        self.capacity = page_aligned(capacity)
        self.slab = Slab(_shared_file(self.capacity) if shared else None, self.capacity)
        self.returned = Notification()
        """Notified whenever memory was given back."""
        self._turn = asyncio.Lock()

    @asynccontextmanager
    async def lend(self, nbytes: int) -> AsyncIterator[npt.NDArray[np.uint8]]:
        """A writable array of ``nbytes`` rounded up to pages, for the length of the block.

        A piece larger than ``capacity`` is new memory: a store may have been configured with larger chunks before.
        Raises `Corrupt` for more than any chunk has, `NoSpace`.
        """
        memory, give_back = await self.take(nbytes)
        try:
            yield memory
        finally:
            give_back()

    async def take(self, nbytes: int) -> tuple[npt.NDArray[np.uint8], Callable[[], None]]:
        """Lend memory to work that ends elsewhere: returns the memory, and a function that gives it back."""
        if page_aligned(nbytes) > self.capacity:
            if nbytes > _LARGEST:
                raise Corrupt(f"a chunk of {format_size(nbytes)} cannot be right: {format_size(_LARGEST)} is the most")
            return np.frombuffer(mmap.mmap(-1, page_aligned(nbytes)), dtype=np.uint8), lambda: None
        offset = await self.borrow(nbytes)
        memory = self.slab.array[offset : offset + page_aligned(nbytes)]
        return memory, partial(self.give_back, offset, nbytes)

    async def borrow(self, nbytes: int) -> int:
        """The offset of a piece that is to be given back. Waiters are served in their order.

        Raises `NoSpace` when the system refuses the memory and no piece is out that could come back.
        """
        assert page_aligned(nbytes) <= self.capacity
        return await borrow(self.slab, nbytes, self._turn, self.returned.wait)

    def give_back(self, offset: int, nbytes: int) -> None:
        self.slab.release(offset, nbytes)
        self.returned.notify()

    def close(self) -> None:
        self.slab.close()


def _shared_file(nbytes: int) -> int:
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("tieredckpt-scratch", os.MFD_CLOEXEC)
    else:
        fd, path = tempfile.mkstemp(prefix="tieredckpt-scratch-")
        os.unlink(path)
    os.ftruncate(fd, nbytes)
    return fd
