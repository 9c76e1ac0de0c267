"""The caller's memory while a thread fills it; the caller may take it back at any time.

The thread reads into memory of its own, since a read may hang in the device for ever, and copies from there. So the
caller waits for a copy at most, never for the device.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from tieredckpt.blobs.base import Stretch, span
from tieredckpt.format.digest import CopyDigester

__all__ = ["Bytes", "Stop", "Stopped", "Target"]

Bytes = npt.NDArray[np.uint8]
Stop = threading.Event

_TURN = 0.001
"""Seconds between two looks whether a copy of a few MiB has ended."""


class Stopped(Exception):
    """The transfer was asked to stop; internal, never leaves a store."""


class Target:
    """Memory for stretches of a file, in order and without overlap; with ``digested``, it computes their digests too.

    The reading thread calls `take` and `restart`; the loop of the caller calls `take_back` and `let_go`, which set
    ``stop``.
    """

    def __init__(self, stretches: Sequence[Stretch], *, digested: bool, stop: Stop | None = None) -> None:
        self.begin = stretches[0].offset
        self.end = self.begin + span(stretches)
        self.stop = stop or Stop()
        self._stretches = tuple(stretches)
        self._copier: type[_Copier | CopyDigester] = CopyDigester if digested else _Copier
        self._guards_memory = threading.Lock()
        self.restart()

    def restart(self) -> None:
        """Begin again: all bytes are wanted once more."""
        with self._guards_memory:
            self.at = self.begin
            """Offset of the next byte that is wanted."""
            self.digests: list[bytes] = []
            self._waiting = deque(self._stretches)
            self._copying: _Copier | CopyDigester | None = None

    def take(self, piece: Bytes) -> None:
        """Copy the bytes of the file from `at` on to the memory. Raises `Stopped` when the memory was taken back."""
        with self._guards_memory:
            if self.stop.is_set():
                raise Stopped
            self._take(piece)

    def _take(self, piece: Bytes) -> None:
        begin, self.at = self.at, self.at + len(piece)
        while self._waiting and self._waiting[0].offset < self.at:
            offset, nbytes, into = self._waiting[0]
            first, end = max(offset, begin), min(offset + nbytes, self.at)
            if self._copying is None:
                self._copying = self._copier(nbytes)
            memory = np.frombuffer(into, dtype=np.uint8)
            self._copying.copy(piece[first - begin : end - begin], memory[first - offset : end - offset])
            if end < offset + nbytes:
                return
            self.digests.append(self._copying.digest())
            self._copying = None
            self._waiting.popleft()

    async def take_back(self) -> None:
        """As `let_go`, without blocking the loop, unless the coroutine is closed; a cancellation waits too."""
        self.stop.set()
        cancelled: asyncio.CancelledError | None = None
        try:
            while self._guards_memory.locked():  # a thread has it, for one copy
                try:
                    await asyncio.sleep(_TURN)
                except asyncio.CancelledError as error:
                    cancelled = error
        finally:
            self.let_go()
        if cancelled is not None:
            raise cancelled

    def let_go(self) -> None:
        """Stop all writes and references to the memory; waits for a copy under way."""
        self.stop.set()
        with self._guards_memory:
            self._waiting.clear()
            self._stretches = ()


class _Copier:
    """As `CopyDigester`, without the digest."""

    def __init__(self, nbytes: int) -> None:
        pass

    def copy(self, src: Bytes, dst: Bytes) -> None:
        np.copyto(dst, src[: dst.size])

    def digest(self) -> bytes:
        return b""
