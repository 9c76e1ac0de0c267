"""Runs user code (policies, listeners) inside the store: names slow code in the log, and tells what its errors are.

While such code runs on the store's own thread, nothing else does: saves, promotions and every other call wait for it.
"""

from __future__ import annotations

import logging
import threading
import time
from types import TracebackType
from typing import Self

__all__ = ["SLOW", "Callback", "Tolerated", "name_slow"]

_log = logging.getLogger("tieredckpt")

SLOW = 2.0
"""Seconds after which a callback is named in the log."""

_WHY = "it should return at once, for saves, promotions and the training wait for it"
_SAY_AGAIN = 60.0
"""Seconds in which a callback that is slow every time is named once."""


class Callback:
    """One call of users' code, as a context; ``code`` is the policy or listener, ``what`` says what it is for."""

    __slots__ = ("_begin", "_code", "_named", "_what")

    def __init__(self, what: str, code: object) -> None:
        self._what, self._code = what, code
        self._named = False

    def __enter__(self) -> Self:
        self._begin = time.monotonic()
        _running[threading.get_ident()] = self
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        _running.pop(threading.get_ident(), None)
        if self.seconds > SLOW and (self._named or self._is_news()):
            _log.warning("%s took %.1f s: %s", self, self.seconds, _WHY)

    @property
    def seconds(self) -> float:
        """How long it has been running."""
        return time.monotonic() - self._begin

    def name_if_slow(self) -> None:
        """Name it in the log, once, if it has been running for more than `SLOW` seconds."""
        if not self._named and self.seconds > SLOW and self._is_news():
            self._named = True
            _log.warning("%s has been running for %.1f s: %s", self, self.seconds, _WHY)

    def _is_news(self) -> bool:
        now, name = time.monotonic(), str(self)
        if now < _named_at.get(name, -_SAY_AGAIN) + _SAY_AGAIN:
            return False
        _named_at[name] = now
        return True

    def __str__(self) -> str:
        code = self._code if hasattr(self._code, "__qualname__") else type(self._code)
        return f"{self._what} {code.__module__}.{code.__qualname__}"


_running: dict[int, Callback] = {}
"""By the thread that runs it."""
_named_at: dict[str, float] = {}


def name_slow(thread: int | None) -> None:
    """Name the callback that a thread has been running for too long, if any; from a thread that waits for that one."""
    if thread is not None and (callback := _running.get(thread)) is not None:
        callback.name_if_slow()


class Tolerated:
    """Logs the failure of users' code in a ``with`` block, whatever it raises, and execution goes on after the block.

    ``message`` says what failed and what is done; ``of`` are its logging arguments.
    """

    __slots__ = ("_message", "_of")

    def __init__(self, message: str, *of: object) -> None:
        self._message, self._of = message, of

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        if error is None or not _is_failure(error):
            return False
        _log.error(self._message, *self._of, exc_info=error, stacklevel=2)
        return True


def _is_failure(error: BaseException) -> bool:
    """Whether an error, of any type, is the callback's own failure, and not raised by a signal handler.

    Signals are handled in the main thread alone, and no callback awaits anything that could be cancelled.
    """
    if threading.current_thread() is not threading.main_thread():
        return True
    return not isinstance(error, KeyboardInterrupt) and not _raised_by_a_handler(error)


def _raised_by_a_handler(error: BaseException) -> bool:
    """Whether a signal handler has raised it: the one kind of function that is given the frame it interrupts."""
    step = error.__traceback__
    while step is not None:
        frame, interrupted = step.tb_frame, step.tb_frame.f_back
        if interrupted is not None:
            for value in tuple(frame.f_locals.values()):
                if value is interrupted or (type(value) is tuple and any(each is interrupted for each in value)):
                    return True
        step = step.tb_next
    return False
