"""Waiting for one thing that happens once, without a lock that a signal handler could find taken.

A handler runs in the middle of what its thread was doing. If that held a lock of `threading.Condition`, as an `Event`
or a `Future` does, the engine's thread would wait for the lock, and the handler for the engine's thread.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

__all__ = ["Latch"]


class Latch:
    """Is opened once, and stays open. Any thread, and any signal handler, may call any method."""

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
