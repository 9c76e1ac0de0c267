"""The slab: a file of fixed size, mapped once, from which page-aligned extents are handed out and taken back.

Its memory is reserved before it is used (``fallocate``), so that a full ``/dev/shm`` is an error when the slab
grows and never a SIGBUS later. It grows in strides, between which extents are handed out. See fallocate(2) and
madvise(2).
"""

from __future__ import annotations

import bisect
import logging
import mmap
import os
import threading
import time
import warnings
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import numpy.typing as npt

from tieredckpt.blobs import mapping
from tieredckpt.blobs.base import ALIGNMENT
from tieredckpt.blobs.mapping import HUGE_PAGE, private_memory
from tieredckpt.blobs.ram import regions
from tieredckpt.blobs.space import check_room
from tieredckpt.devices.numa import take_near_devices
from tieredckpt.errors import Corrupt, NoSpace, TierUnavailable
from tieredckpt.units import format_size

__all__ = ["PAGE", "Slab", "page_aligned"]

_log = logging.getLogger("tieredckpt")

PAGE = max(ALIGNMENT, mmap.PAGESIZE)
"""Bytes of the system's pages, at least `ALIGNMENT`: on some ARM systems nothing can be mapped within 64 KiB."""

_MAPPED_AT_ONCE = 32 << 20
_PREPARED_AT_ONCE = 64 << 20
_RESERVED_AT_ONCE = 256 << 20
"""Bytes of one request while a caller waits: enough for all threads that clear huge pages."""
_SHARE_OF_A_PROCESSOR = 0.25
"""Most of a processor's time that background preparation of memory takes."""


def page_aligned(nbytes: int) -> int:
    """``nbytes`` rounded up to `PAGE`."""
    return -(-nbytes // PAGE) * PAGE


class Slab:
    """A mapped file cut into extents; safe to use from any thread.

    Args:
        fd: an open file of at least ``capacity`` bytes; the slab owns it, also when this raises. None for memory of
            this process alone, which comes in huge pages where the system has them: direct I/O then moves 2 MiB in one
            piece instead of 512, and read 1.4 times as fast on the reference machine.
        capacity: the largest size it may grow to, in bytes, a multiple of `PAGE`.
        reserved: bytes from the start that have their memory already.
        writable: False for a slab that another process writes; nothing is handed out from it then.
        growing: entered while more memory is asked for, with the bytes that have theirs already; it may raise
            `OSError`.
        quota: asked before the slab grows, with its new size; None where the capacity alone counts. Its ``tell`` says
            whether to log what takes the memory.
    """

    def __init__(
        self,
        fd: int | None,
        capacity: int,
        reserved: int = 0,
        *,
        writable: bool = True,
        growing: Callable[[int], AbstractContextManager[None]] | None = None,
        quota: Callable[..., bool] | None = None,
    ) -> None:
        self.capacity = capacity
        """Bytes; lowered to the present size when the system has no more memory to give."""
        self.writable = writable
        self._fd = fd
        self.array = private_memory(capacity) if fd is None else _mapped(fd, capacity, writable=writable)
        self.region = None if fd is None else regions.register(self.array.ctypes.data, capacity, fd, writable=writable)
        """Registration that lets another process map the slab too."""
        self._unclosed: weakref.finalize[..., Slab] | None = None
        if fd is not None:
            self._unclosed = weakref.finalize(self, _close_abandoned, self.region, fd, capacity)
            self._unclosed.atexit = False  # the system closes the file then, without a warning
        self._growing, self._quota = growing, quota
        self._guards_extents = threading.Condition(threading.Lock())
        """Notified when the slab has grown, or could not."""
        self._grows = False
        """One thread asks for memory, without the lock."""
        self._reserved = reserved
        self._expected = self._at_least = 0
        self._free: list[tuple[int, int]] = [(0, reserved)] if reserved else []  # (offset, length), by offset
        self._used = 0
        self._guards_preparing = threading.Lock()
        self._mapped = 0
        self._ending = threading.Event()
        self._closed = self._unmapped = False
        self.before_unmapping: Callable[[npt.NDArray[np.uint8]], object] = lambda _: None
        """Called with the mapping when the slab is closed."""

    @property
    def mapped(self) -> npt.NDArray[np.uint8] | None:
        """`array`; None once the slab is closed, as another thread does where its tier has failed."""
        return getattr(self, "array", None)

    @property
    def reserved(self) -> int:
        """Bytes of memory that the slab holds now."""
        return self._reserved

    @property
    def used(self) -> int:
        """Bytes in extents that are handed out."""
        return self._used

    @property
    def spare(self) -> int:
        """Free bytes of the memory that the slab holds now, in one piece or in several."""
        return self._reserved - self._used

    @property
    def room(self) -> int:
        """Bytes that could still be handed out, in one extent or in several."""
        return self.capacity - self.used

    def fileno(self) -> int:
        """The slab's file, for mappings of its own."""
        assert self._fd is not None, "memory of this process alone has no file"
        return self._fd

    def allocate(self, nbytes: int) -> int | None:
        """The offset of a free extent of ``nbytes`` rounded up to `PAGE`, or None when none is left."""
        need = page_aligned(nbytes)
        with self._guards_extents:
            while True:
                for i, (offset, length) in enumerate(self._free):
                    if length >= need:
                        self._free[i : i + 1] = [(offset + need, length - need)] if length > need else []
                        self._used += need
                        return offset
                if self._grows:
                    self._guards_extents.wait()  # the extent may lie in what comes
                elif not self._extend(need):
                    return None

    def _extend(self, need: int) -> bool:
        """Grow so that an extent of ``need`` bytes may lie at the end; False when the slab cannot."""
        end = self._free[-1] if self._free else (0, 0)
        tail = end[1] if sum(end) == self._reserved else 0
        size = self._reserved - tail + need
        if self._closed or size > self.capacity or not self._may_have(size):
            return False
        if self._grow(need - tail):
            return True
        _log.warning(
            "the system has no more memory for the RAM tier's slab: it stays at %s instead of %s",
            format_size(self._reserved),
            format_size(self.capacity),
        )
        self.capacity = self._reserved
        return False

    def reserve(self, nbytes: int, while_: Callable[[], bool] = lambda: True) -> None:
        """Reserve memory until the slab has ``nbytes`` in all, or as much as the capacity allows. Blocking.

        Extents are handed out meanwhile. It ends early once ``while_``, called before each stride, returns False.

        Raises:
            NoSpace: shared memory, or the quota, has less left; what the slab has already stays usable.
        """
        self.check_room(nbytes)
        with self._guards_extents:
            while (lacking := min(self.capacity, page_aligned(nbytes)) - self._reserved) > 0 and while_():
                if self._grows:
                    self._guards_extents.wait()
                elif not self._grow(min(lacking, _RESERVED_AT_ONCE)):
                    raise self._no_space(nbytes)

    def check_room(self, nbytes: int, *, besides: int = 0, tell: bool = True) -> None:
        """Raise `NoSpace` if shared memory, or the quota, has no room for a slab of ``nbytes`` now; reserves nothing.

        ``besides`` are bytes that others have yet to take.
        """
        target = min(self.capacity, page_aligned(nbytes))
        if target > self._reserved and self._fd is not None:
            try:
                check_room(self._fd, target - self._reserved + besides)
            except OSError as error:
                raise self._no_space(nbytes) from error
            if not self._may_have(target, tell=tell):
                raise self._no_space(nbytes)

    def _no_space(self, nbytes: int) -> NoSpace:
        return NoSpace(
            f"shared memory has no room for a slab of {format_size(min(self.capacity, page_aligned(nbytes)))}; "
            f"it has {format_size(self._reserved)} already; choose a smaller capacity for the RAM tier"
        )

    def _grow(self, nbytes: int) -> bool:
        """Reserve so many more bytes, or up to the end of a huge page; the lock is released meanwhile."""
        end = self._reserved + nbytes
        whole = min(-(-end // HUGE_PAGE) * HUGE_PAGE, self.capacity) if end >= HUGE_PAGE else end
        return self._grow_to(whole) or (whole > end and self._grow_to(end))

    def _may_have(self, nbytes: int, *, tell: bool = True) -> bool:
        return self._quota is None or self._quota(nbytes, tell=tell)

    def _grow_to(self, end: int) -> bool:
        if self._closed or not self._may_have(end):
            return False
        start, nbytes = self._reserved, end - self._reserved
        self._grows = True
        self._guards_extents.release()
        try:
            had = self._have_memory(start, nbytes)
        finally:
            self._guards_extents.acquire()
            self._grows = False
            self._guards_extents.notify_all()
        if had:
            self._give_back(start, nbytes)
            self._reserved = end
        return had

    def _have_memory(self, start: int, nbytes: int) -> bool:
        take_near_devices(self.array[start : start + nbytes])
        if self._fd is not None:  # private memory comes with its first use
            try:
                with self._growing(start) if self._growing is not None else nullcontext():
                    mapping.reserve(self._fd, self.array, start, nbytes)
            except OSError:
                return False
        return True

    def bytes_at(self, offset: int, nbytes: int) -> npt.NDArray[np.uint8]:
        """The memory of an extent that an index names.

        Raises `Corrupt` where the slab has no such bytes, and `TierUnavailable` once it is closed.
        """
        if (mapped := self.mapped) is None:
            raise TierUnavailable("RAM went away")
        if offset < 0 or nbytes < 0 or offset + nbytes > mapped.size:
            raise Corrupt(f"an extent of {nbytes} bytes at {offset} lies outside the slab of {mapped.size}")
        return mapped[offset : offset + nbytes]

    def claim(self, offset: int, nbytes: int) -> bool:
        """Mark an extent as handed out, as found in a committed step; False if any of it is not free."""
        need = page_aligned(nbytes)
        with self._guards_extents:
            i = bisect.bisect_right(self._free, (offset, self.capacity + 1)) - 1
            if i < 0 or offset % PAGE:
                return False
            start, length = self._free[i]
            if offset + need > start + length:
                return False
            rest = [(start, offset - start), (offset + need, start + length - offset - need)]
            self._free[i : i + 1] = [extent for extent in rest if extent[1]]
            self._used += need
            return True

    def release(self, offset: int, nbytes: int) -> None:
        """Take an extent back; its bytes may be overwritten from now on."""
        with self._guards_extents:
            self._give_back(offset, page_aligned(nbytes))
            self._used -= page_aligned(nbytes)

    def _give_back(self, offset: int, length: int) -> None:
        i = bisect.bisect_left(self._free, (offset, 0))
        before = self._free[i - 1] if i else (0, 0)
        after = self._free[i] if i < len(self._free) else (offset + length, 0)
        assert sum(before) <= offset, "an extent is handed out, so nothing of it is free"
        assert offset + length <= after[0], "an extent is handed out, so nothing of it is free"
        start, end = offset, offset + length
        if i and sum(before) == offset:
            start, i = before[0], i - 1
            del self._free[i]
        if after[1] and after[0] == end:
            end += after[1]
            del self._free[i]
        self._free.insert(i, (start, end - start))

    @property
    def awaits_memory(self) -> bool:
        """Whether `prepare` has yet to reserve memory."""
        return self._reserved < min(self._expected, self.capacity)

    def expect(self, nbytes: int, at_least: int = 0) -> None:
        """Say how much `prepare` takes: ``nbytes`` in all, or ``at_least`` where there is less."""
        with self._guards_extents:
            self._expected = max(self._expected, page_aligned(nbytes))
            self._at_least = max(self._at_least, page_aligned(at_least))

    def expect_no_more(self) -> None:
        """End `prepare`, because the slab is about to be closed."""
        self._ending.set()

    def prepare(self, *, share: float = _SHARE_OF_A_PROCESSOR) -> None:
        """Reserve the expected memory, and map what is reserved, so that later copies wait for neither.

        Blocking; releases the GIL. Takes at most ``share`` of a processor's time. It ends with the slab, and when there
        is no more memory; one thread works for all callers.
        """
        while self._unprepared() and self._guards_preparing.acquire(blocking=False):
            try:
                while self._unprepared():  # and once more outside: a caller may expect more just before the release
                    begin = time.monotonic()
                    self._prepare_some()
                    self._ending.wait((time.monotonic() - begin) * (mapping.THREADS / share - 1))
            finally:
                self._guards_preparing.release()

    def _unprepared(self) -> bool:
        return not self._ending.is_set() and (self._mapped < self._there() or self.awaits_memory)

    def _prepare_some(self) -> None:
        if self._mapped < (there := self._there()):
            end = min(self._mapped + _MAPPED_AT_ONCE, there)
            # An old kernel cannot: the first copies fault their pages in themselves.
            self._mapped = end if mapping.populate(self.array[self._mapped : end]) else self.capacity
            return
        expected = self._expected
        try:
            self.check_room(expected, tell=False)
        except NoSpace:
            self._expect_less(expected)  # nothing is reserved for a size that does not fit
        with self._guards_extents:
            if self._grows:
                self._guards_extents.wait()
                return
            lacking = min(self._expected, self.capacity) - self._reserved
            had = lacking <= 0 or self._grow(min(lacking, _PREPARED_AT_ONCE))
        if not had:
            self._expect_less(self._expected)

    def _expect_less(self, than: int) -> None:
        """Expect only the least size, or nothing; a save that needs more reports what takes the memory."""
        with self._guards_extents:
            if self._expected == than:
                self._expected, self._at_least = (self._at_least if self._at_least < than else 0), 0

    def _there(self) -> int:
        """Bytes that have their memory; for a slab that another process writes, an estimate, since it may grow."""
        if self.writable or self._fd is None:
            return self._reserved
        try:
            return min(self.capacity, os.fstat(self._fd).st_blocks * 512 // PAGE * PAGE)
        except OSError:  # it has just been closed
            return 0

    def close(self) -> None:
        """Unmap; views that are still alive keep the memory until they go. Blocking, idempotent."""
        self._closed = True
        self._ending.set()
        with self._guards_preparing, self._guards_extents:  # their holders use the mapping until they see `_closed`
            while self._grows:
                self._guards_extents.wait()
            if self._unmapped:
                return
            self._unmapped = True
            self.before_unmapping(self.array)
            if self._unclosed is not None and self._unclosed.detach():
                assert self.region is not None, "a slab with a file has one"
                self.region.close()
                os.close(self.fileno())
                self._fd = -1
            del self.array


def _close_abandoned(region: regions.Region, fd: int, capacity: int) -> None:
    """Forget a slab that was never closed, before other memory gets its addresses."""
    region.close()
    os.close(fd)
    warnings.warn(f"a slab of {format_size(capacity)} was never closed", ResourceWarning, stacklevel=1)


def _mapped(fd: int, nbytes: int, *, writable: bool) -> npt.NDArray[np.uint8]:
    try:
        return mapping.map_shared(fd, nbytes, writable=writable)
    except BaseException:
        os.close(fd)
        raise
