"""The drivers of this process: torch's once a program uses CUDA, and those that were added."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tieredckpt.devices.base import Device, Driver, Stream

__all__ = ["added", "current_streams", "drivers"]

_added: list[Driver] = []


@contextmanager
def added(driver: Driver) -> Iterator[None]:
    """Add a driver, whose arrays are of a `DeviceArray`, for the length of the block."""
    _added.append(driver)
    try:
        yield
    finally:
        _added.remove(driver)


def drivers() -> list[Driver]:
    """The drivers whose devices the program has used. Never initializes a device."""
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    if cuda is None or not cuda.is_initialized():
        return list(_added)
    from tieredckpt.devices import cuda as torchs

    return [torchs.DRIVER, *_added]


def current_streams() -> Mapping[Device, Stream]:
    """Current streams of the calling thread: work that is enqueued there comes before what is saved now."""
    found: dict[Device, Stream] = {}
    for driver in drivers():
        found.update(driver.current_streams())
    return found
