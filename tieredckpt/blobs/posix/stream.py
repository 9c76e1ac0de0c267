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

__all__ = ["Blocks", "StreamedFile", "new_blocks", "new_file"]

_BLOCK = 16 << 20
"""Bytes of a write. With 8 MiB a device of 3.5 GB/s was given a tenth less."""
_IN_FLIGHT = 2
"""Writes at a time: a device that has the next one already does not wait for the thread that fills the blocks."""

Blocks = tuple[Bytes, ...]
"""Page-aligned memory for the writes in flight, the one that is filled, and one more."""


def new_blocks() -> Blocks:
    """Memory for `new_file`, for use by one file after the other: new memory costs more than the copy to it."""
    return tuple(private_memory(_BLOCK) for _ in range(_IN_FLIGHT + 2))


class StreamedFile:
    """An open file, of which the bytes are gathered to blocks that other threads write. For one thread."""

    def __init__(self, fd: int, stop: Stop, blocks: Blocks) -> None:
        self._fd, self._stop = fd, stop
        self._filling, *free = blocks
        self._free = deque(free)
        self._used = 0
        self._position = 0
        self._writing: deque[tuple[Bytes, Future[int]]] = deque()

    def write(self, data: Any, /) -> int:
        """Append bytes of any contiguous buffer. Raises `OSError`, `Stopped`, also for what was appended before."""
        array = np.frombuffer(data, np.uint8)
        at = 0
        while at < array.size:
            take = min(array.size - at, _BLOCK - self._used)
            # Past the caches, unlike NumPy's copy, which takes twice as long; of the digest nobody asks.
            copy_and_digest(array[at : at + take], self._filling[self._used : self._used + take])
            self._used += take
            at += take
            if self._used == _BLOCK:
                self._hand_over(_BLOCK)
        return array.size

    def flush(self) -> None:
        """Nothing: `new_file` flushes what is complete."""

    def _hand_over(self, nbytes: int) -> None:
        while len(self._writing) >= _IN_FLIGHT:
            self._wait()
        # Not of a pool, for which an exiting process waits also if it hangs in the device.
        block = self._filling[:nbytes]
        writing = begun_on_own_thread("file", write_batch, self._fd, [block], self._position, self._stop)
        self._writing.append((self._filling, writing))
        self._position += nbytes
        self._filling, self._used = self._free.popleft(), 0

    def _wait(self) -> None:
        """Wait for the oldest write."""
        block, writing = self._writing[0]
        writing.result()  # of one that failed, `give_up` is to know
        self._writing.popleft()
        self._free.append(block)

    def finish(self) -> None:
        """Flush all of it to the device."""
        size = self._position + self._used
        if self._used:
            padded = -(-self._used // ALIGNMENT) * ALIGNMENT
            self._filling[self._used : padded] = 0
            self._hand_over(padded)
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
    """A new file at ``path``; flushed to the device at the end of the block, and removed if that raises.

    ``stop`` ends the writing, which raises `Stopped` then; ``blocks`` is memory that it takes. Raises `OSError`;
    `FileExistsError` where something is.
    """
    fd = _opened(path)
    try:
        file = StreamedFile(fd, stop or Stop(), blocks or new_blocks())
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
            path.unlink()  # which some file systems have made all the same
        return os.open(path, flags, 0o666)
