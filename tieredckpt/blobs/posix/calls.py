"""Runs the verbs of a posix store on threads; a cancelled verb waits for its thread, or leaves it in the device."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any, TypeVar

from tieredckpt.blobs.posix.target import Stop
from tieredckpt.blobs.posix.threads import Threads
from tieredckpt.concurrency import note, until_done

__all__ = ["Calls", "Followed"]

T = TypeVar("T")


class Calls:
    """The calls of the store at ``place``, on ``threads`` threads.

    Calls that read chunks, and calls that list folders, have threads of their own, so that nothing small waits behind
    them.
    """

    def __init__(self, threads: int, readers: int, scanners: int, place: str) -> None:
        self.pool = Threads(threads, "posix", place)
        self.readers = Threads(readers, "posix-reader", place)
        self.scanners = Threads(scanners, "posix-scanner", place)
        self._active = 0
        self._is_over = False

    @property
    def hanging(self) -> int:
        """How many threads are in calls that no caller waits for any more."""
        return sum(threads.left for threads in (self.pool, self.readers, self.scanners))

    async def run(self, work: Callable[[Stop], T]) -> T:
        """The result of ``work``; a cancellation is raised when its thread has ended."""
        stop = Stop()
        call = self.pool.submit(work, stop)

        def give_up() -> None:
            stop.set()
            self.pool.leave(call)

        return await self.until_done(asyncio.wrap_future(call), give_up)

    async def until_done(self, running: asyncio.Future[T], give_up: Callable[[], object]) -> T:
        """As `tieredckpt.concurrency.until_done`, for a verb whose thread uses the caller's memory."""
        self._begin(running)
        try:
            return await until_done(running, give_up)
        except GeneratorExit:  # nothing may be awaited
            give_up()
            running.add_done_callback(note)
            raise

    async def read(self, work: Callable[[], T], stop: Stop, pool: Threads) -> T:
        """The result of ``work``, which touches no memory of a caller; a cancellation leaves its thread running."""
        call = pool.submit(work)
        running = asyncio.wrap_future(call)
        self._begin(running)
        try:
            await asyncio.wait([running])
        except BaseException:  # also of a coroutine that is closed
            stop.set()
            pool.leave(call)
            running.add_done_callback(note)
            raise
        return running.result()

    def _begin(self, running: asyncio.Future[T]) -> None:
        self._active += 1
        running.add_done_callback(self._ended)

    def _ended(self, _: object) -> None:
        self._active -= 1
        self._end_threads()

    def end(self) -> None:
        """End the threads when no call is under way any more."""
        self._is_over = True
        self._end_threads()

    def _end_threads(self) -> None:
        if self._is_over and not self._active:
            for pool in (self.pool, self.readers, self.scanners):
                pool.shutdown(wait=False)


class Followed(Executor):
    """An executor for aiofiles, for the calls of one verb in turn; calls without a waiting caller can be left."""

    def __init__(self, threads: Threads) -> None:
        self._threads = threads
        self._calls: list[Future[Any]] = []
        self._is_left = False

    def submit(self, work: Callable[..., T], /, *arguments: Any, **named: Any) -> Future[T]:
        if self._is_left:  # calls that clean up are never refused
            call = self._threads.submit_anyway(work, *arguments, **named)
            self._threads.leave(call, cancel=False)
        else:
            call = self._threads.submit(work, *arguments, **named)
        self._calls.append(call)
        return call

    def leave(self) -> None:
        """Leave the call under way, and those that follow. Only the first is cancelled: the others clean up."""
        self._is_left = True
        if self._calls:
            self._threads.leave(self._calls[-1], cancel=len(self._calls) == 1)
