"""Moves bytes between memory and an open file: direct I/O where alignment allows it, buffered elsewhere.

Everything here blocks and belongs on a thread. Memory is one-dimensional uint8 arrays (`as_arrays`), so that
large copies release the GIL. A transfer looks at its `Stop` before every system call, and no call moves more
than about `BLOCK` bytes.

Direct I/O wants file offset, length and address to be multiples of `ALIGNMENT`. Bytes that are not go through
an *arena*, aligned memory of the thread that is kept because fresh pages cost more than the copy; so do bytes that
are digested as they come. A file system that accepts ``O_DIRECT`` and then refuses a transfer (``EINVAL``) is served
by buffered I/O.
"""

from __future__ import annotations

import errno
import fcntl
import os
import threading
from collections import deque
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from tieredckpt.blobs.base import ALIGNMENT, Buffer, Stretch, span
from tieredckpt.blobs.mapping import private_memory
from tieredckpt.format.digest import CopyDigester

__all__ = [
    "BLOCK",
    "DIRECT_FROM",
    "O_DIRECT",
    "Bytes",
    "EndOfFile",
    "Stop",
    "Stopped",
    "aligned_batches",
    "as_arrays",
    "fill",
    "fill_digested",
    "plain_batches",
    "write",
]

Bytes = npt.NDArray[np.uint8]
Stop = threading.Event

BLOCK = 16 << 20
"""Most bytes of one system call, hence how much a cancelled transfer may still move."""

DIRECT_FROM = 1 << 20
"""Transfers of fewer bytes are better served by the page cache."""

O_DIRECT: int = getattr(os, "O_DIRECT", 0)
"""The flag of direct I/O; 0 on platforms without it."""

_ARENA = 4 << 20
"""Bytes that are read before they are copied: the fewer, the more a fast device waits for the next request."""
_BUFFERS_PER_CALL = 512  # half of Linux's IOV_MAX
_EMPTY: Bytes = np.empty(0, dtype=np.uint8)

_of_thread = threading.local()


class Stopped(Exception):
    """The transfer was asked to stop; internal, never leaves a store."""


class EndOfFile(Exception):
    """The file ended after ``got`` bytes of the range; internal, stores raise `ShortRead`."""

    def __init__(self, got: int) -> None:
        super().__init__(got)
        self.got = got


def as_arrays(parts: Sequence[Buffer]) -> tuple[Bytes, ...]:
    """The memory of ``parts`` as 1-D uint8 arrays, without a copy; empty parts are left out."""
    return tuple(np.frombuffer(part, dtype=np.uint8) for part in parts if memoryview(part).nbytes)


def write(fd: int, parts: Sequence[Bytes], stop: Stop, *, direct: bool) -> None:
    """Write ``parts`` from the start of an empty file, and cut it to their length.

    With ``direct`` the descriptor was opened with `O_DIRECT`. Raises `OSError`, `Stopped`.
    """
    position = 0
    for batch in aligned_batches(parts, _arena()) if direct else plain_batches(parts):
        position = _write_batch(fd, batch, position, stop)
    total = sum(len(part) for part in parts)
    os.ftruncate(fd, total)


def fill(fd: int, offset: int, into: Bytes, stop: Stop, *, direct: bool) -> None:
    """Fill ``into`` with the bytes of a file from ``offset`` on.

    With ``direct`` the descriptor was opened with `O_DIRECT`. Raises `OSError`, `EndOfFile`, `Stopped`.
    """
    done = 0
    if direct:
        try:
            if offset % ALIGNMENT == 0 and _address(into) % ALIGNMENT == 0:
                done = _fill_in_place(fd, offset, into, stop)
            else:
                done = _fill_through_arena(fd, offset, into, stop)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
        if done < len(into):
            _leave_direct(fd)
    while done < len(into):
        _check(stop)
        got = os.preadv(fd, [into[done : done + BLOCK].data], offset + done)
        if got == 0:
            raise EndOfFile(done)
        done += got


def fill_digested(fd: int, stretches: Sequence[Stretch], stop: Stop, *, direct: bool) -> list[bytes]:
    """Fill the memory of stretches of a file, which are in order and do not overlap; the digest of each.

    All from the first to the last passes through the arena, and from there past the caches. Raises as `fill`.
    """
    digested = _Digested(stretches)

    def take(unit: int) -> None:
        for piece in _pieces(fd, digested.at, digested.end - digested.at, stop, unit):
            digested.take(piece)

    if direct:
        try:
            take(ALIGNMENT)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
        if digested.at < digested.end:
            _leave_direct(fd)
    take(1)
    if digested.at < digested.end:
        raise EndOfFile(digested.at - stretches[0].offset)
    return digested.digests


class _Digested:
    """Brings the bytes of a file to the stretches that they belong to, and digests them there."""

    def __init__(self, stretches: Sequence[Stretch]) -> None:
        self._waiting = deque(stretches)
        self._digester: CopyDigester | None = None
        self.digests: list[bytes] = []
        self.at = stretches[0].offset
        """Offset of the next byte that is wanted."""
        self.end = self.at + span(stretches)

    def take(self, piece: Bytes) -> None:
        begin, self.at = self.at, self.at + len(piece)
        while self._waiting and self._waiting[0].offset < self.at:
            offset, nbytes, into = self._waiting[0]
            first, end = max(offset, begin), min(offset + nbytes, self.at)
            if self._digester is None:
                self._digester = CopyDigester(nbytes)
            target = np.frombuffer(into, dtype=np.uint8)
            self._digester.copy(piece[first - begin : end - begin], target[first - offset : end - offset])
            if end < offset + nbytes:
                return
            self.digests.append(self._digester.digest())
            self._digester = None
            self._waiting.popleft()


def aligned_batches(parts: Sequence[Bytes], arena: Bytes) -> Iterator[list[Bytes]]:
    """Cut ``parts`` into batches for direct writes: every buffer's address and length is aligned.

    Aligned stretches of the parts are passed on as they are, the rest is gathered in ``arena`` (aligned in
    address and length). The last buffer is padded with zeros. A batch is valid until the next is asked for.
    """
    batch: list[Bytes] = []
    size = used = gathered = 0  # bytes in batch; bytes of arena taken; of these, not yet in batch
    for part in parts:
        address, at = _address(part), 0
        while at < len(part):
            left = len(part) - at
            if gathered == 0 and (address + at) % ALIGNMENT == 0 and left >= ALIGNMENT:
                take = min(_down(left), BLOCK - size)
                batch.append(part[at : at + take])
                size += take
            else:
                take = min(left, len(arena) - used)
                if (address + at - gathered) % ALIGNMENT == 0:
                    # Source and arena reach a boundary together: stop there, and go on without a copy.
                    take = min(take, ALIGNMENT - gathered % ALIGNMENT)
                np.copyto(arena[used : used + take], part[at : at + take])
                used, gathered = used + take, gathered + take
                if gathered % ALIGNMENT == 0:
                    batch.append(arena[used - gathered : used])
                    size, gathered = size + gathered, 0
            at += take
            if gathered == 0 and (size >= BLOCK or used == len(arena) or len(batch) == _BUFFERS_PER_CALL):
                yield batch
                batch, size, used = [], 0, 0
    if gathered:
        end = used - gathered + _down(gathered + ALIGNMENT - 1)
        arena[used:end] = 0
        batch.append(arena[used - gathered : end])
    if batch:
        yield batch


def plain_batches(parts: Sequence[Bytes]) -> Iterator[list[Bytes]]:
    """Cut ``parts`` into batches of at most `BLOCK` bytes for buffered writes."""
    batch: list[Bytes] = []
    size = 0
    for part in parts:
        at = 0
        while at < len(part):
            take = min(len(part) - at, BLOCK - size)
            batch.append(part[at : at + take])
            at, size = at + take, size + take
            if size == BLOCK or len(batch) == _BUFFERS_PER_CALL:
                yield batch
                batch, size = [], 0
    if batch:
        yield batch


def _write_batch(fd: int, batch: list[Bytes], position: int, stop: Stop) -> int:
    while batch:
        _check(stop)
        try:
            written = os.pwritev(fd, [buffer.data for buffer in batch], position)
        except OSError as error:
            # Also what a short direct write leads to, since its rest is not aligned.
            if error.errno != errno.EINVAL or not _leave_direct(fd):
                raise
            continue
        position += written
        batch = _without(batch, written)
    return position


def _without(batch: list[Bytes], count: int) -> list[Bytes]:
    """What is left of ``batch`` after its first ``count`` bytes."""
    for index, buffer in enumerate(batch):
        if count < len(buffer):
            return [buffer[count:], *batch[index + 1 :]]
        count -= len(buffer)
    return []


def _fill_in_place(fd: int, offset: int, into: Bytes, stop: Stop) -> int:
    done = 0
    while done < len(into):
        _check(stop)
        want = into[done : done + BLOCK]
        whole = _down(len(want))
        tail = _arena()[:ALIGNMENT] if whole < len(want) else _EMPTY
        got = os.preadv(fd, [buffer.data for buffer in (want[:whole], tail) if len(buffer)], offset + done)
        if got > whole:
            over = min(got, len(want)) - whole
            np.copyto(want[whole : whole + over], tail[:over])
        done += min(got, len(want))
        if got % ALIGNMENT or got == 0:
            break  # the end of the file, or a short read that only buffered I/O can go on from
    return done


def _fill_through_arena(fd: int, offset: int, into: Bytes, stop: Stop) -> int:
    done = 0
    for piece in _pieces(fd, offset, len(into), stop, ALIGNMENT):
        np.copyto(into[done : done + len(piece)], piece)
        done += len(piece)
    return done


def _pieces(fd: int, offset: int, nbytes: int, stop: Stop, unit: int) -> Iterator[Bytes]:
    """Bytes of a file, each piece in the arena until the next is asked for, up to the end of the file.

    Reads begin at multiples of ``unit``, and a short one that does not end there was the last.
    """
    arena, done = _arena(), 0
    while done < nbytes:
        _check(stop)
        skip = (offset + done) % unit
        wanted = -(-(skip + nbytes - done) // unit) * unit
        got = os.preadv(fd, [arena[:wanted].data], offset + done - skip)
        fresh = min(got - skip, nbytes - done)
        if fresh <= 0:
            break
        yield arena[skip : skip + fresh]
        done += fresh
        if got % unit:
            break


def _leave_direct(fd: int) -> bool:
    """Switch a descriptor to buffered I/O; False if it was that already."""
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    if not O_DIRECT or not flags & O_DIRECT:
        return False
    fcntl.fcntl(fd, fcntl.F_SETFL, flags & ~O_DIRECT)
    return True


def _arena() -> Bytes:
    arena: Bytes | None = getattr(_of_thread, "arena", None)
    if arena is None:
        arena = private_memory(_ARENA)
        _of_thread.arena = arena
    return arena


def _address(array: Bytes) -> int:
    return int(array.__array_interface__["data"][0])


def _down(count: int) -> int:
    return count - count % ALIGNMENT


def _check(stop: Stop) -> None:
    if stop.is_set():
        raise Stopped
