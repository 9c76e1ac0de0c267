"""Device memory that a restore fills directly, in place of a NumPy array."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from tieredckpt.devices.base import Device, Event

__all__ = ["DeviceTarget", "Filled"]


@dataclass(frozen=True, slots=True)
class DeviceTarget:
    """An array, or a part of one, in the memory of a device."""

    device: Device
    array: Any
    """On the device, of any memory layout."""
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    ready: Event | None
    """When it may be filled."""

    @property
    def size(self) -> int:
        """Items."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.size * self.dtype.itemsize

    @property
    def span(self) -> tuple[str, int, int]:
        """The device, and the first and last address there."""
        return self.device.name, *self.device.span(self.array)


Filled = npt.NDArray[Any] | DeviceTarget
"""Memory that an array of a step was read into."""
