"""Ends a verb by SIGTERM or SIGHUP as by Ctrl-C: what it made is removed, and what it holds is given back."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

__all__ = ["ended_in_order"]

_ENDINGS = (signal.SIGTERM, signal.SIGHUP)


@contextmanager
def ended_in_order() -> Iterator[None]:
    """Take these signals for an interrupt, but for those that are ignored, as behind nohup, or taken by somebody."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    ours = [number for number in _ENDINGS if signal.getsignal(number) is signal.SIG_DFL]
    for number in ours:
        signal.signal(number, _interrupt)
    try:
        yield
    finally:
        for number in ours:
            signal.signal(number, signal.SIG_DFL)


def _interrupt(number: int, frame: FrameType | None) -> None:
    for ours in _ENDINGS:  # a second one, as systemd sends both, must not end the ending
        if signal.getsignal(ours) is _interrupt:
            signal.signal(ours, signal.SIG_IGN)
    as_of_now = signal.getsignal(signal.SIGINT)
    if not callable(as_of_now):  # ignored, as in a shell's background
        raise KeyboardInterrupt
    as_of_now(signal.SIGINT, frame)  # asyncio's, where a loop runs
