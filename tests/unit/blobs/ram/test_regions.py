"""Memory that another process can map is found by its address, and forgotten before its file is closed."""

from __future__ import annotations

import ctypes
import mmap
import os
import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tieredckpt.blobs.base import ALIGNMENT
from tieredckpt.blobs.ram.regions import locate, register
from tieredckpt.blobs.ram.slab import Slab

PAGES = 16


def slab() -> Slab:
    fd = os.memfd_create("tieredckpt-test")
    os.ftruncate(fd, PAGES * ALIGNMENT)
    return Slab(fd, PAGES * ALIGNMENT)


@given(offset=st.integers(0, PAGES * ALIGNMENT - 1), data=st.data())
def test_every_view_of_a_slab_is_found_where_it_is(offset: int, data: st.DataObject) -> None:
    nbytes = data.draw(st.integers(1, PAGES * ALIGNMENT - offset))
    slabs = [slab() for _ in range(5)]
    try:
        for one in slabs:
            view = memoryview(one.array)[offset : offset + nbytes]
            for memory in (view, view.toreadonly()):
                assert locate(memory) == (one.region, offset)
    finally:
        del view, memory
        for one in slabs:
            one.close()


def test_other_memory_is_not_found() -> None:
    one = slab()
    for memory in (b"bytes", bytearray(8), memoryview(mmap.mmap(-1, ALIGNMENT)), memoryview(one.array)[:0]):
        assert locate(memory) is None
    one.close()


def test_memory_that_only_begins_in_a_region_is_not_found() -> None:
    whole = np.frombuffer(mmap.mmap(-1, 2 * ALIGNMENT), dtype=np.uint8)
    region = register(whole.ctypes.data, ALIGNMENT, 0, writable=True)
    assert locate(whole[:ALIGNMENT].data) == (region, 0)
    assert locate(whole.data) is None
    assert locate(whole[ALIGNMENT:].data) is None
    region.close()


def test_a_closed_slab_is_forgotten_while_its_views_live() -> None:
    one = slab()
    view = memoryview(one.array)[:100]
    found = locate(view)
    assert found is not None
    one.close()
    assert locate(view) is None
    assert found[0].duplicate() is None


def test_a_slab_that_nobody_closed_is_not_taken_for_what_lies_at_its_addresses() -> None:
    one = slab()
    region, address = one.region, one.array.ctypes.data
    with pytest.warns(ResourceWarning, match="a slab of 64 KiB was never closed"):
        del one
    assert region.duplicate() is None
    libc = ctypes.CDLL(None)
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_int64]
    libc.mmap.restype = ctypes.c_void_p
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    fixed_where_nothing_is, size = 0x100000, PAGES * ALIGNMENT
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | fixed_where_nothing_is
    ours = libc.mmap(address, size, mmap.PROT_READ, flags, -1, 0) == address  # else other memory has come there already
    try:
        assert locate(memoryview((ctypes.c_uint8 * size).from_address(address)).cast("B")) is None
    finally:
        if ours:
            libc.munmap(address, size)


def test_a_descriptor_is_one_of_the_file_of_the_slab() -> None:
    one = slab()
    one.array[:3] = (1, 2, 3)
    fd = one.region.duplicate()
    assert fd is not None
    one.close()
    assert os.pread(fd, 3, 0) == b"\1\2\3"
    os.close(fd)


def test_a_descriptor_of_a_region_that_closes_meanwhile_is_right_or_none() -> None:
    wrong: list[os.stat_result] = []

    def duplicate(one: Slab, inode: int) -> None:
        while (fd := one.region.duplicate()) is not None:
            if os.fstat(fd).st_ino != inode:
                wrong.append(os.fstat(fd))
            os.close(fd)

    for _ in range(50):
        one = slab()
        thread = threading.Thread(target=duplicate, args=(one, os.fstat(one.fileno()).st_ino))
        thread.start()
        one.close()
        # Whoever opens a file next gets the number of the slab's.
        other = os.memfd_create("tieredckpt-other")
        thread.join()
        os.close(other)
    assert not wrong


@pytest.mark.parametrize("count", [1, 200])
def test_regions_come_and_go_in_any_order(count: int) -> None:
    slabs = [slab() for _ in range(count)]
    for one in slabs[::2]:
        one.close()
    for number, one in enumerate(slabs):
        if number % 2:
            assert locate(memoryview(one.array)) == (one.region, 0)
    for one in slabs:
        one.close()
