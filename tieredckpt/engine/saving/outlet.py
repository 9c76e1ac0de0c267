"""Brings the bytes of device arrays to the host: on streams of our own, several copies in flight on each copy thread.

A copy thread enqueues the copy of a cell straight into the slab, goes on to the next, and digests a cell when its copy
has come, while later ones fly.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from tieredckpt.devices.base import Bytes, Device, DeviceArray, DeviceFull, Event, Stream
from tieredckpt.devices.drivers import drivers
from tieredckpt.devices.link import Link
from tieredckpt.devices.memory import HostMemory
from tieredckpt.format.layout import aligned
from tieredckpt.tree.arrays import ArrayLeaf, device_view

__all__ = ["Outlet"]

_TOGETHER = 16 << 20
"""Most bytes of small arrays that are gathered on their device at a time."""


@dataclass(frozen=True, slots=True)
class Outlet:
    """What a save needs to read the memory of devices."""

    memory: HostMemory
    ready: Mapping[Device, Event]
    """Of each device of the tree: when its arrays are what is to be saved."""

    def link(self, largest: int) -> Link[Any]:
        """For one thread, for the length of a ``with`` block; ``largest`` is the most bytes of one copy."""
        return Link(self.memory, self.stream, aligned(largest))

    @contextmanager
    def stream(self, device: Device) -> Iterator[Stream]:
        """A stream on which arrays are what is to be saved; see `HostMemory.stream`."""
        with self.memory.stream(device) as stream:
            if (ready := self.ready.get(device)) is not None:
                stream.after(ready)
            yield stream

    def small(self, leaves: Mapping[int, ArrayLeaf]) -> dict[int, npt.NDArray[Any]]:
        """Copy those of some small arrays that lie on devices to the host; those of one form come in one copy."""
        kinds = {type(leaf.source) for leaf in leaves.values()}
        if not drivers() and not any(issubclass(kind, DeviceArray) for kind in kinds):
            return {}  # to ask each of 100,000 leaves would take longer than to copy it
        forms: dict[tuple[Device, Any, tuple[int, ...]], dict[int, Any]] = {}
        for i, leaf in leaves.items():
            if (found := device_view(leaf)) is not None:
                forms.setdefault((found[0], leaf.dtype, leaf.shape), {})[i] = found[1]
        arrays: dict[int, npt.NDArray[Any]] = {}
        for (device, dtype, shape), views in forms.items():
            arrays.update(zip(views, self._together(device, dtype, shape, list(views.values())), strict=True))
        return arrays

    def _together(
        self, device: Device, dtype: np.dtype[Any], shape: tuple[int, ...], views: Sequence[Any]
    ) -> Iterator[npt.NDArray[Any]]:
        """Copy arrays of one form to the host, a batch at a time."""
        size = prod(shape) * dtype.itemsize
        if not size:
            yield from (np.empty(shape, dtype) for _ in views)
            return
        at_once = max(1, _TOGETHER // size)
        for first in range(0, len(views), at_once):
            batch = views[first : first + at_once]
            with self.memory.buffer(device.driver, size * len(batch)) as buffer:
                landing = buffer[: size * len(batch)]
                with self.stream(device) as stream:
                    _gather(stream, batch, landing)
                    stream.record().wait()
                together = landing.copy()
            for start in range(0, together.size, size):
                yield together[start : start + size].view(dtype).reshape(shape)


def _gather(stream: Stream, batch: Sequence[Any], landing: Bytes) -> None:
    """Begin to copy arrays of one form to ``landing``: together, or one by one where the device is full."""
    try:
        stream.gather_out(batch, landing)
    except DeviceFull:
        size = landing.size // len(batch)
        for i, view in enumerate(batch):
            stream.copy_out(view, [landing[i * size : (i + 1) * size]])
