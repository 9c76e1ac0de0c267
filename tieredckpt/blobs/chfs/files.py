"""The objects that are open in the worker: those being written, and those read recently.

A restore reads many ranges of few packs, and opening an object costs requests to several servers. So an object that was
read stays open for a while for the next read; it costs only a number in the worker.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from itertools import count

from tieredckpt.blobs.chfs import frames
from tieredckpt.blobs.chfs.link import Link
from tieredckpt.concurrency import shielded, whole
from tieredckpt.errors import TieredCkptError

__all__ = ["Files"]

_IN_USE = 32
_IDLE = 16
"""Idle objects; with `_IN_USE` fewer than the 64 from which on the client makes the next open wait."""

_TRUSTED = 10.0
"""Seconds after which an object is opened again: another process may have replaced it by one with other chunks."""


@dataclass(slots=True)
class _Open:
    link: Link
    opening: asyncio.Task[int]
    since: float
    users: int = 0


class Files:
    """The open objects of a store, on whatever link it has; used on one event loop.

    Args:
        grace: seconds that closing after a failure may take.
    """

    def __init__(self, grace: float) -> None:
        self._grace = grace
        self._slots = asyncio.Semaphore(_IN_USE)
        self._numbers = count(1)
        self._lent: OrderedDict[str, _Open] = OrderedDict()
        """Open for the next read, the longest unread first."""
        self._unused: list[_Open] = []
        """Lent no more and without users: to be closed."""

    @asynccontextmanager
    async def created(self, link: Link, path: str, chunk_size: int) -> AsyncIterator[int]:
        """The number of a new object, for the length of the block."""
        async with self._slots:
            file = next(self._numbers)
            try:
                await link.ask(frames.Create(file, path, chunk_size))
                yield file
            except BaseException:
                await whole(self.clean_up(link, frames.Close(file)))
                raise
            await link.ask(frames.Close(file))

    @asynccontextmanager
    async def opened(self, link: Link, path: str) -> AsyncIterator[int]:
        """The number of an object to read from, for the length of the block. After an error it is opened again.

        ``path`` must be an object and no link: the worker does not check.
        """
        async with self._slots:
            entry = self._entry(link, path)
            entry.users += 1
            try:
                yield await shielded(entry.opening)
            except BaseException:
                if self._lent.get(path) is entry:
                    self.forget(path)
                raise
            finally:
                entry.users -= 1
                if not entry.users and self._lent.get(path) is not entry:
                    self._unused.append(entry)
                self._thin_out()
                if self._unused:
                    await whole(self._close())

    def forget(self, path: str) -> None:
        """Open the object again at its next read. What is open is closed when its last user is done."""
        entry = self._lent.pop(path, None)
        if entry is not None and not entry.users:
            self._unused.append(entry)

    async def clean_up(self, link: Link, command: frames.Command) -> None:
        """Send a command after a failure: in bounded time, and its own failure is ignored."""
        if not link.broken:
            with suppress(TieredCkptError, TimeoutError):
                async with asyncio.timeout(self._grace):
                    await link.ask(command)

    def _entry(self, link: Link, path: str) -> _Open:
        entry = self._lent.get(path)
        if entry is not None and (entry.link is not link or time.monotonic() - entry.since > _TRUSTED):
            self.forget(path)
            entry = None
        if entry is None:
            opening = asyncio.ensure_future(self._open(link, path))
            entry = self._lent[path] = _Open(link, opening, time.monotonic())
        self._lent.move_to_end(path)
        return entry

    async def _open(self, link: Link, path: str) -> int:
        file = next(self._numbers)
        try:
            await link.ask(frames.Open(file, path))
        except BaseException:
            await self.clean_up(link, frames.Close(file))
            raise
        return file

    def _thin_out(self) -> None:
        idle = [path for path, entry in self._lent.items() if not entry.users]
        for path in idle[: max(0, len(idle) - _IDLE)]:
            self.forget(path)

    async def _close(self) -> None:
        while self._unused:
            entry = self._unused.pop()
            entry.opening.cancel()  # if it still runs, no caller waits for it, and it may hang
            await asyncio.wait([entry.opening])
            if not entry.opening.cancelled() and entry.opening.exception() is None:
                await self.clean_up(entry.link, frames.Close(entry.opening.result()))
