"""The interface of a device with memory of its own, as small Protocols.

The terms are those of CUDA. A *stream* is a queue of work of one device that runs in order, beside other streams. An
*event* marks a place in a stream. Host memory is *registered* (page-locked) when a device copies to and from it
directly; from other memory the driver copies in small pieces, and the call blocks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from tieredckpt.errors import DeviceUnavailable

__all__ = ["Bytes", "Device", "DeviceArray", "DeviceFull", "Driver", "Event", "Stream", "address"]

Bytes = npt.NDArray[np.uint8]
"""Host memory: one-dimensional and contiguous."""


def address(memory: Bytes) -> int:
    """Address of host memory."""
    return int(memory.__array_interface__["data"][0])


class DeviceFull(DeviceUnavailable):
    """The device has too little memory for the request. Nothing that touches host memory was enqueued."""


class Event(Protocol):
    """A place in a stream."""

    def wait(self) -> None:
        """Block the calling thread until the stream has got there. Releases the GIL.

        Raises `DeviceUnavailable` if work before it in the stream failed.
        """


class Stream(Protocol):
    """A queue of work of one device. Each verb but `finish` only enqueues; one thread at a time uses it.

    Every verb raises `DeviceUnavailable`. The caller keeps arrays and host memory alive, and does not touch the host
    memory, until a later event of the stream has come.
    """

    def after(self, event: Event) -> None:
        """Run all work that is enqueued from here on after ``event``, of any stream of any device of the driver."""

    def copy_out(self, source: Any, targets: Sequence[Bytes]) -> None:
        """Copy the row-major bytes of an array of the device to the host: one after the other into ``targets``.

        Each target lies within one registered range, or within memory of `Driver.pinned`. An array that is not
        contiguous takes memory of the device; where it has none, that copy takes longer, and blocks.
        """

    def gather_out(self, sources: Sequence[Any], target: Bytes) -> None:
        """Copy the row-major bytes of arrays of one form, which follow each other in ``target``, in one transfer.

        It takes as much device memory again. Raises `DeviceFull` where there is none.
        """

    def copy_in(self, sources: Sequence[Bytes], target: Any) -> None:
        """Fill an array of the device, in any memory layout, with its row-major bytes, which follow each other."""

    def record(self) -> Event:
        """Record an event at the end of the work so far."""

    def finish(self) -> None:
        """Block until no work of the stream is under way, even after errors. Needs no event. Releases the GIL.

        Any thread may call it, also while another one uses the stream.
        """


class Device(Protocol):
    """One device. Equal objects are one device; hashable."""

    @property
    def name(self) -> str:
        """For people, such as ``cuda:0``."""

    @property
    def bus_id(self) -> str | None:
        """Its place on the PCI bus, as ``/sys/bus/pci/devices`` names it: ``0000:3b:00.0``. None where unknown."""

    @property
    def driver(self) -> Driver:
        """The driver that registers host memory for it."""

    def stream(self) -> Stream:
        """A stream beside those of the program."""

    def empty(self, like: Any, stream: Stream | None) -> Any:
        """A new array of the shape and dtype of ``like``, whose memory belongs to ``stream``.

        Work that is enqueued there may still use the memory for its former owner. None is the calling thread's current
        stream.
        """

    def span(self, array: Any) -> tuple[int, int]:
        """The addresses that an array covers: its first, and the one after its last."""


class Driver(Protocol):
    """The devices of one kind in this process, and the host memory that they reach. Any thread may call it."""

    def register(self, memory: Bytes) -> None:
        """Page-lock memory for all devices, until `unregister`. Blocking. Raises `OSError` where that is refused."""

    def unregister(self, memory: Bytes) -> None:
        """Undo `register` of the same memory; no copy to or from it is under way."""

    def pinned(self, nbytes: int) -> Bytes:
        """New page-locked memory. Blocking. Raises `OSError` where that is refused."""

    def in_use(self) -> Sequence[Device]:
        """The devices that this process has begun to use."""

    def current_streams(self) -> Mapping[Device, Stream]:
        """The calling thread's current stream of each device, as the framework defines it."""


class DeviceArray:
    """Base class for arrays in device memory that belong to no framework known here.

    A tree may hold it as it holds a tensor: it is saved, and filled by a restore with ``like`` or ``into``. Restored
    without these it is a NumPy array. Beside the attributes, ``array[slices]`` is a view of a part of it.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    device: Device
    version: int
    """Grows with every change of the array that the program enqueues."""

    def __getitem__(self, items: tuple[slice, ...], /) -> Any:
        raise NotImplementedError
