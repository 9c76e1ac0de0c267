"""Stores that are open in this process: where each was opened, and how it is closed.

Its user closes a store; else the library does, when nobody refers to it any more, when another store takes over, or
when the process ends. A forked process has no open store of its parent.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import logging
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from tieredckpt.concurrency import in_thread, outlast
from tieredckpt.config import StoreConfig
from tieredckpt.engine.engine import Engine
from tieredckpt.engine.loop import EngineLoop, EngineThread
from tieredckpt.engine.ranks.communicator import Communicator
from tieredckpt.errors import Closed, Conflict

__all__ = [
    "EXIT_SECONDS",
    "Opened",
    "Place",
    "calling_line",
    "close_blocking",
    "close_store",
    "open_blocking",
    "open_store",
]

_log = logging.getLogger("tieredckpt")

EXIT_SECONDS = 60.0
"""How long the end of a process waits for promotions that are due, where its stores were not closed."""

_TOLD_AFTER = 2.0
"""Seconds of that wait after which the log says what the process waits for."""
_RELEASE_SECONDS = 5.0
"""Seconds that it then waits for the release of locks and leases; later openings see that their owner is dead."""


class Opened:
    """One store, from its opening to its close. Refers to no object of the user, so that these can be collected."""

    def __init__(self, loop: EngineLoop, engine: Engine, config: StoreConfig, place: Place, where: str) -> None:
        self.thread: EngineThread = loop.thread
        self.place = place
        self.where = where
        """File and line that opened it."""
        self.abandoned = False
        """Whether it is closed because nobody refers to it."""
        self._engine, self._config = engine, config
        self._started = False
        self._closing: asyncio.Task[None] | None = None
        self._waiting = 0
        _open.add(self)
        self.thread.ended.then(lambda: _open.discard(self))
        weakref.finalize(loop, self._abandon).atexit = False  # `_close_all` is in time for what it needs

    async def start(self, communicator: Communicator | None) -> None:
        """Open the tiers, on the engine's loop. Raises as `Engine.start`."""
        await self._engine.start(communicator)
        self._started = True

    def in_the_way(self, *, takeover: bool) -> list[Opened]:
        """Stores of this process to close before this one opens: with ``takeover`` all, else the abandoned ones."""
        return [other for other in self._beside() if takeover or other.abandoned]

    def explain(self, error: BaseException) -> None:
        """Raise a `Conflict` with a store of this process again, with the line that opened that store."""
        lines = [other.where for other in self._beside()]
        if isinstance(error, Conflict) and lines:
            raise Conflict(
                f"{error}. This process itself opened it at {', '.join(lines)} and has not closed it: close that "
                f"store, or open this one with takeover=True, which does so first"
            ) from error

    def _beside(self) -> list[Opened]:
        """The stores of this process that are open and write at the same place."""
        return [other for other in tuple(_open) if other is not self and self.place.meets(other.place)]

    # -- its end ------------------------------------------------------------------------------------------

    async def close(self, *, clean: bool) -> None:
        """Close the store, on the engine's loop, or wait for a close under way; ``clean`` of the first caller counts.

        When all callers are cancelled, it gives up what is still to be promoted, and closes all the same.
        """
        closing = self._begin(clean=clean)
        self._waiting += 1
        try:
            await asyncio.wait([closing])
        except asyncio.CancelledError:
            self._waiting -= 1
            if not self._waiting:
                self._hurry()
            await outlast(closing)
            raise
        if not closing.cancelled():
            closing.result()

    def begin_closing(self, *, clean: bool) -> None:
        """Begin to close it, from any thread, without waiting for the end."""
        with contextlib.suppress(RuntimeError):  # it is closed
            self.thread.loop.call_soon_threadsafe(lambda: self._begin(clean=clean))

    def hurry(self) -> None:
        """Make a close that has begun give up what is still to be promoted; from any thread."""
        with contextlib.suppress(RuntimeError):  # it is closed
            self.thread.loop.call_soon_threadsafe(self._hurry)

    def _hurry(self) -> None:
        if self._closing is not None:  # not before its first step, or it would end without any
            self.thread.loop.call_soon(self._closing.cancel)

    def _abandon(self) -> None:
        """Close a store that nobody refers to. The garbage collector calls this, on any thread: it must not wait."""
        if not self.thread.was_forked and not self.thread.closing:
            self.abandoned = True
            self.begin_closing(clean=False)

    def _begin(self, *, clean: bool) -> asyncio.Task[None]:
        if self._closing is None:
            self.thread.closing = True
            self._closing = asyncio.create_task(self._close(clean=clean), name="tieredckpt close")
            self._closing.add_done_callback(self._end)
        return self._closing

    def _end(self, closing: asyncio.Task[None]) -> None:
        if not closing.cancelled() and (error := closing.exception()) is not None and not self._waiting:
            _log.warning("the checkpoint store opened at %s was not closed in order: %s", self.where, error)
        self.thread.end()

    async def _close(self, *, clean: bool) -> None:
        if not self._started:
            await self.thread.end_calls()  # the start, which lets go of what it has
        if not self._started:
            return
        if self.abandoned:
            _log.warning("the checkpoint store opened at %s is closed, for nobody refers to it any more", self.where)
        ram = self._config.ram
        keep_ram = self.abandoned or ram is None or ram.keeps(clean=clean)
        try:
            await self._engine.pending.end()
        except asyncio.CancelledError:
            await self._engine.close(flush=False, keep_ram=True, end_calls=self.thread.end_calls)
            raise
        await self._engine.close(flush=clean, keep_ram=keep_ram, end_calls=self.thread.end_calls)


_open: set[Opened] = set()
_of_parents: list[Opened] = []
"""Stores of parents, kept for ever in a forked process: else their coroutines would end and clean up there as well."""


@dataclass(frozen=True, slots=True)
class Place:
    """The places that a store writes to, as far as its configuration names them."""

    tiers: frozenset[str]
    rank: int | None
    """Rank in a communicator that was given; None for a process alone, or if the rank is found out later."""
    read_only: bool

    @classmethod
    def of(cls, config: StoreConfig, rank: int | None, *, read_only: bool) -> Place:
        tiers = {f"{tier.kind} {tier.location}" for tier in config.slower}
        if not tiers and config.ram is not None:  # else RAM belongs to the store on those tiers
            tiers = {f"ram {config.ram.path} {config.identity}"}
        return cls(frozenset(tiers), rank, read_only)

    def meets(self, other: Place) -> bool:
        """Whether both are places to write to, and have one of them in common."""
        same_rank = self.rank == other.rank or None in (self.rank, other.rank)
        return same_rank and not self.read_only and not other.read_only and bool(self.tiers & other.tiers)


async def open_store(
    loop: EngineLoop, opened: Opened, find_ranks: Callable[[], Communicator | None], *, takeover: bool
) -> None:
    """Open a store after those of this process that are in its way; one that cannot be opened is closed.

    Args:
        loop: of the store.
        opened: the store.
        find_ranks: gives the communicator of the ranks that open it together; may block.
        takeover: close what this process has open at the same place.

    Raises as `CheckpointStore.open`.
    """
    try:
        for other in opened.in_the_way(takeover=takeover):
            await close_store(other, clean=True)
        await loop.call(opened.start(await in_thread(find_ranks)))
    except GeneratorExit:  # nothing can be awaited any more
        opened.begin_closing(clean=False)
        raise
    except BaseException as error:
        await close_store(opened, clean=False)
        opened.explain(error)
        raise


def open_blocking(
    loop: EngineLoop, opened: Opened, find_ranks: Callable[[], Communicator | None], *, takeover: bool
) -> None:
    """`open_store` without an event loop."""
    try:
        for other in opened.in_the_way(takeover=takeover):
            close_blocking(other, clean=True)
        loop.call_blocking(opened.start(find_ranks()))
    except BaseException as error:
        close_blocking(opened, clean=False)
        opened.explain(error)
        raise


async def close_store(opened: Opened, *, clean: bool) -> None:
    """Close a store and await the end of its thread."""
    loop = EngineLoop(opened.thread)
    opened.begin_closing(clean=clean)  # also if this is cancelled before it has begun
    try:
        with contextlib.suppress(Closed):
            await loop.call(opened.close(clean=clean), closes=True)
    finally:
        await loop.joined()


def close_blocking(opened: Opened, *, clean: bool) -> None:
    """`close_store` without an event loop. Raises `Invalid` on the store's own thread."""
    loop = EngineLoop(opened.thread)
    loop.check_thread()
    opened.begin_closing(clean=clean)
    try:
        with contextlib.suppress(Closed):
            loop.call_blocking(opened.close(clean=clean), closes=True)
    finally:
        loop.join()


def calling_line() -> str:
    """File and line of the code outside of this library that is calling it."""
    frame, ours = sys._getframe(1), f"{Path(__file__).parent}{os.sep}"
    while frame.f_back is not None and frame.f_code.co_filename.startswith(ours):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def _close_all() -> None:
    """Close all open stores when the process ends, as at the end of `with`, but within `EXIT_SECONDS`."""
    stores = tuple(_open)
    clean = getattr(sys, "last_value", None) is None  # what ended the main thread, if anything did
    for opened in stores:
        opened.begin_closing(clean=clean)
    try:
        if not _all_end(stores, _TOLD_AFTER):
            lines = ", ".join(opened.where for opened in stores if not opened.thread.ended.is_open)
            _log.warning(
                "the process ends and waits %g s at most for what the checkpoint store opened at %s has to promote; "
                "close it to wait for all",
                EXIT_SECONDS,
                lines,
            )
            _all_end(stores, EXIT_SECONDS - _TOLD_AFTER)
    except KeyboardInterrupt:
        pass  # a person does not want to wait
    for opened in stores:
        opened.hurry()
    if not _all_end(stores, _RELEASE_SECONDS):
        _log.warning("the process ends before all tiers of its checkpoint stores have answered")


def _all_end(stores: Iterable[Opened], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    return all(opened.thread.ended.wait(deadline - time.monotonic()) for opened in stores)


def _forget_those_of_the_parent() -> None:
    _of_parents.extend(_open)
    _open.clear()


# Before that of `concurrent.futures`, which was registered earlier and is called later: after it no thread of a pool
# takes work any more. `atexit` would be later still.
getattr(threading, "_register_atexit", atexit.register)(_close_all)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_those_of_the_parent)
