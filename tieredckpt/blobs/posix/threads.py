"""Threads for calls that may hang in the device: hanging calls are counted and bounded, and do not block the exit."""

from __future__ import annotations

import atexit
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Executor, Future, wait
from functools import partial
from queue import SimpleQueue
from typing import Any, TypeVar

from tieredckpt.blobs.base import Unanswered

__all__ = ["Threads"]

T = TypeVar("T")

_HANGS_AFTER = 5.0
"""Seconds after which a call that its caller gave up, as at a tier's ``deadline``, counts as hanging: other calls end
before their next block."""

_Waiting = SimpleQueue[Callable[[], None] | None]
"""Calls that wait for a thread; None ends a thread."""


class Threads(Executor):
    """At most ``count`` threads of the store at ``place``, for one kind of work; ``name`` is for debuggers.

    They are daemon threads: a process waits at its end for those of a `ThreadPoolExecutor`, even if they hang.
    """

    def __init__(self, count: int, name: str, place: str) -> None:
        self._count, self._name, self._place = count, f"tieredckpt-{name}", place
        self._waiting = _Waiting()
        self._idle = threading.Semaphore(0)
        self._guards_start = threading.Lock()
        self._started = 0
        self._is_over = False
        self._calls: set[Future[Any]] = set()
        """Calls that have not ended."""
        self._left: dict[Future[Any], float] = {}
        """Calls under way that no caller waits for, with the time since when."""
        _all.add(self)
        weakref.finalize(self, self._waiting.put, None).atexit = False

    @property
    def left(self) -> int:
        """How many threads are in calls that no caller waits for any more."""
        return len(self._left)

    def submit(self, work: Callable[..., T], /, *arguments: Any, **named: Any) -> Future[T]:
        """Begin a call as soon as a thread is free. Raises `Unanswered` while all hang: it would never begin."""
        if len(self._hanging()) >= self._count:
            raise Unanswered(
                f"{self._place}: all {self._count} threads hang in the file system; is it mounted and answering? "
                "The tier goes on when it answers"
            )
        return self.submit_anyway(work, *arguments, **named)

    def submit_anyway(self, work: Callable[..., T], /, *arguments: Any, **named: Any) -> Future[T]:
        """As `submit`, also while all threads hang. Raises `RuntimeError` after `shutdown`."""
        if self._is_over:
            raise RuntimeError(f"the threads of {self._place} have ended")
        call: Future[T] = Future()
        self._calls.add(call)
        call.add_done_callback(self._ended)
        self._waiting.put(partial(_carry_out, call, partial(work, *arguments, **named)))
        with self._guards_start:
            if self._started < self._count and not self._idle.acquire(blocking=False):
                self._started += 1
                name = f"{self._name}_{self._started}"
                threading.Thread(target=_work, args=(self._waiting, self._idle), name=name, daemon=True).start()
        return call

    def leave(self, call: Future[Any], *, cancel: bool = True) -> None:
        """Note that no caller waits for a call any more; with ``cancel``, a call that has not begun is cancelled."""
        if not (cancel and call.cancel()):
            self._left[call] = time.monotonic()
            call.add_done_callback(self._ended)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """End the threads after the submitted calls. Both arguments are ignored."""
        self._is_over = True
        self._waiting.put(None)

    def _hanging(self) -> list[Future[Any]]:
        long_ago = time.monotonic() - _HANGS_AFTER
        return [call for call, since in tuple(self._left.items()) if since < long_ago]

    def _ended(self, call: Future[Any]) -> None:
        self._left.pop(call, None)
        self._calls.discard(call)

    def may_end(self) -> set[Future[Any]]:
        """The calls under way, except those that hang."""
        return self._calls.difference(self._hanging())


_all: weakref.WeakSet[Threads] = weakref.WeakSet()


@atexit.register
def _wait_for_what_may_end() -> None:
    wait([call for threads in tuple(_all) for call in threads.may_end()], timeout=_HANGS_AFTER)


def _work(waiting: _Waiting, idle: threading.Semaphore) -> None:
    """Carry out calls until the queue is shut down."""
    while (carry_out := waiting.get()) is not None:
        carry_out()
        del carry_out  # and the memory that it refers to
        idle.release()
    waiting.put(None)  # for the next thread


def _carry_out(call: Future[T], work: Callable[[], T]) -> None:
    if not call.set_running_or_notify_cancel():
        return
    try:
        call.set_result(work())
    except BaseException as error:
        call.set_exception(error)
        del call, work  # which the traceback refers to, and the error to that
