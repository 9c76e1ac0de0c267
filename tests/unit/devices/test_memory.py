"""Host memory that devices reach: registered range by range, buffers elsewhere, and what `doctor` says of it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tieredckpt.blobs.ram.slab import Slab
from tieredckpt.devices import memory as memory_module
from tieredckpt.devices.examine import page_locking
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
                assert one.size == other.size == BUFFER
                assert not np.shares_memory(one, other)
        assert len(caplog.records) == 2, "that there are no buffers either is told once, too"
        reached.close()


def test_doctor_says_whether_memory_is_page_locked_and_how_to_repair_it() -> None:
    with FakeDriver() as driver:
        assert "registers shared memory" in page_locking(driver).text
        assert not driver.registered
    with FakeDriver(lockable=0) as driver:
        told = page_locking(driver).text
    assert "buffers of 64 MiB" in told
    assert "ulimit -l unlimited" in told
    assert "memlock=-1" in told


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
