"""The caller's memory while a thread fills it; the caller may take it back at any time.

The thread reads into memory of its own, since a read may hang in the device for ever, and copies from there. So the
caller waits for a copy at most, never for the device.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from tieredckpt.blobs.base import Stretch, span
from tieredckpt.blobs.landing import Landing

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
        self._digested = digested
        self._guards_memory = threading.Lock()
        self.restart()

    @property
    def at(self) -> int:
        """Offset of the next byte that is wanted."""
        return self._landing.at

    @property
    def digests(self) -> list[bytes]:
        """Of all stretches, once everything has been taken."""
        return self._landing.digests

    def restart(self) -> None:
        """Begin again: all bytes are wanted once more."""
        with self._guards_memory:
            self._landing = Landing(self.begin, self._stretches, digested=self._digested)

    def take(self, piece: Bytes) -> None:
        """Copy the bytes of the file from `at` on to the memory. Raises `Stopped` when the memory was taken back."""
        with self._guards_memory:
            if self.stop.is_set():
                raise Stopped
            self._landing.take(piece)

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
            self._stretches = ()
            self._landing = Landing(self.begin, (), digested=False)
