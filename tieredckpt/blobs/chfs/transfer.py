"""Moves the bytes of an object between memory and the worker, piece by piece, in place where both can reach it."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, suppress

import numpy as np
import numpy.typing as npt

from tieredckpt.blobs.base import ALIGNMENT, Buffer
from tieredckpt.blobs.chfs import frames
from tieredckpt.blobs.chfs.files import Files
from tieredckpt.blobs.chfs.link import Link
from tieredckpt.blobs.ram.lending import borrow
from tieredckpt.blobs.ram.slab import Slab, page_aligned
from tieredckpt.concurrency import in_thread, together, whole
from tieredckpt.errors import TieredCkptError

__all__ = ["Transfer", "chunk_size_for", "piece_size"]

_IN_PLACE_FROM = 64 << 10
"""A shorter run of a piece is copied together with its neighbours, which costs less than a call of its own."""


class Transfer:
    """Reads and writes objects.

    Args:
        chunk_size: bytes of a CHFS chunk of large objects.
        threads: how many pieces are on their way at a time.
        arena: bytes of memory for what the worker cannot reach.
        grace: seconds that cleaning up after a put that broke off may take.
    """

    def __init__(self, chunk_size: int, threads: int, arena: int, grace: float) -> None:
        self._chunk_size, self._threads, self._grace = chunk_size, threads, grace
        self._piece = piece_size(chunk_size)
        self._arena = Arena(max(arena, self._piece))
        self._files = Files(grace)
        self._pieces = asyncio.Semaphore(threads)
        self.copied = 0
        """Bytes that went through the arena."""

    async def read(self, link: Link, path: str, offset: int, into: memoryview) -> None:
        """Fill ``into`` with the bytes from ``offset`` on, of what is known to be an object."""

        async def fill(file: int, pieces: Iterator[tuple[int, int]]) -> None:
            for start, stop in pieces:
                async with self._pieces:
                    await self._fill(link, file, start, into[start - offset : stop - offset])

        if len(into):
            async with self._files.opened(link, path) as file:
                pieces = ranges(offset, len(into), self._piece)
                await together(fill(file, pieces) for _ in range(self._threads))

    async def write(self, link: Link, path: str, parts: Sequence[Buffer]) -> None:
        """Write the concatenation of ``parts`` as a new object; after a failure, its remains are removed."""
        nbytes = sum(memoryview(part).nbytes for part in parts)
        chunk_size = chunk_size_for(nbytes, self._chunk_size)
        begun: dict[int, int] = {}
        """Offsets and sizes of the pieces that may not have been written."""

        async def send(file: int, pieces: Iterator[tuple[int, list[memoryview]]]) -> None:
            for start, memory in pieces:
                begun[start] = sum(map(len, memory))
                async with self._pieces:
                    await self._send(link, file, start, memory)
                del begun[start]

        try:
            async with self._files.created(link, path, chunk_size) as file:
                pieces = cut(parts, self._piece)
                try:
                    await together(send(file, pieces) for _ in range(self._threads))
                except BaseException:
                    missing = [at for start, size in begun.items() for at, _ in ranges(start, size, chunk_size)]
                    await whole(self._fill_gaps(link, file, missing))
                    raise
        except BaseException:
            await whole(self._files.clean_up(link, frames.Remove(path)))
            raise
        finally:
            self._files.forget(path)  # also an object that a reader opened meanwhile: it may know the old chunks

    async def _fill_gaps(self, link: Link, file: int, offsets: Sequence[int]) -> None:
        """Write a byte at each offset, so that every chunk exists.

        A removal ends at the first missing chunk, and the chunks behind it would show through a later object.
        """
        with suppress(TieredCkptError, TimeoutError):
            async with asyncio.timeout(self._grace) as limit, self._lent(link, 1) as (_, span):
                limit.reschedule(None)  # each command has its own
                for offset in offsets:
                    await self._files.clean_up(link, frames.Write(file, offset, [span]))

    async def overwrite(self, link: Link, path: str, data: bytes) -> None:
        """Replace an object of one chunk, in one request, by ``data``, which is at least as long."""
        async with self._files.opened(link, path) as file, self._lent(link, len(data)) as (room, span):
            room[:] = np.frombuffer(data, dtype=np.uint8)
            await link.ask(frames.Write(file, 0, [span]))

    def forget(self, path: str) -> None:
        """Open the object at ``path`` again at its next read, since it was replaced or removed."""
        self._files.forget(path)

    async def close(self) -> None:
        await in_thread(self._arena.close)

    async def _fill(self, link: Link, file: int, offset: int, into: memoryview) -> None:
        span = await link.span(into, to_fill=True)
        if span is not None:
            await link.ask(frames.Read(file, offset, [span]))
            return
        async with self._lent(link, len(into)) as (room, span):
            await link.ask(frames.Read(file, offset, [span]))
            await in_thread(np.copyto, np.frombuffer(into, dtype=np.uint8), room)

    async def _send(self, link: Link, file: int, offset: int, memory: list[memoryview]) -> None:
        """Send one piece: runs that the worker can reach stay in place, the rest is gathered in the arena."""
        reachable: list[frames.Span | None] = [
            await link.span(run) if len(run) >= _IN_PLACE_FROM or len(memory) == 1 else None for run in memory
        ]
        rest = [run for run, span in zip(memory, reachable, strict=True) if span is None]
        nbytes = sum(map(len, rest))
        if not nbytes:
            await link.ask(frames.Write(file, offset, [span for span in reachable if span is not None]))
            return
        async with self._lent(link, nbytes) as (room, lent):
            await in_thread(_gather, rest, room)
            await link.ask(frames.Write(file, offset, _joined(memory, reachable, lent)))

    @asynccontextmanager
    async def _lent(self, link: Link, nbytes: int) -> AsyncIterator[tuple[npt.NDArray[np.uint8], frames.Span]]:
        async with self._arena.lend(nbytes) as room:
            span = await link.span(room.data)
            assert span is not None, "the arena is shared memory"
            self.copied += nbytes
            yield room, span


def _gather(runs: Sequence[memoryview], room: npt.NDArray[np.uint8]) -> None:
    at = 0
    for run in runs:
        np.copyto(room[at : at + len(run)], np.frombuffer(run, dtype=np.uint8))
        at += len(run)


def _joined(
    memory: Sequence[memoryview], reachable: Sequence[frames.Span | None], lent: frames.Span
) -> list[frames.Span]:
    """The spans of a piece in their order, with the runs that were gathered in ``lent`` between the others."""
    region, at, _ = lent
    spans: list[frames.Span] = []
    growing = False  # whether the last span is one of the arena, which the next run goes on with
    for run, span in zip(memory, reachable, strict=True):
        if span is not None:
            spans.append(span)
        else:
            start = spans.pop()[1] if growing else at
            at += len(run)
            spans.append((region, start, at - start))
        growing = span is None
    return spans


class Arena:
    """Lends pieces of one memfd; callers wait while too little is free. Belongs to one event loop."""

    def __init__(self, capacity: int) -> None:
        self.capacity = page_aligned(capacity)
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


_PIECE = 4 << 20
"""Bytes of a piece; their transfer takes much longer than the command."""


def piece_size(chunk_size: int) -> int:
    """The least multiple of the CHFS chunk that is worth a command of its own."""
    return -(-_PIECE // chunk_size) * chunk_size


def chunk_size_for(nbytes: int, chunk_size: int) -> int:
    """The chunk size of an object: a small object is one chunk, a little larger than the object.

    If an object ends with a full chunk, another may follow, so each look at the object has to ask every server.
    """
    return min(chunk_size, (nbytes // ALIGNMENT + 1) * ALIGNMENT)


def cut(parts: Sequence[Buffer], size: int) -> Iterator[tuple[int, list[memoryview]]]:
    """The concatenation of ``parts`` as pieces of ``size`` bytes: the offset of each, and its memory."""
    piece: list[memoryview] = []
    start = filled = 0
    for part in parts:
        view, at = memoryview(part).cast("B"), 0
        while at < len(view):
            take = min(len(view) - at, size - filled)
            piece.append(view[at : at + take])
            at, filled = at + take, filled + take
            if filled == size:
                yield start, piece
                piece, start, filled = [], start + size, 0
    if piece:
        yield start, piece


def ranges(offset: int, nbytes: int, size: int) -> Iterator[tuple[int, int]]:
    """The bytes from ``offset`` on as ``(start, stop)``, cut at multiples of ``size``."""
    end = offset + nbytes
    while offset < end:
        stop = min(end, offset - offset % size + size)
        yield offset, stop
        offset = stop
