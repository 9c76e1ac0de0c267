"""File locks whose descriptors a forked child closes.

A lock of flock(2) belongs to all copies of its descriptor: a worker forked by a trainer (such as a data loader's) would
hold the RAM tier's lock for as long as it lives, even after the trainer's death.
"""

from __future__ import annotations

import fcntl
import os
import socket
from collections.abc import Callable
from pathlib import Path

from tieredckpt.errors import Conflict

__all__ = ["hold", "let_go", "lock_file"]

_held: set[int] = set()


def hold(fd: int) -> int:
    """Close ``fd`` in every child that is forked from now on; returns it."""
    _held.add(fd)
    return fd


def lock_file(path: Path, refusal: Callable[[str], str]) -> int:
    """Create and lock a file, and write into it who holds it; returns the descriptor, for `let_go`. Blocking.

    Raises:
        Conflict: it is locked; ``refusal`` makes the message, given the holder.
        FileNotFoundError: there is no such folder.
    """
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.read(fd, 200).decode(errors="replace") or "another process"
        os.close(fd)
        raise Conflict(refusal(holder)) from None
    except BaseException:
        os.close(fd)
        raise
    try:
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
    except BaseException:
        os.close(fd)  # and with it the lock
        raise
    return hold(fd)


def let_go(fd: int) -> None:
    """Release the lock and close ``fd``; does nothing in a forked child, where it is closed already."""
    if fd in _held:
        _held.discard(fd)
        fcntl.flock(fd, fcntl.LOCK_UN)
        os.close(fd)


def _forget_in_child() -> None:
    for fd in _held:
        os.close(fd)  # and no unlocking: the lock is the parent's
    _held.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_in_child)
