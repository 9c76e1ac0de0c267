"""Memory that is a shared mapping of files, and comes in huge pages where the kernel has them.

A device takes memory in pieces that lie in one page. Shared memory has pages of 4 KiB unless it is mounted
otherwise, but Linux makes 2 MiB of 512 of them when it is asked to (``MADV_COLLAPSE``, Linux 6.1): asked while they
are still empty, it takes half the time of reserving and mapping them one by one. See mmap(2) and madvise(2).
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import sys
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial

import numpy as np
import numpy.typing as npt

__all__ = ["HUGE_PAGE", "Addresses", "fill_holes", "map_shared", "populate", "reserve"]

HUGE_PAGE = 2 << 20
"""Bytes, as on x86-64 and as most of ARM has it; where they are larger the kernel refuses, and small pages remain."""

_MAP_FIXED, _MAP_NORESERVE = 0x10, 0x4000
_MADV_POPULATE_READ, _MADV_POPULATE_WRITE, _MADV_COLLAPSE = 22, 23, 25  # Linux 5.14, 6.1; not named by the mmap module
_FALLOC_FL_KEEP_SIZE, _FALLOC_FL_PUNCH_HOLE = 1, 2
_FAILED = ctypes.c_void_p(-1).value

_STRIDE = 64 << 20
"""Bytes that are made huge pages at a time: each call waits for every processor once."""
_THREADS = 4
"""The kernel clears the pages, on as many threads at most."""
_ZEROS = bytes(1 << 20)


class Addresses:
    """Addresses of this process that nothing else gets, to map parts of files to. Raises `OSError`.

    They are given back when no array refers to them any more; ``release`` is then called, once.
    """

    def __init__(self, nbytes: int, release: Callable[[], None] | None = None) -> None:
        libc = _libc()
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
        start = libc.mmap(None, nbytes, 0, flags, -1, 0)
        if start is None or start == _FAILED:
            error = _error()
            if release is not None:
                release()
            raise error
        self.start: int = start
        self._memory = (ctypes.c_uint8 * nbytes).from_address(start)

        def give_back() -> None:
            libc.munmap(start, nbytes)
            if release is not None:
                release()

        weakref.finalize(self._memory, give_back).atexit = False  # an exit handler of somebody else may still look

    def place(self, position: int, fd: int, offset: int, nbytes: int, *, writable: bool = False) -> None:
        """Show a part of a file from ``position`` on. Raises `OSError`."""
        access = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        at = self.start + position
        if _libc().mmap(at, nbytes, access, mmap.MAP_SHARED | _MAP_FIXED, fd, offset) != at:
            raise _error()

    def array(self, *, writable: bool = False) -> npt.NDArray[np.uint8]:
        """All of it; only what files were mapped to may be touched."""
        # Of memory that is read-only to Python too: numpy would let a mere flag be set back.
        return np.frombuffer(self._memory if writable else memoryview(self._memory).toreadonly(), dtype=np.uint8)


def map_shared(fd: int, nbytes: int, *, writable: bool) -> npt.NDArray[np.uint8]:
    """The first ``nbytes`` of a file as memory that others who map it see, at a boundary of huge pages.

    It is unmapped with its last view. Raises `OSError`.
    """
    if sys.platform != "linux":
        access = mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ
        return np.frombuffer(mmap.mmap(fd, nbytes, access=access), dtype=np.uint8)
    addresses = Addresses(nbytes + HUGE_PAGE)
    position = -addresses.start % HUGE_PAGE
    addresses.place(position, fd, 0, nbytes, writable=writable)
    return addresses.array(writable=writable)[position : position + nbytes]


def reserve(fd: int, mapped: npt.NDArray[np.uint8], offset: int, nbytes: int) -> None:
    """Have the memory of a part of a file of shared memory, of which nothing is in use, by huge pages if they are to
    be had; ``mapped`` is all of the file. Blocking. Raises `OSError`, with nothing reserved.
    """
    try:
        if hasattr(os, "posix_fallocate"):
            with contextlib.suppress(OSError, RuntimeError):  # no memory, or no thread: small pages will do
                _have_huge_pages(fd, mapped.ctypes.data, offset, nbytes)
        _have_pages(fd, offset, nbytes)
    except OSError:
        _give_back(fd, offset, nbytes)
        raise


def fill_holes(fd: int, nbytes: int) -> None:
    """Have memory for all of the first ``nbytes``: who had it reserved may have died at that. Raises `OSError`."""
    if nbytes and hasattr(os, "posix_fallocate"):
        os.posix_fallocate(fd, 0, nbytes)


def populate(mapped: npt.NDArray[np.uint8]) -> bool:
    """Map the memory that there is, so that who uses it meets no page fault; False where the kernel cannot."""
    advice = _MADV_POPULATE_WRITE if mapped.flags.writeable else _MADV_POPULATE_READ
    return _advise(mapped.ctypes.data, mapped.nbytes, advice)


def _have_huge_pages(fd: int, address: int, offset: int, nbytes: int) -> None:
    """Fill the part by huge pages, as far as there are any; what lies between their boundaries alone is left out."""
    first, end = -(-offset // HUGE_PAGE) * HUGE_PAGE, (offset + nbytes) // HUGE_PAGE * HUGE_PAGE
    strides = [range(start, min(start + _STRIDE, end), HUGE_PAGE) for start in range(first, end, _STRIDE)]
    if strides:
        with ThreadPoolExecutor(min(_THREADS, os.cpu_count() or 1, len(strides))) as pool:
            all(pool.map(partial(_collapse, fd, address), strides))  # where one finds no more, the rest is left out


def _collapse(fd: int, address: int, pages: range) -> bool:
    for page in pages:
        os.posix_fallocate(fd, page, mmap.PAGESIZE)  # of nothing at all the kernel makes no huge page
    return _advise(address + pages.start, pages.stop - pages.start, _MADV_COLLAPSE)


def _have_pages(fd: int, offset: int, nbytes: int) -> None:
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(fd, offset, nbytes)
        return
    for start in range(offset, offset + nbytes, len(_ZEROS)):
        os.pwrite(fd, _ZEROS[: offset + nbytes - start], start)


def _give_back(fd: int, offset: int, nbytes: int) -> None:
    if hasattr(_libc(), "fallocate"):
        mode = _FALLOC_FL_KEEP_SIZE | _FALLOC_FL_PUNCH_HOLE
        _libc().fallocate(ctypes.c_int(fd), ctypes.c_int(mode), ctypes.c_int64(offset), ctypes.c_int64(nbytes))


def _advise(address: int, nbytes: int, advice: int) -> bool:
    advise = getattr(_libc(), "madvise", None)
    return advise is not None and advise(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), advice) == 0


@cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_int64]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    return libc


def _error() -> OSError:
    return OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
