"""One thread for the calls of a foreign library, which may hang in them without hanging anybody else."""

from __future__ import annotations

import asyncio
import atexit
import os
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar
from weakref import WeakSet

from tieredckpt.concurrency import run_for
from tieredckpt.errors import Closed

__all__ = ["ForeignThread"]

T = TypeVar("T")

_AT_EXIT = 2.0
"""Seconds that an exiting process gives all calls together to come back."""


class ForeignThread:
    """Runs calls of a library one after the other on a daemon thread: an exiting process does not wait for it for long.

    The thread begins with the first call.
    """

    def __init__(self, name: str) -> None:
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._closed = False
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        _living.add(self)

    async def call(self, function: Callable[..., T], *arguments: Any, timeout: float) -> T:
        """Call ``function`` on that thread: its result or its error; `TimeoutError` after so many seconds.

        A call that is cancelled or late is left behind, so it must not touch the caller's memory; one that
        has not begun by then never does.
        """
        if self._closed:
            raise Closed("the communicator of the ranks was closed, with the store it belonged to")
        if self._thread.ident is None:
            self._thread.start()
        outcome: Future[T] = Future()

        def run() -> None:
            if outcome.set_running_or_notify_cancel():
                run_for(outcome, function, *arguments)

        self._calls.put(run)
        async with asyncio.timeout(timeout):
            return await asyncio.wrap_future(outcome)

    def close(self) -> None:
        """End the thread after the calls that were made. Does not wait for it. Idempotent."""
        self._closed = True
        self._calls.put(None)

    def join(self, timeout: float) -> None:
        """Wait until the thread has ended, or so many seconds."""
        if self._thread.ident is not None:
            self._thread.join(timeout)

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            call()
            del call  # it holds what its caller gave it


_living: WeakSet[ForeignThread] = WeakSet()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_living.clear)  # they are the parent's


@atexit.register
def _end_all() -> None:
    """End all threads at exit: one that returns from a foreign library later may abort the process."""
    deadline = time.monotonic() + _AT_EXIT
    threads = list(_living)
    for thread in threads:
        thread.close()
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
