"""Threads for calls that may hang in the device: how many hang is known, and no more than all of them."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from tieredckpt.blobs.base import Unanswered

__all__ = ["Threads"]

T = TypeVar("T")

_HANGS_AFTER = 5.0
"""Seconds after which a call that nobody waits for any more counts as hanging: others end before their next block."""


class Threads(ThreadPoolExecutor):
    """At most ``count`` threads of the store at ``place``, for one kind of work; ``name`` is for debuggers."""

    def __init__(self, count: int, name: str, place: str) -> None:
        super().__init__(count, thread_name_prefix=f"tieredckpt-{name}")
        self._count, self._place = count, place
        self._left: dict[Future[Any], float] = {}
        """Calls under way that nobody waits for, and since when."""

    @property
    def left(self) -> int:
        """How many threads are in calls that nobody waits for any more."""
        return len(self._left)

    def submit(self, work: Callable[..., T], /, *arguments: Any, **named: Any) -> Future[T]:
        """As `ThreadPoolExecutor.submit`. Raises `Unanswered` while all threads hang: the call would never begin."""
        long_ago = time.monotonic() - _HANGS_AFTER
        if sum(since < long_ago for since in tuple(self._left.values())) >= self._count:
            raise Unanswered(
                f"{self._place}: all {self._count} threads hang in the file system; is it mounted and answering? "
                "The tier goes on when it answers"
            )
        return super().submit(work, *arguments, **named)

    def leave(self, call: Future[Any], *, cancel: bool = True) -> None:
        """Note that nobody waits for a call any more; with ``cancel``, one that no thread has begun is cancelled."""
        if not (cancel and call.cancel()):
            self._left[call] = time.monotonic()
            call.add_done_callback(self._ended)

    def _ended(self, call: Future[Any]) -> None:
        self._left.pop(call, None)
