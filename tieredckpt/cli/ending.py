"""End a verb on SIGTERM or SIGHUP as on Ctrl-C, without waiting for a thread that hangs.

The first signal interrupts the verb, so that it removes its temporary files and releases its locks. A thread that hangs
in a device cannot be ended and would keep the process alive, so a slow end is cut short.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

__all__ = ["IN_ORDER", "ended_in_order", "ends_in_time"]

_ENDINGS = (signal.SIGTERM, signal.SIGHUP)

IN_ORDER = 10.0
"""Seconds for a verb after a signal, and for the interpreter after a verb, to end in order."""


@contextmanager
def ended_in_order() -> Iterator[None]:
    """Treat these signals as an interrupt, unless they are ignored, as behind nohup, or have another handler."""
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
    for ours in _ENDINGS:  # a second signal, as systemd sends both, must not end the ending
        if signal.getsignal(ours) is _interrupt:
            signal.signal(ours, signal.SIG_IGN)
    as_of_now = signal.getsignal(signal.SIGINT)
    if not callable(as_of_now):  # ignored, as in a shell's background
        raise KeyboardInterrupt
    as_of_now(signal.SIGINT, frame)  # asyncio's, where a loop runs


@contextmanager
def ends_in_time() -> Iterator[None]:
    """End this process `IN_ORDER` seconds after a signal that ends it, or after the block, whatever still runs then.

    For the main thread of a process that does nothing else. A signal is noticed even while that thread waits in a lock
    or a system call: the interpreter writes its number to a socket at once.
    """
    seen, told = socket.socketpair()
    told.setblocking(False)
    before = signal.set_wakeup_fd(told.fileno(), warn_on_full_buffer=False)
    threading.Thread(target=_watch, args=(seen,), name="tieredckpt signals", daemon=True).start()
    code = 1
    try:
        yield
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        raise
    finally:
        signal.set_wakeup_fd(before)
        told.close()
        threading.Thread(target=_leave_later, args=(code,), name="tieredckpt end", daemon=True).start()


def _watch(seen: socket.socket) -> None:
    with seen, suppress(TimeoutError):
        first = 0
        while number := seen.recv(1):
            if number[0] == first == signal.SIGINT:
                break  # a second Ctrl-C ends the process at once
            if not first and number[0] in (signal.SIGINT, *_ENDINGS):
                first = number[0]
                seen.settimeout(IN_ORDER)
        if not number:
            return  # the block has ended
    _leave(128 + first)


def _leave_later(code: int) -> None:
    time.sleep(IN_ORDER)
    _leave(code)


def _leave(code: int) -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()
    os._exit(code)
