"""The copies of one thread: each comes after its own event, and to or from a mapping while nobody gives it back."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tieredckpt.devices.link import Link
from tieredckpt.devices.memory import HostMemory
from tieredckpt.testing.devices import FakeDriver, FakeStream


@pytest.mark.parametrize("seed", range(8))
def test_a_copy_to_a_device_waits_for_its_own_event_and_no_event_is_waited_for_twice(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[bytes] = []
    waits: list[Any] = []
    plain = FakeStream.after
    monkeypatch.setattr(FakeStream, "after", lambda stream, event: (waits.append(event), plain(stream, event))[1])
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
        assert waits == [early, late]
        assert seen == [bytes(8)], "the program read it before it was filled"
        assert all(each.row_major().all() for each in (first, second, third))


@pytest.mark.timeout(60)
def test_no_mapping_is_given_back_while_a_copy_there_is_enqueued_and_other_copies_do_not_wait_for_that(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    held: list[bool] = []
    memory, mapping = HostMemory(), np.zeros(4096, np.uint8)
    plain = FakeStream.copy_out
    monkeypatch.setattr(
        FakeStream, "copy_out", lambda *arguments: (held.append(memory.guards_mappings.locked()), plain(*arguments))[1]
    )
    with FakeDriver() as driver:
        (device,) = driver.devices
        memory.follow(mapping)
        memory.meet(driver)
        memory.extend(mapping, mapping.size)
        array = device.array(np.ones(8, np.uint8))
        with Link[str](memory, memory.stream, 4096) as link:
            link.copy_out("there", device, array, mapping, 8)
            with memory.guards_mappings:
                link.copy_out("elsewhere", device, array, np.zeros(8, np.uint8), 8)
        memory.close()
    assert held[0], "nobody could give the mapping back"
    assert len(held) == 2
