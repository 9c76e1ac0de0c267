"""A file that is written from its start to its end, by direct I/O where the file system has it."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from tieredckpt.blobs.base import ALIGNMENT
from tieredckpt.blobs.mapping import private_memory
from tieredckpt.blobs.posix.transfer import O_DIRECT, Bytes, Stop, write_batch
from tieredckpt.concurrency import begun_on_own_thread
from tieredckpt.format.digest import copy_and_digest

__all__ = ["BLOCK", "Blocks", "StreamedFile", "new_file"]

BLOCK = 16 << 20
"""Bytes of a write. With 8 MiB a device of 3.5 GB/s was given a tenth less."""
_IN_FLIGHT = 2
"""Writes at a time: a device that has the next one already does not wait for the thread that fills the blocks."""
_KEPT = _IN_FLIGHT + 4
"""Blocks that are kept for reuse: those in flight, the gathered one, and three of a reader ahead of the writes."""


class Blocks:
    """Reusable page-aligned memory, in blocks of `BLOCK` bytes and a page. For one thread at a time.

    New memory costs more than the copy to it.
    """

    def __init__(self) -> None:
        self._free: list[Bytes] = []

    def take(self) -> Bytes:
        """A block, until it is given back. One that is never given back, since it may still be filled, is forgotten."""
        return self._free.pop() if self._free else private_memory(BLOCK + ALIGNMENT)

    def give_back(self, block: Bytes) -> None:
        if len(self._free) < _KEPT:
            self._free.append(block)


class StreamedFile:
    """An open file that is written in blocks, by other threads. To be used by one thread.

    Args:
        fd: of the file, which is empty.
        stop: ends the writing.
        blocks: memory.
    """

    def __init__(self, fd: int, stop: Stop, blocks: Blocks) -> None:
        self._fd, self._stop, self._blocks = fd, stop, blocks
        self._gathered, self._used = blocks.take(), 0
        """The block that gathers the end of the file, and how many bytes of it are in use."""
        self._position = 0
        """Bytes before that."""
        self._writing: deque[tuple[Bytes, Future[int]]] = deque()

    @property
    def size(self) -> int:
        """Bytes so far."""
        return self._position + self._used

    def write(self, data: Any, /) -> int:
        """Append bytes of any contiguous buffer. Raises `OSError`, `Stopped`, also for what was appended before."""
        array = np.frombuffer(data, np.uint8)
        at = 0
        while at < array.size:
            take = min(array.size - at, BLOCK - self._used)
            # Bypasses the caches, unlike NumPy's copy, which takes twice as long; the digest is not used.
            copy_and_digest(array[at : at + take], self._gathered[self._used : self._used + take])
            self._used += take
            at += take
            if self._used == BLOCK:
                self._hand_over(BLOCK)
        return array.size

    def lend(self, block: Bytes, start: int, end: int) -> None:
        """Append a range of a block from the same `Blocks`, without a copy; the file owns the block from now on.

        ``start`` is `size` modulo `ALIGNMENT`: what was gathered before fits into the same page. Raises as `write`.
        """
        if self._used >= ALIGNMENT:
            self._hand_over(self._used - self._used % ALIGNMENT)
        if start != self._used:
            raise ValueError(
                f"a range that begins at {start} in its page was lent for {self._used} in that of the file"
            )
        block[:start] = self._gathered[:start]
        whole = end - end % ALIGNMENT
        self._gathered[: end - whole] = block[whole:end]
        self._used = end - whole
        self._begin(block, whole)

    def flush(self) -> None:
        """Does nothing: `new_file` flushes the complete file."""

    def _hand_over(self, nbytes: int) -> None:
        """Begin to write the start of the gathered block; the rest, less than a page, moves to a new block."""
        block, rest = self._gathered, self._used - nbytes
        self._wait_for_room()
        self._gathered, self._used = self._blocks.take(), rest
        self._gathered[:rest] = block[nbytes : nbytes + rest]
        self._begin(block, nbytes)

    def _begin(self, block: Bytes, nbytes: int) -> None:
        if not nbytes:
            self._blocks.give_back(block)
            return
        self._wait_for_room()
        # Not in a pool: an exiting process would wait for it even if it hangs in the device.
        writing = begun_on_own_thread("file", write_batch, self._fd, [block[:nbytes]], self._position, self._stop)
        self._writing.append((block, writing))
        self._position += nbytes

    def _wait_for_room(self) -> None:
        while len(self._writing) >= _IN_FLIGHT:
            self._wait()

    def _wait(self) -> None:
        """Wait for the oldest write."""
        block, writing = self._writing[0]
        writing.result()  # if it failed, it stays in the queue for `give_up`
        self._writing.popleft()
        self._blocks.give_back(block)

    def finish(self) -> None:
        """Flush all of it to the device."""
        size = self.size
        padded = -(-self._used // ALIGNMENT) * ALIGNMENT
        self._gathered[self._used : padded] = 0
        self._begin(self._gathered, padded)
        while self._writing:
            self._wait()
        os.ftruncate(self._fd, size)
        os.fsync(self._fd)

    def give_up(self) -> None:
        """Wait until nothing writes any more."""
        self._stop.set()
        for _, writing in self._writing:
            with contextlib.suppress(Exception):
                writing.result()


@contextmanager
def new_file(path: Path, stop: threading.Event | None = None, blocks: Blocks | None = None) -> Iterator[StreamedFile]:
    """Write a new file at ``path``; it is flushed to the device at the end of the block, or removed if that raises.

    ``stop`` ends the writing, which raises `Stopped` then; ``blocks`` provides its memory. Raises `OSError`;
    `FileExistsError` if ``path`` exists.
    """
    fd = _opened(path)
    try:
        file = StreamedFile(fd, stop or Stop(), blocks or Blocks())
        try:
            yield file
            file.finish()
        except BaseException:
            file.give_up()
            with contextlib.suppress(OSError):
                path.unlink()
            raise
    finally:
        os.close(fd)


def _opened(path: Path) -> int:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    try:
        return os.open(path, flags | O_DIRECT, 0o666)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        with contextlib.suppress(FileNotFoundError):
            path.unlink()  # some file systems create the file all the same
        return os.open(path, flags, 0o666)
