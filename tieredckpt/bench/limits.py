"""The machine's limits for the bytes of a state: copy, hash, write, read, and fresh memory."""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import numpy.typing as npt

from tieredckpt.bench.workloads import State
from tieredckpt.blobs.checkup import warm_memory
from tieredckpt.format.digest import digest_array

__all__ = ["Limits", "open_direct", "seconds"]

_BLOCK = 16 << 20
_FRESH = 256 << 20
"""Bytes of the sample of fresh memory."""


def seconds(work: Callable[[], object]) -> float:
    """Seconds of ``work``."""
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


class Limits:
    """Measures with the arrays of ``state``, and a warm copy of them in `into`; several ranks measure at once."""

    def __init__(self, state: State, folder: Path, threads: int, meet: Callable[[], None] = lambda: None) -> None:
        """``meet`` is called before each measurement, and returns when every rank has called it."""
        self.into: State = {key: array.copy() for key, array in state.items()}  # zeros would be no memory yet
        self.nbytes = sum(array.nbytes for array in state.values())
        self._state = state
        self._threads = threads
        self._pool = ThreadPoolExecutor(threads)
        self._meet = meet
        self._file = folder / f"limit-{os.getpid()}"
        self._memory = warm_memory(_BLOCK)

    def close(self) -> None:
        """Release the threads and the file."""
        self._pool.shutdown()
        self._file.unlink(missing_ok=True)

    def _seconds(self, work: Callable[[], object]) -> float:
        self._meet()
        return seconds(work)

    def memcpy(self) -> float:
        """Seconds to copy the state into warm memory with all threads."""

        def copy(key: str) -> None:
            np.copyto(self.into[key], self._state[key])

        return self._seconds(lambda: list(self._pool.map(copy, self._state)))

    def memcpy_by_one(self) -> float:
        """As `memcpy`, with one thread."""

        def copy() -> None:
            for key, array in self._state.items():
                np.copyto(self.into[key], array)

        return self._seconds(copy)

    def hash(self) -> float:
        """Seconds to digest the state with one thread."""

        def work() -> None:
            for array in self._state.values():
                digest_array(array.reshape(-1).view(np.uint8))

        return self._seconds(work)

    def fresh(self) -> float:
        """Seconds to touch every page of as much memory as the state has, extrapolated from a sample."""
        size = min(_FRESH, self.nbytes)
        pages = np.frombuffer(mmap.mmap(-1, size), dtype=np.uint8)[:: mmap.PAGESIZE]
        return self._seconds(lambda: pages.fill(1)) * self.nbytes / size

    def fresh_copy(self) -> float:
        """Seconds to copy the state with all threads into memory never touched before, extrapolated from a sample."""
        sample: list[npt.NDArray[np.uint8]] = []
        size = 0
        for array in self._state.values():
            sample.append(array.reshape(-1).view(np.uint8)[: _FRESH - size])
            size += sample[-1].nbytes
        memory = np.frombuffer(mmap.mmap(-1, size), dtype=np.uint8)
        places = np.split(memory, np.cumsum([part.nbytes for part in sample])[:-1])
        return self._seconds(lambda: list(self._pool.map(np.copyto, places, sample))) * self.nbytes / size

    def write(self, nbytes: int | None = None) -> float:
        """Seconds of a sequential write of ``nbytes``, by default those of the state, fsync included; direct where the
        file system can.
        """
        nbytes = nbytes or self.nbytes
        self._file.unlink(missing_ok=True)
        fd = open_direct(self._file, os.O_WRONLY | os.O_CREAT)

        def work() -> None:
            at = 0
            while at < nbytes:  # whole blocks: direct writes are to be aligned
                at += os.pwrite(fd, self._memory.data, at)
            os.fsync(fd)

        try:
            return self._seconds(work) * nbytes / max(nbytes, os.fstat(fd).st_size)
        finally:
            os.close(fd)

    def read(self, files: Sequence[Path], skip: int = 0) -> float:
        """Seconds of a sequential read of as many bytes of ``files``, beyond the first ``skip``; direct if possible."""
        got = 0

        def work() -> None:
            nonlocal got, skip
            for file in files:
                if skip >= (size := file.stat().st_size):
                    skip -= size
                    continue
                fd = open_direct(file, os.O_RDONLY)
                try:
                    at, skip = skip // mmap.PAGESIZE * mmap.PAGESIZE, 0
                    while got < self.nbytes and (count := os.preadv(fd, [self._memory.data], at)):
                        at += count
                        got += count
                        if count % mmap.PAGESIZE:
                            break  # the end of the file, which direct I/O could not go on from
                finally:
                    os.close(fd)

        took = self._seconds(work)
        return took * self.nbytes / max(got, 1)


def open_direct(path: Path, flags: int) -> int:
    """A descriptor that bypasses the page cache where the file system allows it."""
    try:
        return os.open(path, flags | getattr(os, "O_DIRECT", 0), 0o600)
    except OSError:
        return os.open(path, flags, 0o600)
