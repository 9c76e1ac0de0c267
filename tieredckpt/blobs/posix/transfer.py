"""Moves bytes between memory and an open file: direct I/O where alignment allows it, buffered elsewhere.

Everything here blocks and belongs on a thread. Memory is one-dimensional uint8 arrays (`as_arrays`), so that
large copies release the GIL. A transfer looks at its `Stop` before every system call, and no call moves more
than about `BLOCK` bytes.

Direct I/O wants file offset, length and address to be multiples of `ALIGNMENT`. Other bytes go through an *arena*,
aligned memory that the thread keeps because fresh pages cost more than the copy; so do bytes for a `Target`. A file
system that accepts ``O_DIRECT`` and then refuses a transfer (``EINVAL``) is served by buffered I/O.
"""

from __future__ import annotations

import errno
import fcntl
import os
import threading
from collections.abc import Iterator, Sequence

import numpy as np

from tieredckpt.blobs.base import ALIGNMENT, Buffer, Stretch
from tieredckpt.blobs.mapping import private_memory
from tieredckpt.blobs.posix.target import Bytes, Stop, Stopped, Target
from tieredckpt.devices.base import address

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
    "check",
    "fill",
    "plain_batches",
    "read",
    "write",
    "write_batch",
]

BLOCK = 16 << 20
"""Most bytes of one system call, hence how much a cancelled transfer may still move."""

DIRECT_FROM = 1 << 20
"""The page cache serves smaller transfers better."""

O_DIRECT: int = getattr(os, "O_DIRECT", 0)
"""The flag of direct I/O; 0 on platforms without it."""

_ARENA = 4 << 20
"""Bytes of a read into the arena before they are copied; larger reads make a fast device wait more for the next one."""
_BUFFERS_PER_CALL = 512  # half of Linux's IOV_MAX
_EMPTY: Bytes = np.empty(0, dtype=np.uint8)

_of_thread = threading.local()


class EndOfFile(Exception):
    """The file ended after ``got`` bytes of the range; internal, stores raise `ShortRead`."""

    def __init__(self, got: int) -> None:
        super().__init__(got)
        self.got = got


def as_arrays(parts: Sequence[Buffer]) -> tuple[Bytes, ...]:
    """The memory of ``parts`` as 1-D uint8 arrays, without a copy; empty parts are left out."""
    return tuple(np.frombuffer(part, dtype=np.uint8) for part in parts if memoryview(part).nbytes)


def write(fd: int, parts: Sequence[Bytes], stop: Stop, *, direct: bool, block: int = BLOCK) -> None:
    """Write ``parts`` from the start of an empty file, and cut it to their length.

    With ``direct`` the descriptor was opened with `O_DIRECT`. Calls end at multiples of ``block`` bytes, itself one of
    `ALIGNMENT`, as far as they can. Raises `OSError`, `Stopped`.
    """
    position = 0
    for batch in aligned_batches(parts, _arena(), block) if direct else plain_batches(parts, block):
        position = write_batch(fd, batch, position, stop)
    total = sum(len(part) for part in parts)
    os.ftruncate(fd, total)


def fill(fd: int, offset: int, into: Bytes, stop: Stop, *, direct: bool) -> None:
    """Fill ``into`` with the bytes of a file from ``offset`` on, in place where alignment allows it.

    With ``direct`` the descriptor was opened with `O_DIRECT`. Raises `OSError`, `EndOfFile`, `Stopped`.
    """
    if direct and (offset % ALIGNMENT or address(into) % ALIGNMENT):
        read(fd, Target([Stretch(offset, len(into), memoryview(into))], digested=False, stop=stop), direct=True)
        return
    done = 0
    if direct:
        try:
            done = _fill_in_place(fd, offset, into, stop)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
        if done < len(into):
            _leave_direct(fd)
    while done < len(into):
        check(stop)
        got = os.preadv(fd, [into[done : done + BLOCK].data], offset + done)
        if got == 0:
            raise EndOfFile(done)
        done += got


def read(fd: int, target: Target, *, direct: bool) -> None:
    """Read the bytes that ``target`` wants, and copy them to its memory through the arena.

    With ``direct`` the descriptor was opened with `O_DIRECT`. Raises `OSError`, `EndOfFile`, `Stopped`.
    """
    if direct:
        try:
            _take_pieces(fd, target, ALIGNMENT)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
        if target.at < target.end:
            _leave_direct(fd)
    _take_pieces(fd, target, 1)
    if target.at < target.end:
        raise EndOfFile(target.at - target.begin)


def _take_pieces(fd: int, target: Target, unit: int) -> None:
    """Read until the target or the file ends; reads begin at multiples of ``unit``.

    A short read that does not end at such a multiple was the last one.
    """
    arena = _arena()
    while target.at < target.end:
        check(target.stop)
        skip, nbytes = target.at % unit, target.end - target.at
        wanted = -(-(skip + nbytes) // unit) * unit
        got = os.preadv(fd, [arena[:wanted].data], target.at - skip)
        fresh = min(got - skip, nbytes)
        if fresh <= 0:
            break
        target.take(arena[skip : skip + fresh])
        if got % unit:
            break


def aligned_batches(parts: Sequence[Bytes], arena: Bytes, block: int = BLOCK) -> Iterator[list[Bytes]]:
    """Cut ``parts`` into batches for direct writes: every buffer's address and length is aligned.

    Aligned stretches of the parts are passed on as they are, the rest is gathered in ``arena`` (aligned in
    address and length). The last buffer is padded with zeros. A batch is valid until the next is asked for. One that
    has to end before a multiple of ``block`` is followed by one that ends there.
    """
    batch: list[Bytes] = []
    room = block
    size = used = gathered = 0  # bytes in batch; bytes of arena taken; of these, not yet in batch
    for part in parts:
        begin, at = address(part), 0
        while at < len(part):
            left = len(part) - at
            if gathered == 0 and (begin + at) % ALIGNMENT == 0 and left >= ALIGNMENT:
                take = min(_down(left), room - size)
                batch.append(part[at : at + take])
                size += take
            else:
                take = min(left, len(arena) - used, room - size - gathered)
                if (begin + at - gathered) % ALIGNMENT == 0:
                    # Source and arena reach a boundary together: stop there, and go on without a copy.
                    take = min(take, ALIGNMENT - gathered % ALIGNMENT)
                np.copyto(arena[used : used + take], part[at : at + take])
                used, gathered = used + take, gathered + take
                if gathered % ALIGNMENT == 0:
                    batch.append(arena[used - gathered : used])
                    size, gathered = size + gathered, 0
            at += take
            if gathered == 0 and (size == room or used == len(arena) or len(batch) == _BUFFERS_PER_CALL):
                yield batch
                room = room - size or block
                batch, size, used = [], 0, 0
    if gathered:
        end = used - gathered + _down(gathered + ALIGNMENT - 1)
        arena[used:end] = 0
        batch.append(arena[used - gathered : end])
    if batch:
        yield batch


def plain_batches(parts: Sequence[Bytes], block: int = BLOCK) -> Iterator[list[Bytes]]:
    """Cut ``parts`` into batches for buffered writes, which end at multiples of ``block`` as `aligned_batches` do."""
    batch: list[Bytes] = []
    room, size = block, 0
    for part in parts:
        at = 0
        while at < len(part):
            take = min(len(part) - at, room - size)
            batch.append(part[at : at + take])
            at, size = at + take, size + take
            if size == room or len(batch) == _BUFFERS_PER_CALL:
                yield batch
                room = room - size or block
                batch, size = [], 0
    if batch:
        yield batch


def write_batch(fd: int, batch: list[Bytes], position: int, stop: Stop) -> int:
    """Write buffers one after the other from ``position`` on; returns where they end. Raises `OSError`, `Stopped`."""
    while batch:
        check(stop)
        direct = _is_direct(fd)  # before: another thread that writes to the file may make it buffered meanwhile
        try:
            written = os.pwritev(fd, [buffer.data for buffer in batch], position)
        except OSError as error:
            # This also handles a short direct write, since its rest is not aligned.
            if error.errno != errno.EINVAL or not direct:
                raise
            _leave_direct(fd)
            continue
        position += written
        batch = _without(batch, written)
    return position


def _without(batch: list[Bytes], count: int) -> list[Bytes]:
    """The rest of ``batch`` after its first ``count`` bytes."""
    for index, buffer in enumerate(batch):
        if count < len(buffer):
            return [buffer[count:], *batch[index + 1 :]]
        count -= len(buffer)
    return []


def _fill_in_place(fd: int, offset: int, into: Bytes, stop: Stop) -> int:
    done = 0
    while done < len(into):
        check(stop)
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


def _is_direct(fd: int) -> bool:
    return bool(fcntl.fcntl(fd, fcntl.F_GETFL) & O_DIRECT)


def _leave_direct(fd: int) -> None:
    """Switch a descriptor to buffered I/O."""
    fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) & ~O_DIRECT)


def _arena() -> Bytes:
    arena: Bytes | None = getattr(_of_thread, "arena", None)
    if arena is None:
        arena = private_memory(_ARENA)
        _of_thread.arena = arena
    return arena


def _down(count: int) -> int:
    return count - count % ALIGNMENT


def check(stop: Stop) -> None:
    """Raise `Stopped` if ``stop`` is set."""
    if stop.is_set():
        raise Stopped
