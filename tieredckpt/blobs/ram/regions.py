"""Find memory of this process that another process can map: the file that holds an address, and the offset in it.

Slabs register what they map (`tieredckpt.blobs.ram.slab`), so that a store whose I/O runs in another process can
name the bytes there instead of copying them.
"""

from __future__ import annotations

import bisect
import os
import threading
from collections.abc import Sequence
from itertools import count

import numpy as np

from tieredckpt.blobs.base import Buffer

__all__ = ["Region", "locate", "register"]

_numbers = count(1)
_guards_regions = threading.RLock()  # the garbage collector may close a region while another is registered
_known: tuple[Sequence[int], Sequence[Region]] = ((), ())
"""Addresses and their regions, in order; replaced as a whole, so that a look-up needs no lock."""


class Region:
    """Memory that is a shared mapping of a file from its start; made by `register`."""

    __slots__ = ("_fd", "address", "number", "size", "writable")

    def __init__(self, address: int, size: int, fd: int, writable: bool) -> None:
        self.number = next(_numbers)
        """Never used again in this process, unlike an address or a descriptor."""
        self.address, self.size, self.writable = address, size, writable
        self._fd = fd

    @property
    def closed(self) -> bool:
        return self._fd < 0

    def duplicate(self) -> int | None:
        """A descriptor of the file for the caller to close; None once the region was closed. Raises `OSError`."""
        with _guards_regions:
            return None if self.closed else os.dup(self._fd)

    def close(self) -> None:
        """Forget the region, before its owner closes the file or unmaps the memory. Idempotent."""
        with _guards_regions:
            if not self.closed:
                self._fd = -1
                _know(_known[1])  # without this one


def register(address: int, size: int, fd: int, *, writable: bool) -> Region:
    """Register ``size`` bytes at ``address`` as the file ``fd``, mapped shared from its start.

    The caller keeps the descriptor, and closes the region before it.
    """
    region = Region(address, size, fd, writable)
    with _guards_regions:
        _know(sorted([*_known[1], region], key=lambda known: known.address))
    return region


def locate(memory: Buffer) -> tuple[Region, int] | None:
    """The region that holds all of ``memory``, and the offset in it; None for any other memory."""
    starts, regions = _known
    if not regions or not len(memory):
        return None
    start = int(np.frombuffer(memory, dtype=np.uint8).__array_interface__["data"][0])
    at = bisect.bisect(starts, start) - 1
    if at < 0:
        return None
    region = regions[at]
    offset = start - region.address
    if region.closed or offset + memoryview(memory).nbytes > region.size:
        return None
    return region, offset


def _know(regions: Sequence[Region]) -> None:
    global _known  # noqa: PLW0603
    regions = [region for region in regions if not region.closed]
    _known = ([region.address for region in regions], regions)
