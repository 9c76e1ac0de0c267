"""Arrays in the memory of the fake devices of `tieredckpt.testing.devices`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from tieredckpt.devices.base import Bytes, Device, DeviceArray, Stream

__all__ = ["FakeArray"]


class Queue(Stream, Protocol):
    """A stream that takes any work."""

    def enqueue(self, work: Callable[[], None]) -> None:
        """Run ``work`` in its turn, on the device's thread."""


class Owner(Device, Protocol):
    """The device of an array."""

    @property
    def current(self) -> Queue:
        """The stream on which the calling thread works."""


class FakeArray(DeviceArray):
    """An array in the memory of a fake device."""

    def __init__(self, device: Owner, memory: npt.NDArray[Any], versions: list[int]) -> None:
        self.device: Owner = device
        self.shape, self.dtype = memory.shape, memory.dtype
        self._memory, self._versions = memory, versions
        self.stream: Stream | None = None
        """The stream that its memory belongs to, if a restore made the array."""

    @property
    def version(self) -> int:  # type: ignore[override]
        return self._versions[0]

    @property
    def nbytes(self) -> int:
        return self._memory.nbytes

    def __getitem__(self, items: tuple[slice, ...], /) -> FakeArray:
        every: tuple[Any, ...] = (*items, ...)
        return FakeArray(self.device, self._memory[every], self._versions)

    def __array__(self, *_: Any, **__: Any) -> npt.NDArray[Any]:
        raise TypeError(f"the memory of {self.device.name} is not the host's")

    def change(self, values: Any, *, tells: bool = True) -> None:
        """Enqueue a change to ``values``; the version grows at once if it ``tells``."""
        new = np.array(values, self.dtype)
        self.device.current.enqueue(lambda: np.copyto(self._memory, new))
        self._versions[0] += tells

    def read(self) -> npt.NDArray[Any]:
        """The values once the work on the current stream is done, as ``tensor.cpu()``."""
        found: list[npt.NDArray[Any]] = []
        self.device.current.enqueue(lambda: found.append(self._memory.copy()))
        self.device.current.record().wait()
        return found[0]

    def row_major(self) -> Bytes:
        """For the device alone."""
        return np.ascontiguousarray(self._memory).reshape(-1).view(np.uint8)

    def fill_from(self, row_major: Bytes) -> None:
        """For the device alone."""
        np.copyto(self._memory, row_major.view(self.dtype).reshape(self.shape))

    def span(self) -> tuple[int, int]:
        low, high = np.lib.array_utils.byte_bounds(self._memory)
        return low, high
