"""A device without hardware, for tests: streams, events, a link of a given speed, and memory that only it touches.

::

    with FakeDriver(devices=2) as driver:
        weights = driver.devices[0].array(np.ones(1000))
        await store.save(1, {"w": weights})

The work of a device runs on a thread of its own, in an order that a seed chooses among its streams, so that tests see
the orders that hardware may choose. `FakeDriver.paused` holds it back, and `FakeDevice.step` runs one piece of it. A
copy that crosses the end of a registered range fails as with hardware, and one to or from host memory that is not
page-locked blocks its caller, and is counted in `FakeDriver.pageable`.
"""

from __future__ import annotations

import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import chain, repeat
from types import TracebackType
from typing import Any, Self

import numpy as np

from tieredckpt.devices.base import Bytes, Device, DeviceFull, Driver, Event, Stream
from tieredckpt.devices.drivers import added
from tieredckpt.errors import DeviceUnavailable
from tieredckpt.testing.device_arrays import FakeArray
from tieredckpt.testing.locked_memory import LockedMemory

__all__ = ["FakeArray", "FakeDevice", "FakeDriver", "FakeEvent", "FakeStream"]

_HANGS = 60.0
"""Seconds after which a missing event fails its test."""


class FakeEvent:
    """A place in a stream of a fake device."""

    def __init__(self, stream: FakeStream) -> None:
        self._stream = stream
        self.failure: BaseException | None = None
        self.came = False

    def wait(self) -> None:
        self.until_come()
        if self.failure is not None:
            raise DeviceUnavailable(f"device {self._stream.device.name}: {self.failure}") from self.failure

    def come(self) -> None:
        """For the device alone."""
        self.failure = self._stream.failure
        self.came = True

    def until_come(self) -> None:
        """As `wait`, but does not raise after a failure."""
        changed = self._stream.device.driver.changed
        with changed:
            if not changed.wait_for(lambda: self.came, _HANGS):
                raise AssertionError(f"an event of {self._stream.device.name} did not come: is the device paused?")


class FakeStream:
    """A queue of work of a fake device."""

    def __init__(self, device: FakeDevice) -> None:
        self.device = device
        self._queue: deque[Callable[[], None] | FakeEvent] = deque()
        """Work, and events that the stream waits for."""
        self.failure: BaseException | None = None
        """The first failure of its work."""

    def enqueue(self, work: Callable[[], None]) -> None:
        """Run ``work`` in its turn, on the device's thread, such as a kernel of the program."""
        self._put(work)

    def after(self, event: Event) -> None:
        assert isinstance(event, FakeEvent)
        self._put(event)

    def copy_out(self, source: FakeArray, targets: Sequence[Bytes]) -> None:
        device, start = self.device, 0
        assert sum(target.size for target in targets) == source.nbytes, "the parts are as long as the array"
        for target in targets:
            pageable = device.check(target)

            def copy(target: Bytes = target, start: int = start) -> None:
                device.transfer(target.size)
                target[:] = source.row_major()[start : start + target.size]

            self._put_copy(copy, pageable=pageable)
            start += target.size

    def gather_out(self, sources: Sequence[FakeArray], target: Bytes) -> None:
        device = self.device
        device.take_scratch(target.size)
        pageable = device.check(target)

        def copy() -> None:
            device.transfer(target.size)
            target[:] = np.concatenate([source.row_major() for source in sources])

        self._put_copy(copy, pageable=pageable)

    def copy_in(self, sources: Sequence[Bytes], target: FakeArray) -> None:
        device = self.device
        assert sum(source.size for source in sources) == target.nbytes, "the parts are as long as the array"
        pageable = sum(device.check(source) for source in sources) > 0

        def copy() -> None:
            device.transfer(target.nbytes)
            target.fill_from(np.concatenate(sources) if sources else np.empty(0, np.uint8))

        self._put_copy(copy, pageable=pageable)

    def record(self) -> FakeEvent:
        event = FakeEvent(self)
        self._put(event.come)
        return event

    def finish(self) -> None:
        event = FakeEvent(self)
        self._put(event.come)
        event.until_come()

    def _put_copy(self, copy: Callable[[], None], *, pageable: bool) -> None:
        self._put(copy)
        if pageable:
            self.record().wait()

    def _put(self, work: Callable[[], None] | FakeEvent) -> None:
        with self.device.driver.changed:
            self._queue.append(work)
            self.device.driver.tell()

    def __len__(self) -> int:
        return len(self._queue)

    def next(self) -> Callable[[], None] | None:
        """The next action from the queue; None if the stream waits."""
        while self._queue and isinstance(first := self._queue[0], FakeEvent):
            if not first.came:
                return None
            self._queue.popleft()
        if not self._queue:
            return None
        work = self._queue.popleft()
        assert not isinstance(work, FakeEvent)
        return work

    def run(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            self.failure = self.failure or error


class FakeDevice:
    """One fake device."""

    def __init__(
        self, driver: FakeDriver, index: int, speed: float | None, seed: int, bus_id: str | None = None
    ) -> None:
        self.driver: FakeDriver = driver
        self.name, self.bus_id = f"fake:{index}", bus_id
        self._speed = speed
        self._random = random.Random(seed + index)
        self._streams: list[FakeStream] = []
        self._default = self.stream()
        self._of_thread = threading.local()
        self.fail_after: int | None = None
        """Transfers that still succeed; None for all."""
        self.scratch: int | None = None
        """Bytes of its memory that a copy may take for itself; None for any."""
        self.transferred = 0
        """Bytes over its link so far."""
        self._thread = threading.Thread(target=self._run, name=self.name, daemon=True)

    def stream(self) -> FakeStream:
        with self.driver.changed:
            self._streams.append(FakeStream(self))
            return self._streams[-1]

    @property
    def current(self) -> FakeStream:
        """The calling thread's current stream; all threads begin with the same."""
        found: FakeStream = getattr(self._of_thread, "stream", self._default)
        return found

    @current.setter
    def current(self, stream: FakeStream) -> None:
        self._of_thread.stream = stream

    def array(self, values: Any) -> FakeArray:
        """A new array with these values, copied from the host."""
        return FakeArray(self, np.array(values), [0])

    def empty(self, like: FakeArray, stream: Stream | None) -> FakeArray:
        """New memory of undefined content."""
        anything = np.full(like.nbytes, 0x5A, np.uint8)
        found = FakeArray(self, anything.view(like.dtype).reshape(like.shape), [0])
        found.stream = stream or self.current
        return found

    def span(self, array: FakeArray) -> tuple[int, int]:
        return array.span()

    def check(self, memory: Bytes) -> bool:
        """Whether a copy of host memory blocks. Raises for a copy that hardware refuses."""
        touched = self.driver.ranges_of(memory)
        if touched and touched != [True]:
            raise DeviceUnavailable(f"device {self.name}: a copy of {memory.size} bytes crosses a registered range")
        self.driver.pageable += not touched
        self.driver.direct += memory.nbytes * self.driver.is_registered(memory)
        return not touched

    def take_scratch(self, nbytes: int) -> None:
        """Raise `DeviceFull` if a copy cannot have so many bytes of scratch memory."""
        if self.scratch is not None and nbytes > self.scratch:
            raise DeviceFull(f"device {self.name}: out of memory: {nbytes} bytes were asked for")

    def transfer(self, nbytes: int) -> None:
        """Take the time of a copy, or fail as told."""
        if self.fail_after is not None:
            self.fail_after -= 1
            if self.fail_after < 0:
                raise RuntimeError("an illegal memory access was encountered")
        if self._speed is not None:
            time.sleep(nbytes / self._speed)
        self.transferred += nbytes

    @property
    def waiting(self) -> int:
        """Pieces of work that are enqueued."""
        return sum(map(len, self._streams))

    def step(self) -> bool:
        """Run one piece of work of any stream that does not wait; False if there is none."""
        changed = self.driver.changed
        with changed:
            streams = list(self._streams)
            self._random.shuffle(streams)
            found = next(((stream, work) for stream in streams if (work := stream.next()) is not None), None)
        if found is None:
            return False
        stream, work = found
        stream.run(work)
        with changed:
            self.driver.tell()
        return True

    def start(self) -> None:
        self._thread.start()

    def join(self) -> None:
        self._thread.join()

    def _run(self) -> None:
        driver = self.driver
        while True:
            with driver.changed:
                driver.changed.wait_for(lambda: driver.ended or not driver.is_paused)
                if driver.ended:
                    return
                seen = driver.changes
            if not self.step():
                with driver.changed:
                    driver.changed.wait_for(partial(driver.has_changed, seen))


class FakeDriver(LockedMemory):
    """Fake devices, to be used in ``with``: their arrays may be in a tree during the block.

    Args:
        devices: how many.
        speed: of each one's link, in bytes a second; None for one that takes no time.
        seed: chooses which stream goes on.
        lockable: bytes of host memory that may be page-locked in all; None for any.
        bus_ids: of the first devices, on the PCI bus.
    """

    def __init__(
        self,
        devices: int = 1,
        *,
        speed: float | None = None,
        seed: int = 0,
        lockable: int | None = None,
        bus_ids: Sequence[str] = (),
    ) -> None:
        super().__init__(lockable)
        self.changed = threading.Condition()
        self.is_paused = self.ended = False
        self.changes = 0
        """Number of changes to the pending work."""
        self.pageable = 0
        """Copies of host memory that is not page-locked."""
        self.direct = 0
        """Bytes copied to or from registered memory, and not through a buffer."""
        self.devices = tuple(
            FakeDevice(self, index, speed, seed, bus_id)
            for index, bus_id in zip(range(devices), chain(bus_ids, repeat(None)), strict=False)
        )
        self._until_end = ExitStack()

    def __enter__(self) -> Self:
        self._until_end.enter_context(added(self))
        for device in self.devices:
            device.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with self.changed:
            self.ended = True
            self.changed.notify_all()
        for device in self.devices:
            device.join()
        self._until_end.close()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Run nothing by itself for the length of the block."""
        self._pause(True)
        try:
            yield
        finally:
            self._pause(False)

    def _pause(self, paused: bool) -> None:
        with self.changed:
            self.is_paused = paused
            self.changed.notify_all()

    def has_changed(self, since: int) -> bool:
        """Whether there may be more work than when ``changes`` was ``since``, or the driver has ended."""
        return self.ended or self.changes != since

    def tell(self) -> None:
        """Wake the threads that wait for a change; called with ``changed`` held."""
        self.changes += 1
        self.changed.notify_all()

    def in_use(self) -> Sequence[Device]:
        return self.devices

    def current_streams(self) -> Mapping[Device, Stream]:
        return {device: device.current for device in self.devices}


def _conforms(driver: FakeDriver) -> Driver:
    """For mypy: a `FakeDriver` is a `Driver`."""
    return driver
