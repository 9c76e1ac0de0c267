"""Extents of a file mapped one behind the other, read-only, so that scattered chunks read as whole arrays.

See mmap(2): address space is reserved once, and every extent is mapped to its place in it.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tieredckpt.blobs.base import ALIGNMENT
from tieredckpt.errors import TierUnavailable

__all__ = ["Placed", "window"]

_MAP_FIXED = 0x10
_MAP_NORESERVE = 0x4000
_FAILED = ctypes.c_void_p(-1).value


@dataclass(frozen=True, slots=True)
class Placed:
    """``length`` bytes of the file from ``offset`` on, to be seen at ``position``; pages all."""

    position: int
    offset: int
    length: int


def window(fd: int, size: int, placed: Sequence[Placed], release: Callable[[], None]) -> npt.NDArray[np.uint8]:
    """A read-only array of ``size`` bytes that shows the extents of ``fd`` where they were placed.

    ``release`` is called, once, when no array refers to the window any more. Raises `TierUnavailable`.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_int64]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    size = max(size, ALIGNMENT)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    base = libc.mmap(None, size, 0, flags, -1, 0)
    if base is None or base == _FAILED:
        release()
        raise TierUnavailable(f"cannot map {size} bytes: {os.strerror(ctypes.get_errno())}")
    memory = (ctypes.c_uint8 * size).from_address(base)

    def close() -> None:
        libc.munmap(base, size)
        release()

    weakref.finalize(memory, close).atexit = False  # an exit handler of somebody else may still look
    for extent in placed:
        where = libc.mmap(
            base + extent.position,
            extent.length,
            mmap.PROT_READ,
            mmap.MAP_SHARED | _MAP_FIXED,
            fd,
            extent.offset,
        )
        if where != base + extent.position:
            raise TierUnavailable(f"cannot map an extent of the slab: {os.strerror(ctypes.get_errno())}")
    # Of memory that is read-only to Python too: numpy would let a mere flag be set back.
    return np.frombuffer(memoryview(memory).toreadonly(), dtype=np.uint8)
