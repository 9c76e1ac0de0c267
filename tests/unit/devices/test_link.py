"""The copies of one thread: each comes after its own event."""

from __future__ import annotations

import numpy as np
import pytest

from tieredckpt.devices.link import Link
from tieredckpt.devices.memory import HostMemory
from tieredckpt.testing.devices import FakeDriver


@pytest.mark.parametrize("seed", range(8))
def test_a_copy_to_a_device_waits_for_its_own_event_not_for_that_of_the_copy_before_it(seed: int) -> None:
    seen: list[bytes] = []
    with FakeDriver(seed=seed) as driver:
        (device,) = driver.devices
        memory, program = HostMemory(), device.stream()
        first, second, third = (device.array(np.zeros(8, np.uint8)) for _ in range(3))
        with Link[str](memory, memory.stream, 4096) as link:
            with driver.paused():
                early = program.record()
                for _ in range(20):
                    program.enqueue(lambda: None)
                program.enqueue(lambda: seen.append(third.row_major().tobytes()))
                late = program.record()
                for name, target, ready in (("1", first, early), ("2", second, early), ("3", third, late)):
                    link.copy_in(name, device, np.ones(8, np.uint8), target, ready)
            while link:
                flight = link.land()
                flight.landed.wait()
                link.done(flight)
        assert seen == [bytes(8)], "the program read it before it was filled"
        assert all(each.row_major().all() for each in (first, second, third))
