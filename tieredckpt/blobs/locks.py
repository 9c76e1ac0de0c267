"""Descriptors that hold a file lock, and that no forked child may keep.

A lock of flock(2) belongs to all copies of its descriptor: a worker that a trainer forked (a data loader's, say)
would hold the RAM tier's lock for as long as it lives, the trainer dead or not.
"""

from __future__ import annotations

import fcntl
import os

__all__ = ["hold", "let_go"]

_held: set[int] = set()


def hold(fd: int) -> int:
    """Have ``fd`` closed in every child that is forked from now on; returns it."""
    _held.add(fd)
    return fd


def let_go(fd: int) -> None:
    """End the lock and close ``fd``; in a child, where that has happened, nothing."""
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
