"""The engine's own event loop in its own thread, and the way in from other loops and threads.

A trainer's loop is blocked by compute most of the time; promotion must not wait for it.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import threading
from collections.abc import Callable, Coroutine
from typing import Any, Generic, TypeVar

from tieredckpt.errors import Closed

__all__ = ["EngineLoop", "Work"]

T = TypeVar("T")


class Work(Generic[T]):
    """A coroutine under way on the engine's loop; ``outcome`` is done only when it has really ended."""

    def __init__(self, loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, T]) -> None:
        self.outcome: concurrent.futures.Future[T] = concurrent.futures.Future()
        self._loop = loop
        self._coroutine = coroutine
        self._task: asyncio.Task[T] | None = None
        self._cancelled = False

    def start(self) -> None:
        self._task = self._loop.create_task(self._coroutine)
        self._task.add_done_callback(self._finish)
        if self._cancelled:
            self._task.cancel()

    def cancel(self) -> None:
        """Ask the work to stop; from any thread."""
        with contextlib.suppress(RuntimeError):  # the loop is closed, so the work has ended
            self._loop.call_soon_threadsafe(self._cancel)

    def _cancel(self) -> None:
        self._cancelled = True
        if self._task is not None:
            self._task.cancel()

    def _finish(self, task: asyncio.Task[T]) -> None:
        if task.cancelled():
            self.outcome.set_exception(Closed("the checkpoint store was closed, or the call cancelled, meanwhile"))
        elif (error := task.exception()) is not None:
            self.outcome.set_exception(error)
        else:
            self.outcome.set_result(task.result())


class EngineLoop:
    """A running event loop in a daemon thread."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._guards_stopping = threading.Lock()
        self._stopped = False
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
        finally:
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
            self._loop.run_until_complete(self._loop.shutdown_default_executor())
            self._loop.close()

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> Work[T]:
        """Start ``coroutine`` on the engine's loop. Raises `Closed` when the engine has stopped."""
        work = Work(self._loop, coroutine)
        with self._guards_stopping:
            if self._stopped:
                coroutine.close()
                raise Closed("the checkpoint store is closed")
            self._loop.call_soon_threadsafe(work.start)
        return work

    def soon(self, function: Callable[[], object]) -> None:
        """Call ``function`` on the engine's loop; from any thread or signal handler. A stopped engine does nothing."""
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(function)

    async def call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run ``coroutine`` on the engine's loop and await it from any other loop.

        A cancelled caller cancels the work and returns once that has ended: what was lent to it is free then.
        """
        work = self.submit(coroutine)
        caller = asyncio.get_running_loop()
        ended = asyncio.Event()

        def wake(_: object) -> None:
            with contextlib.suppress(RuntimeError):  # the caller's loop was closed while it waited
                caller.call_soon_threadsafe(ended.set)

        work.outcome.add_done_callback(wake)
        cancelled = False
        while not ended.is_set():
            try:
                await ended.wait()
            except asyncio.CancelledError:
                cancelled = True
                work.cancel()
        if cancelled:
            work.outcome.exception()  # seen, so that it is not reported as lost
            raise asyncio.CancelledError
        return work.outcome.result()

    def call_blocking(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run ``coroutine`` on the engine's loop and block until it has ended; an interrupt cancels it first."""
        work = self.submit(coroutine)
        try:
            return work.outcome.result()
        except BaseException:
            if not work.outcome.done():
                work.cancel()
                concurrent.futures.wait([work.outcome])
            raise

    def stop(self) -> None:
        """End the loop and join its thread; work that is still running is cancelled first. Idempotent."""
        with self._guards_stopping:
            if self._stopped:
                return
            self._stopped = True
        asyncio.run_coroutine_threadsafe(self._cancel_all(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    async def _cancel_all(self) -> None:
        mine = asyncio.current_task()
        tasks = [task for task in asyncio.all_tasks() if task is not mine]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
