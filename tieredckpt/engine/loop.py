"""The engine's own event loop in its own thread, and the way in from other loops and threads.

A trainer's loop is blocked by compute most of the time; promotion must not wait for it. Neither side takes a lock: a
call may come from a signal handler, in the middle of another call on the same thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, Generic, TypeVar

from tieredckpt import _callbacks
from tieredckpt.concurrency import in_thread
from tieredckpt.engine.clock import RunningTimeLoop
from tieredckpt.errors import Closed, Invalid

__all__ = ["EngineLoop", "EngineThread", "Latch", "Work"]

T = TypeVar("T")

_log = logging.getLogger("tieredckpt")

_JOIN = 1.0
"""Seconds that a thread may take to end after its last line has run."""


class Latch:
    """Is opened once, and stays open. Any thread, and any signal handler, may call any method.

    It has no lock that a handler could find taken, as those of `threading` have: the engine's thread would wait for the
    lock, and the handler, in the middle of what its thread was doing with the lock, for the engine's thread.
    """

    def __init__(self) -> None:
        self._open = False
        self._waiting: deque[Callable[[], object]] = deque()

    @property
    def is_open(self) -> bool:
        return self._open

    def open(self) -> None:
        """Wake everybody who waits. Never blocks."""
        self._open = True
        while True:
            try:
                go_on = self._waiting.popleft()
            except IndexError:
                return
            go_on()

    def then(self, call: Callable[[], object]) -> None:
        """Call ``call`` once it is open: on the thread that opens it, or at once."""
        self._waiting.append(call)
        if self._open:
            self.open()

    def wait(self, seconds: float | None = None) -> bool:
        """Block until it is open, or for so long; whether it is."""
        turn = threading.Lock()  # one for each who waits: a handler never meets the one that it interrupted
        turn.acquire()
        self.then(turn.release)
        return turn.acquire(timeout=-1 if seconds is None else max(0.0, seconds))


class Work(Generic[T]):
    """A coroutine under way on the engine's loop; ``ended`` opens only when it has really ended."""

    def __init__(self, thread: EngineThread, coroutine: Coroutine[Any, Any, T], *, closes: bool) -> None:
        self.ended = Latch()
        self.closes = closes
        """Whether it closes the store: it may then begin during a close, too."""
        self._thread = thread
        self._coroutine = coroutine
        self._task: asyncio.Task[T] | None = None
        self._cancelled = False
        self._refused = False

    @property
    def task(self) -> asyncio.Task[T] | None:
        """The task of the work; None before it has begun."""
        return self._task

    def start(self) -> None:
        """Begin, on the engine's loop, unless that was done before."""
        if self._task is not None or self._refused:
            return
        if self._thread.over or (self._thread.closing and not self.closes):
            self.refuse()
            return
        self._task = self._thread.loop.create_task(self._coroutine)
        self._task.add_done_callback(self._end)
        if self._cancelled:
            self._task.cancel()

    def cancel(self) -> None:
        """Ask the work to stop; from any thread."""
        self._cancelled = True
        with contextlib.suppress(RuntimeError):  # the loop is closed, so the work has ended
            self._thread.loop.call_soon_threadsafe(self._cancel)

    def _cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()

    def _end(self, task: asyncio.Task[T]) -> None:
        if not task.cancelled():
            task.exception()  # retrieved: the caller may have gone
        self._thread.forget(self)
        self.ended.open()

    def refuse(self) -> None:
        """End it before it has begun, because the engine ends."""
        if self._thread.forget(self):
            self._refused = True
            self._coroutine.close()
            self.ended.open()

    def result(self, seconds: float | None = None) -> T:
        """Wait for the result or error of the work; `Closed` if cancelled, `TimeoutError` after ``seconds``. Blocks."""
        if not self.ended.wait(seconds):
            raise TimeoutError
        if self._refused:
            raise Closed("the checkpoint store is closed")
        assert self._task is not None, "it has ended, so it was refused or had begun"
        if self._task.cancelled():
            raise Closed("the checkpoint store was closed, or the call cancelled, meanwhile")
        return self._task.result()


class EngineThread:
    """A running event loop in a daemon thread, which refers to no `EngineLoop`: those may go while it runs."""

    def __init__(self, name: str) -> None:
        self.loop = RunningTimeLoop()
        self.ended = Latch()
        self.closing = False
        """Whether calls that come now come too late."""
        self.over = False
        """Whether nothing begins any more, not even what closes the store."""
        self._works: set[Work[Any]] = set()
        self._ending: asyncio.Task[None] | None = None
        self._process = os.getpid()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        while True:
            try:
                self.loop.run_forever()
                break
            except (KeyboardInterrupt, SystemExit) as error:  # of users' code: asyncio lets these two through
                _log.error("the store's thread goes on after %r, which some work of it raised", error)
        self.loop.run_until_complete(self.loop.shutdown_asyncgens())
        self.loop.run_until_complete(self.loop.shutdown_default_executor())
        self.loop.close()
        self.over = True
        for work in tuple(self._works):  # a call that is added later sees that the loop is over
            work.refuse()
        self.ended.open()

    @property
    def number(self) -> int | None:
        return self._thread.ident

    @property
    def is_current(self) -> bool:
        return self._thread.ident == threading.get_ident()

    @property
    def was_forked(self) -> bool:
        """Whether this process has a copy of it alone, without the thread: it is a child of the one that made it."""
        return os.getpid() != self._process

    def wait_for(self, latch: Latch) -> None:
        """Block until ``latch`` is open; a callback that keeps the thread busy is named meanwhile."""
        while not latch.wait(_callbacks.SLOW):
            _callbacks.name_slow(self.number)

    def check_process(self) -> None:
        """Raise `Closed` in a process that was forked from the one that made it."""
        if self.was_forked:
            raise Closed(
                f"a forked process has no part in the checkpoint store of its parent, process {self._process}, where "
                f"the work is done: call the store there, or open one here with read_only=True"
            )

    def submit(self, work: Work[Any]) -> None:
        """Begin some work. After the end of the loop it ends at once, as `Closed`."""
        self._works.add(work)
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self.loop.call_soon_threadsafe(work.start)
        if self.over:
            work.refuse()

    def forget(self, work: Work[Any]) -> bool:
        """Forget work that has ended; True for the first call, of several that say so."""
        try:
            self._works.remove(work)
        except KeyError:
            return False
        return True

    # -- its end, on the loop -----------------------------------------------------------------------------

    async def end_calls(self) -> None:
        """Cancel all calls but those that close the store, and return when they have ended."""
        tasks = [work.task for work in tuple(self._works) if not work.closes and work.task is not None]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    def end(self) -> None:
        """End the thread when the calls that close the store have ended; cancel everything else. Idempotent."""
        self.closing = True
        if self._ending is None:
            self._ending = self.loop.create_task(self._end())

    async def _end(self) -> None:
        while closers := [work for work in tuple(self._works) if work.closes]:
            for work in closers:
                work.start()  # one that was submitted a moment ago
            await asyncio.wait([work.task for work in closers if work.task is not None])
        self.over = True
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self.loop.stop()

    def join(self) -> None:
        """Block until it has ended."""
        self.ended.wait()
        self._thread.join(_JOIN)  # no longer: in a signal handler that has interrupted this line it would never end


class EngineLoop:
    """The way to an engine's thread. A store is closed when nobody refers to its `EngineLoop` any more."""

    def __init__(self, name: str | EngineThread) -> None:
        self.thread = EngineThread(name) if isinstance(name, str) else name

    def submit(self, coroutine: Coroutine[Any, Any, T], *, closes: bool = False) -> Work[T]:
        """Start ``coroutine`` on the engine's loop. Raises `Closed` in a forked process."""
        work = self._work(coroutine, closes)
        self.thread.submit(work)
        return work

    def _work(self, coroutine: Coroutine[Any, Any, T], closes: bool) -> Work[T]:
        try:
            self.thread.check_process()
        except Closed:
            coroutine.close()
            raise
        return Work(self.thread, coroutine, closes=closes)

    def soon(self, function: Callable[[], object]) -> None:
        """Call ``function`` on the engine's loop; from any thread or signal handler. A stopped engine does nothing."""
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self.thread.loop.call_soon_threadsafe(function)

    async def call(self, coroutine: Coroutine[Any, Any, T], *, closes: bool = False) -> T:
        """Run ``coroutine`` on the engine's loop and await it from any other loop.

        A cancelled caller cancels the work and returns once that has ended: what was lent to it is free then.
        """
        work = self.submit(coroutine, closes=closes)
        caller = asyncio.get_running_loop()
        ended = asyncio.Event()

        def wake() -> None:
            with contextlib.suppress(RuntimeError):  # the caller's loop was closed while it waited
                caller.call_soon_threadsafe(ended.set)

        work.ended.then(wake)
        watching = caller.call_later(_callbacks.SLOW, _watch, self.thread, caller, ended)
        cancelled = False
        try:
            while not ended.is_set():
                try:
                    await ended.wait()
                except asyncio.CancelledError:
                    cancelled = True
                    work.cancel()
        except BaseException:  # an interrupt, or the caller's own end: there is no waiting any more
            work.cancel()
            raise
        finally:
            watching.cancel()
        if cancelled:
            raise asyncio.CancelledError
        return work.result()

    def call_blocking(self, coroutine: Coroutine[Any, Any, T], *, closes: bool = False) -> T:
        """Run ``coroutine`` on the engine's loop and block until it has ended; an interrupt cancels it first.

        Raises as `check_thread`.
        """
        try:
            self.check_thread()
        except Invalid:
            coroutine.close()
            raise
        work = self._work(coroutine, closes)
        try:
            self.thread.submit(work)
            self.thread.wait_for(work.ended)
        except BaseException:
            work.cancel()
            if not work.ended.is_open:
                self.thread.submit(work)  # which the interrupt may have prevented
            work.ended.wait()
            raise
        return work.result()

    def check_thread(self) -> None:
        """Raise `Invalid` on the engine's own thread, where nothing may wait for that thread."""
        if self.thread.is_current:
            raise Invalid(
                "a listener or policy runs on the store's own thread, which would wait for itself: hand the event to "
                "another thread, through a queue for instance, and call the store there"
            )

    def stop(self) -> None:
        """End the loop and join its thread; work that is still running is cancelled first. Idempotent."""
        if not self.thread.was_forked:
            self.soon(self.thread.end)
            self.thread.join()

    def join(self) -> None:
        """Block until the thread has ended; at once on the thread itself, and in a forked process."""
        if not self.thread.was_forked and not self.thread.is_current:
            self.thread.join()

    async def joined(self) -> None:
        """Await that the thread has ended."""
        if not self.thread.is_current:
            await in_thread(self.join)


def _watch(thread: EngineThread, caller: asyncio.AbstractEventLoop, ended: asyncio.Event) -> None:
    """Name what keeps the engine's thread from a call, from the loop that waits for it."""
    if not ended.is_set():
        _callbacks.name_slow(thread.number)
        caller.call_later(_callbacks.SLOW, _watch, thread, caller, ended)
