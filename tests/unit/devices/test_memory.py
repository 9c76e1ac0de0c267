"""Host memory that devices reach: registered range by range, buffers elsewhere, and what `doctor` says of it."""

from __future__ import annotations

import mmap
from concurrent.futures import ThreadPoolExecutor, wait
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.devices import fail_at
from support.scenes import SOON

from tieredckpt.blobs.ram.slab import Slab
from tieredckpt.devices import examine
from tieredckpt.devices import memory as memory_module
from tieredckpt.devices.examine import page_locking
from tieredckpt.devices.link import Link
from tieredckpt.devices.memory import BUFFER, HostMemory
from tieredckpt.testing.devices import FakeDriver

STRIDE = 1000


@given(
    growth=st.lists(st.integers(0, 6000), min_size=1, max_size=5),
    ask=st.tuples(st.integers(0, 6000), st.integers(1, 3000)),
)
def test_memory_is_cut_where_ranges_meet_and_nothing_beyond_is_given(growth: list[int], ask: tuple[int, int]) -> None:
    mapping = np.zeros(9000, np.uint8)
    start, size = ask
    with pytest.MonkeyPatch.context() as patch, FakeDriver() as driver:
        patch.setattr(memory_module, "_REGISTERED_AT_ONCE", STRIDE)
        reached = HostMemory()
        reached.follow(mapping)
        reached.meet(driver)
        for there in growth:
            reached.extend(mapping, there)
        assert reached.registered(mapping) == max(growth)
        parts = reached.within(driver, mapping[start : start + size])
        assert (parts is None) == (start + size > max(growth))
        for part in parts or ():
            assert driver.ranges_of(part) == [True]
        if parts is not None:
            assert sum(part.size for part in parts) == size
            mapping[start : start + size] = np.arange(size, dtype=np.uint8)
            assert (np.concatenate(parts) == np.arange(size, dtype=np.uint8)).all()
        assert reached.within(driver, np.zeros(1, np.uint8)) is None, "other memory is not of the mapping"
        reached.close()
        assert not driver.registered


def test_a_refusal_is_told_once_and_what_is_registered_stays_in_use(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_module, "_REGISTERED_AT_ONCE", STRIDE)
    mapping = np.zeros(9000, np.uint8)
    with FakeDriver(lockable=2500) as driver:
        reached = HostMemory()
        reached.follow(mapping)
        reached.meet(driver)
        for _ in range(3):
            reached.extend(mapping, 9000)
        assert len(caplog.records) == 1
        assert "tieredckpt doctor" in caplog.text
        assert reached.within(driver, mapping[:2000]) is not None
        assert reached.within(driver, mapping[1999:2001]) is None
        for _ in range(2):
            with reached.buffer(driver, 100) as one, reached.buffer(driver, 100) as other:
                assert one.size == other.size == BUFFER - mmap.PAGESIZE
                assert not np.shares_memory(one, other)
        assert len(caplog.records) == 2, "that there are no buffers either is told once, too"
        reached.close()


@pytest.mark.parametrize(("chunk", "ahead", "taken"), [(1, 3, 64), (16, 3, 64), (32, 2, 128), (64, 1, 128)])
def test_a_copy_thread_takes_no_more_page_locked_memory_than_its_copies_need(
    chunk: int, ahead: int, taken: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In MiB. torch has a page besides, and rounds up to a power of two."""
    asked: list[int] = []
    monkeypatch.setattr(FakeDriver, "pinned", lambda _, nbytes: (asked.append(nbytes), np.empty(nbytes, np.uint8))[1])
    with FakeDriver() as driver:
        (device,) = driver.devices
        memory = HostMemory()
        with Link[int](memory, memory.stream, chunk << 20) as link:
            while not link.is_full:
                link.copy_out(len(link), device, device.array(np.ones(9)), None, 72)
            assert len(link) == ahead
        memory.close()
    (nbytes,) = asked
    assert 1 << (nbytes + mmap.PAGESIZE - 1).bit_length() == taken << 20


def test_streams_are_used_again_and_a_failed_one_is_not() -> None:
    """CUDA has few, which a process shares with its libraries."""
    with FakeDriver() as driver:
        (device,) = driver.devices
        memory = HostMemory()
        with memory.stream(device) as first, memory.stream(device) as second:
            assert first is not second
        for _ in range(3):
            with memory.stream(device) as again:
                assert again in (first, second)
        with memory.stream(device) as one, memory.stream(device) as other:
            assert {id(one), id(other)} == {id(first), id(second)}
            fail_at(device, 0)
            one.gather_out([device.array(np.ones(10))], driver.pinned(80))
        with memory.stream(device) as one, memory.stream(device) as new:
            assert one is other
            assert new not in (first, second)
        memory.close()


def test_a_mapping_is_given_back_when_the_copies_there_have_ended() -> None:
    """A driver that loses memory which a device writes to ends the training."""
    mapping = np.zeros(8192, np.uint8)
    with FakeDriver() as driver:
        (device,) = driver.devices
        memory = HostMemory()
        memory.follow(mapping)
        memory.meet(driver)
        memory.extend(mapping, 8192)
        array = device.array(np.full(1000, 7.0))
        with Link[None](memory, memory.stream, 8192) as link, ThreadPoolExecutor(1) as pool:
            with driver.paused():
                link.copy_out(None, device, array, mapping, 8000)
                giving_back = pool.submit(memory.forget, mapping)
                assert not wait([giving_back], timeout=0.05).done
                assert driver.registered
            giving_back.result(SOON)
            assert not driver.registered
            assert (mapping[:8000].view(np.float64) == 7).all()
            link.copy_out(None, device, array, mapping, 8000)  # from now on through a buffer
            flights = [link.land(), link.land()]
            for flight in flights:
                flight.landed.wait()
            assert [flight.buffer is None for flight in flights] == [True, False]
        memory.close()


def test_doctor_says_whether_memory_is_page_locked_and_how_to_repair_it() -> None:
    with FakeDriver() as driver:
        assert "registers shared memory" in page_locking(driver).text
        assert not driver.registered
    with FakeDriver(lockable=0) as driver:
        told = page_locking(driver).text
    assert "buffers of 64 MiB" in told
    assert "ulimit -l unlimited" in told
    assert "memlock=-1" in told


def test_doctor_measures_the_speed_of_page_locking_once_the_device_has_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    """What CUDA makes of a device at the first call takes ten times as long as page-locking 64 MiB."""
    now, takes, speeds = 0.0, iter((8.0, 0.5)), list[float]()
    register = FakeDriver.register

    def beginning(self: FakeDriver, memory: Any) -> None:
        nonlocal now
        now += next(takes)
        register(self, memory)

    monkeypatch.setattr(FakeDriver, "register", beginning)
    monkeypatch.setattr(examine, "time", SimpleNamespace(perf_counter=lambda: now))
    monkeypatch.setattr(examine, "format_rate", lambda speed: str(speeds.append(speed)))
    with FakeDriver() as driver:
        page_locking(driver)
        assert not driver.registered
    assert speeds == [BUFFER / 0.5]


def test_a_slab_that_is_closed_is_registered_no_more_and_no_other_is_taken_for_it() -> None:
    with FakeDriver() as driver:
        reached = HostMemory()
        slab, other = Slab(None, 64 << 10, 64 << 10), Slab(None, 64 << 10)
        reached.follow(slab.array)
        slab.before_unmapping = reached.forget
        reached.meet(driver)
        reached.extend(slab.array, slab.reserved)
        assert driver.registered
        slab.close()
        assert not driver.registered
        reached.follow(other.array)
        reached.meet(driver)
        reached.extend(np.zeros(64 << 10, np.uint8), 64 << 10)  # of work that began when another slab was followed
        assert not driver.registered
        other.close()
