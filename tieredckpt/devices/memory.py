"""Host memory that devices reach by themselves, registered or page-locked, and the streams on which they copy."""

from __future__ import annotations

import bisect
import logging
import mmap
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import numpy as np

from tieredckpt.devices.base import Bytes, Device, Driver, Stream, address
from tieredckpt.errors import DeviceUnavailable
from tieredckpt.units import format_size

__all__ = ["BUFFER", "HostMemory", "Registered"]

_log = logging.getLogger("tieredckpt")

BUFFER = 64 << 20
"""Bytes of a page-locked buffer; more only for chunks of 32 MiB and larger."""
_REGISTERED_AT_ONCE = 64 << 20
"""Bytes that are registered at once, as one range.

The driver holds a lock meanwhile, which every process of the machine waits for: about 7 ms, by what others measured.
"""
_PAUSE = 0.001
"""Seconds between two registrations, in which a program can take device memory, or make a stream."""


class Registered:
    """A mapping that a driver registers range by range from its start, as far as its memory is reserved.

    A transfer must lie within one range, so `within` cuts memory where ranges meet.
    """

    def __init__(self, mapping: Bytes, driver: Driver) -> None:
        self.error: OSError | None = None
        """Why no more is registered."""
        self.mapping = mapping
        self._start = address(mapping)
        self._driver = driver
        self._ends: list[int] = []
        """Ends of the ranges, which follow each other."""
        self._guards_ranges = threading.Lock()
        self._closed = False

    @property
    def nbytes(self) -> int:
        """Bytes that are registered."""
        return self._ends[-1] if self._ends else 0

    def extend(self, there: int) -> None:
        """Register up to ``there`` bytes from the start, whose memory is reserved. Blocking.

        After a refusal, kept as ``error``, it registers nothing more: a locked-memory limit does not go away by itself.
        """
        while True:
            with self._guards_ranges:
                start = self.nbytes
                end = min(there, start + _REGISTERED_AT_ONCE)
                if self._closed or self.error is not None or end <= start:
                    return
                try:
                    self._driver.register(self.mapping[start:end])
                except OSError as error:
                    self.error = error
                    _log.warning(
                        "the device's driver registers %s of %s of shared memory and no more (%s): what is beyond is "
                        "copied through buffers of %s; `tieredckpt doctor` says how to mend that",
                        *(format_size(start), format_size(self.mapping.nbytes), error, format_size(BUFFER)),
                    )
                    return
                self._ends.append(end)
            time.sleep(_PAUSE)

    def within(self, memory: Bytes) -> list[Bytes] | None:
        """``memory`` in parts that lie in one range each; None unless all of it is registered."""
        offset = address(memory) - self._start
        ends = self._ends  # it only grows
        if offset < 0 or not ends or offset + memory.size > ends[-1]:
            return None
        first = bisect.bisect_right(ends, offset)
        parts: list[Bytes] = []
        done = 0
        for end in ends[first:]:
            if done == memory.size:
                break
            part = memory[done : end - offset]
            parts.append(part)
            done += part.size
        return parts

    def close(self) -> None:
        """Give all ranges back to the driver, before the mapping goes. No copy is under way there."""
        with self._guards_ranges:
            self._closed = True
            start = 0
            for end in self._ends:
                with suppress(OSError):  # in a process whose device has failed
                    self._driver.unregister(self.mapping[start:end])
                start = end
            self._ends = []


class HostMemory:
    """A store's host memory that devices reach by themselves. Safe to use from any thread."""

    def __init__(self) -> None:
        self._mappings: tuple[Bytes, ...] = ()
        self._registered: dict[Driver, tuple[Registered, ...]] = {}
        """By known driver, the mappings that are followed."""
        self._buffers: dict[Driver, list[Bytes]] = {}
        self._streams: dict[Device, list[Stream]] = {}
        """Idle streams."""
        self._at_work: list[Stream] = []
        self._guards_members = threading.Lock()
        self.guards_mappings = threading.Lock()
        """Held while a copy to or from a mapping is enqueued, on a stream of `stream`: no mapping goes meanwhile."""
        self._told = False
        """Whether the lack of page-locked memory was logged."""

    def follow(self, mapping: Bytes) -> None:
        """Register that mapping, too, when `extend` is called; until `forget`."""
        with self._guards_members:
            if not any(each is mapping for each in self._mappings):
                self._mappings += (mapping,)
                for driver in self._registered:
                    self._registered[driver] += (Registered(mapping, driver),)

    def forget(self, mapping: Bytes) -> None:
        """Give a mapping back to the drivers, before it goes, when the copies there have ended."""
        with self.guards_mappings, self._guards_members:
            gone = [each for some in self._registered.values() for each in some if each.mapping is mapping]
            self._mappings = tuple(each for each in self._mappings if each is not mapping)
            for driver, some in self._registered.items():
                self._registered[driver] = tuple(each for each in some if each.mapping is not mapping)
            at_work = list(self._at_work)
        for stream in at_work if any(each.nbytes for each in gone) else ():
            stream.finish()
        for registered in gone:
            registered.close()

    def meet(self, driver: Driver) -> None:
        """Register for this driver's devices, too, when `extend` is called."""
        with self._guards_members:
            if driver not in self._registered:
                self._registered[driver] = tuple(Registered(mapping, driver) for mapping in self._mappings)

    def extend(self, mapping: Bytes, there: int) -> None:
        """Register up to ``there`` bytes of the mapping, whose memory is reserved. Blocking.

        Does nothing for a mapping that is not followed any more.
        """
        for each in self._registrations(mapping):
            each.extend(there)

    def within(self, driver: Driver, memory: Bytes) -> list[Bytes] | None:
        """Parts of ``memory`` that the devices copy to or from directly; None if it must pass through a buffer."""
        for registered in self._registered.get(driver, ()):
            if (parts := registered.within(memory)) is not None:
                return parts
        return None

    @contextmanager
    def stream(self, device: Device) -> Iterator[Stream]:
        """A stream of the device for the length of the block, which ends when no work of the stream is under way.

        They are reused: a process has 32 of CUDA, which torch hands out again and again, to NCCL as well.
        """
        self.meet(device.driver)
        with self._guards_members:
            free = self._streams.setdefault(device, [])
            stream = free.pop() if free else None
        if stream is None:
            stream = device.stream()
        with self._guards_members:
            self._at_work.append(stream)
        try:
            yield stream
        finally:
            try:
                stream.record().wait()
            except DeviceUnavailable:  # it has failed, and is not used again
                stream.finish()
            else:
                with self._guards_members:
                    free.append(stream)
            finally:
                with self._guards_members:
                    self._at_work.remove(stream)

    def registered(self, mapping: Bytes) -> int:
        """Bytes of the mapping that every known driver has registered."""
        return min((each.nbytes for each in self._registrations(mapping)), default=0)

    def _registrations(self, mapping: Bytes) -> list[Registered]:
        with self._guards_members:
            return [each for some in self._registered.values() for each in some if each.mapping is mapping]

    @contextmanager
    def buffer(self, driver: Driver, nbytes: int) -> Iterator[Bytes]:
        """A page-locked buffer of at least ``nbytes`` for the length of the block; they are reused.

        If the driver refuses, it is plain memory, from which copies are slower and block.
        """
        with self._guards_members:
            free = self._buffers.setdefault(driver, [])
            place = next((i for i, each in enumerate(free) if each.size >= nbytes), None)
            memory = None if place is None else free.pop(place)
        if memory is None:
            # Less than a power of two, to which torch rounds up what it has besides.
            memory = self._new_buffer(driver, max(nbytes, BUFFER - mmap.PAGESIZE))
        try:
            yield memory
        finally:
            with self._guards_members:
                free.append(memory)

    def _new_buffer(self, driver: Driver, nbytes: int) -> Bytes:
        try:
            return driver.pinned(nbytes)
        except OSError as error:
            if not self._told:
                self._told = True
                _log.warning(
                    "the device's driver has no page-locked memory (%s): copies are slow, and block; `tieredckpt "
                    "doctor` says how to mend that",
                    error,
                )
            return np.empty(nbytes, dtype=np.uint8)

    def close(self) -> None:
        """Give everything back."""
        for mapping in self._mappings:
            self.forget(mapping)
        with self._guards_members:
            self._buffers.clear()
            self._streams.clear()
