"""Runs a coroutine of a verb on a loop in a thread, which is left behind if a call of it hangs in a device."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

from tieredckpt.engine.loop import EngineLoop

__all__ = ["run_aside"]

T = TypeVar("T")

_LAST_WORK = 2.0
"""Seconds for work without a waiting caller to end after a cancellation."""


def run_aside(coroutine: Coroutine[Any, Any, T]) -> T:
    """The result of ``coroutine``. An interrupt cancels it; tasks that it left behind are not awaited."""
    loop = EngineLoop("tieredckpt verb")
    try:
        return loop.call_blocking(coroutine)
    finally:
        if inspect.getcoroutinestate(coroutine) == inspect.CORO_CREATED:  # interrupted before
            coroutine.close()
        stopping = threading.Thread(target=loop.stop, name="tieredckpt verb ends", daemon=True)
        stopping.start()
        stopping.join(_LAST_WORK)
