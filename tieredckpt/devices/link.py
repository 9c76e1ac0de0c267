"""The copies between devices and the host that one thread has in flight: a bounded number, first in, first out.

A copy goes directly to or from registered memory. Other memory is copied through a page-locked buffer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

import numpy as np

from tieredckpt.devices.base import Bytes, Device, Driver, Event, Stream
from tieredckpt.devices.memory import BUFFER, HostMemory
from tieredckpt.errors import DeviceUnavailable

__all__ = ["Flight", "Link", "naming"]

T = TypeVar("T")

_AHEAD = 3
"""Copies that a thread has in flight; fewer of chunks that are larger than a third of a buffer."""


@contextmanager
def naming(what: str) -> Iterator[None]:
    """Begin the message of a `DeviceUnavailable` with what it means for an array."""
    try:
        yield
    except DeviceUnavailable as error:
        raise DeviceUnavailable(f"{what}: {error}") from error


@dataclass(frozen=True, slots=True)
class Flight(Generic[T]):
    """A copy that was begun."""

    what: T
    """The caller's label of the copy."""
    landed: Event
    buffer: Bytes | None
    """The buffer in which a copy from a device arrives, if it does not go to its final place."""
    driver: Driver


class _Unmarked:
    """Stands in for an event that could not be recorded: waits for the stream, and raises the error."""

    def __init__(self, stream: Stream, error: DeviceUnavailable) -> None:
        self._stream, self._error = stream, error

    def wait(self) -> None:
        self._stream.finish()
        raise self._error


def _mark(stream: Stream) -> Event:
    """An event at this place, or a stand-in that waits for the whole stream and raises: no copy may go unwaited."""
    try:
        return stream.record()
    except DeviceUnavailable as error:
        return _Unmarked(stream, error)


class Link(Generic[T]):
    """The copies that one thread has in flight; to be closed, or used in ``with``.

    Args:
        memory: the host memory that devices reach by themselves.
        stream: lends a stream, for the copies of a device.
        part: the most bytes of one copy.
    """

    def __init__(
        self, memory: HostMemory, stream: Callable[[Device], AbstractContextManager[Stream]], part: int
    ) -> None:
        self._memory, self._stream, self._part = memory, stream, part
        self._ahead = max(1, min(_AHEAD, BUFFER // part))
        self._streams: dict[Device, Stream] = {}
        self._ready: dict[Device, Event] = {}
        """The event for which the stream of a device waits already."""
        self._flights: deque[Flight[T]] = deque()
        self._free: dict[Driver, list[Bytes]] = {}
        """Parts of buffers, each for one copy."""
        self._lent = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Wait for the copies in flight, even if they fail, and give buffers and streams back."""
        for flight in self._flights:
            with suppress(DeviceUnavailable):
                flight.landed.wait()
        self._flights.clear()
        self._lent.close()

    def __len__(self) -> int:
        return len(self._flights)

    @property
    def is_full(self) -> bool:
        """Whether `land` must be called before another copy is begun."""
        return len(self._flights) >= self._ahead

    def copy_out(self, what: T, device: Device, source: Any, target: Bytes | None, nbytes: int) -> None:
        """Begin the copy of ``source``, an array of ``nbytes`` on ``device``, to the start of ``target``.

        If ``target`` is None, a buffer takes the bytes. Raises `DeviceUnavailable`; a part may be in flight then.
        """
        copy = partial(self._stream_of(device).copy_out, source)
        if target is None or not self._direct(what, device, copy, target[:nbytes]):
            buffer = self._buffer(device.driver)
            self._begin(what, device, copy, [buffer[:nbytes]], buffer)

    def copy_in(self, what: T, device: Device, source: Bytes, target: Any, ready: Event | None) -> None:
        """Begin to fill ``target``, an array on ``device``, with its row-major bytes, once it is ``ready``.

        The caller does not change ``source`` until the copy has landed. Raises `DeviceUnavailable`; a part may be in
        flight then.
        """
        stream = self._stream_of(device)
        if ready is not None and self._ready.get(device) is not ready:
            stream.after(ready)
            self._ready[device] = ready
        copy = partial(stream.copy_in, target=target)
        if not self._direct(what, device, copy, source):
            buffer = self._buffer(device.driver)
            np.copyto(buffer[: source.size], source)
            self._begin(what, device, copy, [buffer[: source.size]], buffer)

    def land(self) -> Flight[T]:
        """The oldest copy, which has not arrived: wait for it, use it, then `done`."""
        return self._flights.popleft()

    def done(self, flight: Flight[T]) -> None:
        """Give back the buffer of a copy that was used."""
        if flight.buffer is not None:
            self._free[flight.driver].append(flight.buffer)

    def _stream_of(self, device: Device) -> Stream:
        if device not in self._streams:
            self._streams[device] = self._lent.enter_context(self._stream(device))
        return self._streams[device]

    def _direct(self, what: T, device: Device, copy: Callable[[list[Bytes]], None], memory: Bytes) -> bool:
        """Begin a copy to or from ``memory`` itself; False if the device does not reach it."""
        if self._memory.within(device.driver, memory) is None:
            return False  # without waiting for another thread, which may copy directly for long
        with self._memory.guards_mappings:
            parts = self._memory.within(device.driver, memory)  # it may have been given back in between
            if parts is not None:
                self._begin(what, device, copy, parts, None)
            return parts is not None

    def _begin(
        self, what: T, device: Device, copy: Callable[[list[Bytes]], None], parts: list[Bytes], buffer: Bytes | None
    ) -> None:
        try:
            copy(parts)
        finally:
            # Also for a copy that failed half way: some of its parts may be under way.
            self._flights.append(Flight(what, _mark(self._streams[device]), buffer, device.driver))

    def _buffer(self, driver: Driver) -> Bytes:
        if driver not in self._free:
            memory = self._lent.enter_context(self._memory.buffer(driver, self._part * self._ahead))
            self._free[driver] = [memory[i * self._part : (i + 1) * self._part] for i in range(self._ahead)]
        return self._free[driver].pop()
