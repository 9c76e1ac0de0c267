"""Memory quota of automatic slabs: all slabs of this user on this machine together take a share of the memory."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
from collections.abc import Iterator
from pathlib import Path

from tieredckpt.blobs.ram.folder import RANK_FOLDER, folders_in, shared_memory_root
from tieredckpt.blobs.ram.slab_meta import lacking_bytes, slab_bytes
from tieredckpt.errors import TierUnavailable
from tieredckpt.units import format_size

__all__ = ["MEMORY_PER_SLAB", "Quota", "counted", "expected_elsewhere"]

_log = logging.getLogger("tieredckpt")

MEMORY_PER_SLAB = 4
"""Automatic slabs take at most a quarter of the memory, and of the addresses, that there are."""


class Quota:
    """Decides whether a slab may grow. Safe to call from any thread; blocking.

    Args:
        folder: of the slab. Slabs of the same store are not counted: each of its ranks has a quota of its own.
        total: bytes that the slab may have, less what other stores' slabs have.
    """

    def __init__(self, folder: Path, total: int) -> None:
        self._top = _top(folder)
        self._total = total
        self._told = False

    def __call__(self, nbytes: int, *, tell: bool = True) -> bool:
        """Whether the slab may have so many bytes. With ``tell``, a refusal is logged once, with the other slabs."""
        others = self._others()
        if nbytes + sum(others.values()) <= self._total:
            return True
        if others and tell and not self._told:
            self._told = True
            found = ", ".join(f"{folder} ({format_size(size)})" for folder, size in sorted(others.items()))
            _log.warning(
                "the RAM tier at %s may not grow to %s: automatic slabs share %s, and other stores have %s; saves go "
                "past RAM until those end; `tieredckpt ls --ram` tells whose they are, and `tieredckpt forget` frees "
                "those that nobody needs",
                *(self._top, format_size(nbytes), format_size(self._total), found),
            )
        return False

    def _others(self) -> dict[Path, int]:
        """Bytes of the slabs of this user's other stores, by folder, including bytes that they have yet to take."""
        stores = (folder for folder in _folders(self._top) if self._top not in (folder, folder.parent))
        found: dict[Path, int] = {}
        with contextlib.suppress(TierUnavailable):  # no file can be opened now, and a save asks
            for folder in stores:
                found[folder] = slab_bytes(folder, expected=True)
        return {folder: size for folder, size in found.items() if size}


def expected_elsewhere(folder: Path) -> int:
    """Bytes of shared memory that this user's slabs in other folders have yet to take. Blocking."""
    return sum(lacking_bytes(other) for other in _folders(_top(folder)) if other != folder)


@contextlib.contextmanager
def counted(folder: Path) -> Iterator[None]:
    """Lock the store's folder, while a rank checks for room and notes the expected size of its slab. Blocking.

    All ranks open at the same moment, and each would count on the same room.
    """
    fd = os.open(_top(folder), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def _top(folder: Path) -> Path:
    """The folder of a store, in which each rank may have one of its own."""
    return folder.parent if folder.name.startswith(RANK_FOLDER) else folder


def _folders(top: Path) -> Iterator[Path]:
    """Folders that this user's RAM tiers may have, for that store and others."""
    for root in {top.parent, shared_memory_root()}:
        for other in folders_in(root):
            yield other
            yield from (rank for rank in folders_in(other) if rank.name.startswith(RANK_FOLDER))
