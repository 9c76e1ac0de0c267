"""Copies verified bytes to the memory of devices, several copies in flight on each thread that reads chunks.

A chunk in the RAM tier's slab is copied to its device from there. A chunk of another tier is read by direct I/O into
scratch memory, verified, and copied to its device from there. Slab and scratch memory are registered with the driver,
so the host copies no byte. Other bytes pass through a page-locked buffer, with one more copy: chunks of a tier with a
codec, which are decoded elsewhere, small chunks in the index, parts of chunks that are no range of bytes, and all bytes
where the driver refuses.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from tieredckpt.blobs.ram.slab import Slab
from tieredckpt.devices.base import Bytes
from tieredckpt.devices.link import Link, naming
from tieredckpt.devices.memory import HostMemory
from tieredckpt.format.layout import aligned
from tieredckpt.tree.arrays import row_major_bytes
from tieredckpt.tree.device_target import DeviceTarget

__all__ = ["DeviceOverlap", "Inlet", "landing_together"]


class _OfThread(threading.local):
    """Copies that a thread has in flight inside `landing_together`: by restore, the keys of arrays."""

    links: dict[Inlet, Link[str]] | None = None


_of_thread = _OfThread()


@contextmanager
def landing_together() -> Iterator[None]:
    """Wait, at the end of the block, for all copies to devices that this thread began in it.

    Their sources must not change until then. After the block, also after an error, no device reads them or writes to
    a target. Raises `DeviceUnavailable`, which names the array that was to be filled.
    """
    if _of_thread.links is not None:
        yield
        return
    links: dict[Inlet, Link[str]] = {}
    _of_thread.links = links
    try:
        yield
        for inlet, link in links.items():
            inlet.land(link)
    finally:
        _of_thread.links = None
        for link in links.values():
            link.close()


class Inlet:
    """Copies the chunks of one restore to the memory of devices. Its methods block; any thread may call them."""

    def __init__(self, memory: HostMemory, scratch: Slab) -> None:
        self._memory, self._scratch = memory, scratch
        self._largest = 1
        """Bytes of one copy at most."""

    def overlap(
        self,
        key: str,
        cell: tuple[int, ...],
        items: tuple[slice, ...],
        target: DeviceTarget,
        there: tuple[slice, ...],
        nbytes: int,
    ) -> DeviceOverlap:
        """Make the `DeviceOverlap` that copies some items of a chunk. Make all of them before the first one copies."""
        self._largest = max(self._largest, nbytes)
        return DeviceOverlap(self, key, cell, items, target, there, nbytes)

    def fill(self, key: str, target: DeviceTarget, array: Any, source: Bytes) -> None:
        """Begin to fill ``array``, a part of ``target``, with its row-major bytes, in a block of `landing_together`."""
        assert _of_thread.links is not None, "there is a block, in which somebody waits"
        if (link := _of_thread.links.get(self)) is None:
            link = _of_thread.links[self] = Link(self._memory, self._memory.stream, aligned(self._largest))
        if link.is_full:
            self._land_one(link)
        scratch = self._scratch.array
        if np.may_share_memory(source, scratch) and self._memory.within(target.device.driver, source) is None:
            self._memory.extend(scratch, self._scratch.reserved)  # it has grown
        with naming(f"array {key!r} was not filled"):
            link.copy_in(key, target.device, source, array, target.ready)

    def land(self, link: Link[str]) -> None:
        """Wait for all copies."""
        while link:
            self._land_one(link)

    def _land_one(self, link: Link[str]) -> None:
        flight = link.land()
        with naming(f"array {flight.what!r} was not filled"):
            flight.landed.wait()
        link.done(flight)


@dataclass(frozen=True, slots=True)
class DeviceOverlap:
    """Some items of a chunk, and the device memory that they are copied to."""

    inlet: Inlet
    key: str
    """Of the array, for people."""
    cell: tuple[int, ...]
    """Shape of the chunk's cell."""
    items: tuple[slice, ...]
    target: DeviceTarget
    there: tuple[slice, ...]
    """Of the target."""
    nbytes: int

    def copy(self, memory: Bytes) -> None:
        """Copy the items from the chunk: all of it, verified, is in ``memory``. Blocking; see `landing_together`."""
        source = memory.view(self.target.dtype).reshape(self.cell)[self.items]
        flat = row_major_bytes(source)
        if flat is None:
            flat = np.ascontiguousarray(source).reshape(-1).view(np.uint8)
        with landing_together():
            self.inlet.fill(self.key, self.target, self.target.array[self.there], flat)
