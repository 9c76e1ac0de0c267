"""Memory in huge pages where the kernel has them: shared mappings of files, and private memory of this process.

A device transfers memory in pieces that lie in one page. Shared memory has pages of 4 KiB unless it is mounted
otherwise, but Linux merges 512 of them into one of 2 MiB when asked (``MADV_COLLAPSE``, Linux 6.1). Asked while the
pages are still empty, it takes half the time of reserving and mapping them one by one. See mmap(2) and madvise(2).
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import sys
import time
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import numpy as np
import numpy.typing as npt

from tieredckpt.blobs.space import check_room

__all__ = ["HUGE_PAGE", "THREADS", "Addresses", "give_back", "map_shared", "populate", "private_memory", "reserve"]

HUGE_PAGE = 2 << 20
"""Size in bytes, as on x86-64 and most ARM machines. Where it is larger, the kernel refuses, and small pages remain."""

THREADS = min(4, os.cpu_count() or 1)
"""Number of threads on which the kernel clears pages."""

_MAP_FIXED, _MAP_NORESERVE = 0x10, 0x4000
_MADV_POPULATE_READ, _MADV_POPULATE_WRITE, _MADV_COLLAPSE = 22, 23, 25  # Linux 5.14, 6.1; not named by the mmap module
_FALLOC_FL_KEEP_SIZE, _FALLOC_FL_PUNCH_HOLE = 1, 2
_FAILED = ctypes.c_void_p(-1).value

_STRIDE = 64 << 20
"""Bytes that are made huge pages at a time: each call waits for every processor once."""
_PIECE = 8 << 20
"""Bytes of small pages that one thread takes at a time."""
_REFUSALS = 4
"""After this many strides in a row with a refused page, no more huge pages are asked for."""
_SLOW = 1.5 / (1 << 30)
"""Seconds of processor time per byte from which on huge pages count as slow. 0.1 to 0.3 s per GiB are usual. 2.4 s are
usual on a host that takes idle memory back, and has to find it again in pieces of that size; small pages take 0.6 s
there."""
_TRIED_AGAIN_AFTER = 512 << 20
_ZEROS = bytes(1 << 20)


class Addresses:
    """Reserved addresses of this process, to which parts of files are mapped. Raises `OSError`.

    They are released when no array refers to them any more; ``release`` is then called, once.
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

        def unmap() -> None:
            libc.munmap(start, nbytes)
            if release is not None:
                release()

        weakref.finalize(self._memory, unmap).atexit = False  # an exit handler of somebody else may still look

    def place(self, position: int, fd: int, offset: int, nbytes: int, *, writable: bool = False) -> None:
        """Show a part of a file from ``position`` on. Raises `OSError`."""
        access = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        at = self.start + position
        if _libc().mmap(at, nbytes, access, mmap.MAP_SHARED | _MAP_FIXED, fd, offset) != at:
            raise _error()

    def array(self, *, writable: bool = False) -> npt.NDArray[np.uint8]:
        """All addresses as an array; only parts to which files were mapped may be touched."""
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


def private_memory(nbytes: int) -> npt.NDArray[np.uint8]:
    """New, empty memory of this process alone; it starts at a page, or at a huge page where there are such."""
    memory = mmap.mmap(-1, nbytes + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    array = np.frombuffer(memory, dtype=np.uint8)
    start = -int(array.__array_interface__["data"][0]) % HUGE_PAGE
    return array[start : start + nbytes]


def reserve(fd: int, mapped: npt.NDArray[np.uint8], offset: int, nbytes: int) -> None:
    """Allocate memory for a part of a file in shared memory, in huge pages if the system has them. Blocking.

    The part must not be in use; ``mapped`` is the file from its start. Raises `OSError`; nothing stays reserved then,
    if the system can free memory.
    """
    check_room(fd, nbytes)
    try:
        if hasattr(os, "posix_fallocate"):
            with contextlib.suppress(OSError, RuntimeError):  # small pages will do, also where no thread can be started
                _have_huge_pages(fd, mapped.ctypes.data, offset, nbytes)
        # Allocating in the file would clear the pages on one thread, but reports a lack of memory.
        if not populate(mapped[offset : offset + nbytes]):
            _have_pages(fd, offset, nbytes)
    except BaseException:
        give_back(fd, offset, nbytes)
        raise


def give_back(fd: int, offset: int, nbytes: int) -> None:
    """Free the memory of a part of a file, where the system can do that; the part then reads as zeros."""
    if hasattr(_libc(), "fallocate"):
        mode = _FALLOC_FL_KEEP_SIZE | _FALLOC_FL_PUNCH_HOLE
        _libc().fallocate(ctypes.c_int(fd), ctypes.c_int(mode), ctypes.c_int64(offset), ctypes.c_int64(nbytes))


def populate(mapped: npt.NDArray[np.uint8]) -> bool:
    """Allocate and map all of the memory, so that later users meet no page fault; False where that is impossible."""
    advice = _MADV_POPULATE_WRITE if mapped.flags.writeable else _MADV_POPULATE_READ

    def fill(offset: int) -> bool:
        piece = mapped[offset : offset + _PIECE]
        return _advise(piece.ctypes.data, piece.nbytes, advice) == 0

    try:
        with ThreadPoolExecutor(THREADS) as pool:
            return all(pool.map(fill, range(0, mapped.nbytes, _PIECE)))
    except RuntimeError:  # no thread can be started
        return False


class _Speed:
    """Measures whether the machine gave huge pages fast lately. Threads that meet here may each try once more."""

    def __init__(self) -> None:
        self._small = 0

    def allows(self, nbytes: int) -> bool:
        """Whether to ask for huge pages again; counts ``nbytes`` as taken in small pages if not."""
        self._small -= nbytes
        return self._small < 0

    def note(self, nbytes: int, seconds: float) -> None:
        """Learn from the time of a stride; a short one teaches nothing, since the cost of each call hides the speed."""
        self._small = _TRIED_AGAIN_AFTER if nbytes > _STRIDE // 2 and seconds > _SLOW * nbytes else 0


_speed = _Speed()


def _have_huge_pages(fd: int, address: int, offset: int, nbytes: int) -> None:
    """Fill the part with huge pages, as far as the kernel gives them; leaves out partial pages at both ends."""
    first, end = -(-offset // HUGE_PAGE) * HUGE_PAGE, (offset + nbytes) // HUGE_PAGE * HUGE_PAGE
    if first >= end or _collapse(fd, address, range(first, first + HUGE_PAGE, HUGE_PAGE)) == errno.EINVAL:
        return  # the kernel, or the file system, makes none
    starts = range(first + HUGE_PAGE, end, _STRIDE)
    refused = 0

    def fill(start: int) -> None:
        nonlocal refused
        stride = range(start, min(start + _STRIDE, end), HUGE_PAGE)
        if refused < _REFUSALS and _speed.allows(stride.stop - stride.start):
            begin = time.thread_time()
            error = _collapse(fd, address, stride)
            _speed.note(stride.stop - stride.start, time.thread_time() - begin)
            refused = refused + 1 if error else 0

    with ThreadPoolExecutor(THREADS) as pool:
        for _ in pool.map(fill, starts):
            pass


def _collapse(fd: int, address: int, pages: range) -> int:
    """Make huge pages at these offsets, which have no memory yet; 0, or the error of one that could not be made."""
    for page in pages:
        # The kernel makes no huge page where no small page is. It takes the memory from the NUMA node of the small
        # page, and spreads small pages over the nodes by their numbers.
        small = page // HUGE_PAGE % (HUGE_PAGE // mmap.PAGESIZE) * mmap.PAGESIZE
        os.posix_fallocate(fd, page + small, mmap.PAGESIZE)
    return _advise(address + pages.start, pages.stop - pages.start, _MADV_COLLAPSE)


def _have_pages(fd: int, offset: int, nbytes: int) -> None:
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(fd, offset, nbytes)
        return
    for start in range(offset, offset + nbytes, len(_ZEROS)):
        os.pwrite(fd, _ZEROS[: offset + nbytes - start], start)


def _advise(address: int, nbytes: int, advice: int) -> int:
    """0, or the number of the error."""
    advise = getattr(_libc(), "madvise", None)
    if advise is None:
        return errno.EINVAL
    return ctypes.get_errno() if advise(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), advice) else 0


@cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_int64]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    return libc


def _error() -> OSError:
    return OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
