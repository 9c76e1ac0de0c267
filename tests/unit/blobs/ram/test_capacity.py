"""How large a slab is and grows, and what happens where shared memory is too small for it."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from support.insight import opened_below
from support.ram_folders import MIB, opened, read_extent, run, take_extent

from tieredckpt.blobs import mapping
from tieredckpt.blobs.base import ALIGNMENT, Survives
from tieredckpt.blobs.ram import store as ram_store
from tieredckpt.blobs.ram.store import RamStore
from tieredckpt.errors import Invalid, NoSpace, NotFound


async def test_a_capacity_that_was_asked_for_is_taken_behind_the_training(folder: Path) -> None:
    async with opened(folder, 3 * MIB) as store:
        assert store.slab.reserved == 0
        store.slab.prepare(share=1)
        assert store.slab.reserved == store.slab.capacity == store.traits.object_size == 3 * MIB
        assert (folder / store.slab_key).stat().st_blocks * 512 == 3 * MIB
        assert store.traits.survives is Survives.PROCESS
        assert not store.notice


async def test_an_automatic_capacity_is_a_part_of_memory_and_grows_with_need(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ram_store, "memory_limit", lambda: (16 * MIB, "the test"))
    async with opened(folder, None) as store:
        assert (store.slab.capacity, store.slab.reserved) == (4 * MIB, 0)
        store.slab.allocate(MIB)
        assert store.slab.reserved == MIB


def growing(folder: Path) -> Path:
    """The link that tells where the slab of a folder was growing."""
    return folder / (json.loads((folder / "slab.json").read_text())["slab"] + ".growing")


async def test_what_a_writer_asked_for_when_it_died_is_given_back(folder: Path) -> None:
    async with opened(folder, None) as store:
        offset = take_extent(store, b"chunk")
        store.slab.allocate(5 * MIB)
        there = store.slab.reserved
        for at in range(there, 32 * MIB, 8 * MIB):  # as huge pages begin
            os.posix_fallocate(store.slab.fileno(), at, ALIGNMENT)
    for _ in range(2):
        growing(folder).symlink_to(str(there))
        async with opened(folder, None) as store:
            assert store.slab.reserved == os.fstat(store.slab.fileno()).st_blocks * 512 == there
            assert bytes(store.slab.array[offset : offset + 5]) == b"chunk"
            assert not growing(folder).is_symlink(), "or what comes there would be given back"
            store.slab.reserve(there + 2 * MIB)
            assert store.slab.reserved == os.fstat(store.slab.fileno()).st_blocks * 512 == there + 2 * MIB
            there = store.slab.reserved


@pytest.mark.parametrize("said", ["nonsense", "-4096", "17", "99999999999999999999999", "/dev/null"])
async def test_a_note_of_growth_that_nobody_wrote_harms_nothing(folder: Path, said: str) -> None:
    async with opened(folder, None) as store:
        offset = take_extent(store, b"chunk")
    growing(folder).symlink_to(said)
    async with opened(folder, None) as store:
        assert bytes(store.slab.array[offset : offset + 5]) == b"chunk"
        assert store.slab.reserved == os.fstat(store.slab.fileno()).st_blocks * 512


def test_growth_is_noted_while_it_lasts(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, reserve, noted = RamStore.open(folder, None), mapping.reserve, []

    def look(*arguments: Any) -> None:
        noted.append(growing(folder).readlink().name)
        reserve(*arguments)

    monkeypatch.setattr(mapping, "reserve", look)
    for _ in range(2):
        store.slab.allocate(2 * MIB)
    assert noted == ["0", str(2 * MIB)]
    asyncio.run(store.close())


async def test_a_capacity_beyond_the_limit_is_refused_with_both_numbers(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(Invalid, match=r"a RAM tier of 1 PiB cannot fit: .* is [0-9.]+ GiB; choose a capacity below"):
        RamStore.open(folder, 1 << 50)
    monkeypatch.setattr(ram_store, "memory_limit", lambda: (2 * MIB, "the cgroup limit in /some/group/memory.max"))
    with pytest.raises(Invalid, match=r"of 3 MiB cannot fit: the cgroup limit in /some/group/memory\.max is 2 MiB"):
        RamStore.open(folder, 3 * MIB)
    assert not folder.exists()
    async with opened(folder, 2 * MIB):
        pass


async def test_where_shared_memory_is_too_small_a_memfd_takes_its_place_and_it_is_said(small_tmpfs: Path) -> None:
    async with opened(small_tmpfs / "ram", 128 * MIB) as store:
        store.slab.prepare(share=1)
        assert store.slab.reserved == 128 * MIB
        assert store.traits.survives is Survives.NOTHING
        found = f"shared memory at {small_tmpfs}/ram has 64 MiB left, 64 MiB too little for the RAM tier's 128 MiB"
        assert found in store.notice
        assert "its steps end with this process" in store.notice
        offset = take_extent(store, b"chunk")
        assert await read_extent(store, offset, 5) == b"chunk"
        reader = RamStore.attach(small_tmpfs / "ram")
        assert reader.notice
        assert await read_extent(reader, offset, 5) == b"chunk"
        await reader.close()
    async with opened(small_tmpfs / "fits", 32 * MIB) as store:
        assert not store.notice


async def test_what_other_slabs_are_still_to_take_is_not_there(small_tmpfs: Path) -> None:
    """Of several ranks that open at once, the last would find no memory at its first save."""
    async with opened(small_tmpfs / "store" / "rank-0", 40 * MIB) as first:
        async with opened(small_tmpfs / "store" / "rank-1", 40 * MIB) as second:
            assert "has 24 MiB left, 16 MiB too little for the RAM tier's 40 MiB" in second.notice
        first.slab.prepare(share=1)
        async with opened(small_tmpfs / "store" / "rank-2", 16 * MIB) as third:
            assert not third.notice
            third.slab.prepare(share=1)
            assert (first.slab.reserved, third.slab.reserved) == (40 * MIB, 16 * MIB)


async def test_ranks_that_open_at_once_do_not_count_on_the_same_room(
    small_tmpfs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One has asked how much there is, and has noted nothing yet."""
    looked, asked = os.statvfs, threading.Semaphore(0)

    def look(path: Path) -> os.statvfs_result:
        found = looked(path)
        asked.release()
        time.sleep(0.05)  # long enough for the other to look as well, if it may
        return found

    monkeypatch.setattr(ram_store.os, "statvfs", look)
    ranks = [small_tmpfs / "store" / f"rank-{rank}" for rank in range(2)]
    stores = await asyncio.gather(*(asyncio.to_thread(RamStore.open, folder, 40 * MIB) for folder in ranks))
    assert sorted(bool(store.notice) for store in stores) == [False, True]
    for store in stores:
        await store.close()


async def test_an_automatic_slab_counts_what_others_are_still_to_take(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ram_store, "memory_limit", lambda: (32 * MIB, "the test"))
    async with opened(folder.with_name("other"), 6 * MIB) as other, opened(folder, None) as store:
        assert other.slab.reserved == 0
        assert store.slab.allocate(4 * MIB) is None
        assert store.slab.allocate(2 * MIB) == 0


LIMITED = """
    import mmap, pathlib, resource, sys
    from tieredckpt.blobs.ram import store as ram

    MAP_NORESERVE, GIB = 0x4000, 1 << 30
    ram.memory_limit = lambda: (1024 * GIB, "the test")
    used = mmap.mmap(-1, 16 * GIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE)  # as CUDA does
    resource.setrlimit(resource.RLIMIT_AS, (20 * GIB, resource.getrlimit(resource.RLIMIT_AS)[1]))
    store = ram.RamStore.open(pathlib.Path(sys.argv[1]), None, sharers=8)
    print(store.slab.capacity)
    store.remove()
"""


def test_an_automatic_slab_leaves_addresses_to_a_process_whose_space_is_limited(folder: Path) -> None:
    """Each process of a machine has its own limit, so it shares that with none; what is mapped already counts."""
    done = run(LIMITED, folder)
    assert done.returncode == 0, done.stderr
    assert 256 * MIB < int(done.stdout) < 1024 * MIB


READER = """
    import pathlib, resource, sys
    from tieredckpt.blobs.ram.store import RamStore
    from tieredckpt.errors import TierUnavailable

    used = int(pathlib.Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (256 << 20), resource.getrlimit(resource.RLIMIT_AS)[1]))
    try:
        RamStore.attach(pathlib.Path(sys.argv[1]))
    except TierUnavailable as error:
        print(error)
"""


async def test_a_reader_without_addresses_for_a_slab_is_told_so(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With an error of this library, or it could read no other tier either."""
    monkeypatch.setattr(ram_store, "memory_limit", lambda: (4 << 30, "the test"))
    async with opened(folder, None):
        done = await asyncio.to_thread(run, READER, folder)
    assert done.returncode == 0, done.stderr
    assert "a slab of 1 GiB cannot be mapped: Cannot allocate memory; raise the limit on addresses" in done.stdout


async def test_other_slabs_take_none_of_a_process_s_addresses(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ram_store, "memory_limit", lambda: (32 * MIB, "the test"))
    monkeypatch.setattr(ram_store, "addresses_left", lambda: 16 * MIB)
    async with opened(folder.with_name("other"), 3 * MIB), opened(folder, None) as store:
        assert store.slab.capacity == 4 * MIB
        assert store.slab.allocate(4 * MIB) == 0


async def test_a_capacity_for_which_there_is_no_room_is_refused_when_it_is_opened(small_tmpfs: Path) -> None:
    async with opened(small_tmpfs / "ram", 16 * MIB) as store:
        take_extent(store, b"chunk")
    with pytest.raises(NoSpace, match="shared memory has no room for a slab of 128 MiB; it has"):
        RamStore.open(small_tmpfs / "ram", 128 * MIB)


async def test_what_lay_in_a_memfd_ends_with_it(small_tmpfs: Path) -> None:
    folder = small_tmpfs / "ram"
    async with opened(folder, 128 * MIB) as store:
        await store.put("steps/1/manifest.ocdbt", [b"commit"])
    with pytest.raises(NotFound, match="has lost its slab"):
        RamStore.attach(folder)
    async with opened(folder, 128 * MIB) as store:
        assert [info async for info in store.list("")] == []


async def test_another_file_is_never_taken_for_a_memfd_that_ended(small_tmpfs: Path, tmp_path: Path) -> None:
    folder = small_tmpfs / "ram"
    async with opened(folder, 128 * MIB) as store:
        number = store.slab.fileno()
    (tmp_path / "precious").write_bytes(bytes(10))
    os.truncate(tmp_path / "precious", 128 * MIB)
    descriptor = os.open(tmp_path / "precious", os.O_RDWR)
    os.dup2(descriptor, number)
    try:
        with pytest.raises(NotFound, match="it ended with its process"):
            RamStore.attach(folder)
        async with opened(folder, 128 * MIB) as store:
            take_extent(store, b"chunk")
        assert (tmp_path / "precious").read_bytes()[:10] == bytes(10)
    finally:
        os.close(number)
        if descriptor != number:
            os.close(descriptor)


FILL = """
    import os, sys, pathlib
    from tieredckpt.blobs import mapping
    from tieredckpt.blobs.ram import store as ram
    from tieredckpt.errors import NoSpace

    folder = pathlib.Path(sys.argv[1])
    ram.memory_limit = lambda: (160 << 20, "the test")
    store = ram.RamStore.open(folder / "ram", None)
    assert store.slab.capacity == 40 << 20 and not store.notice
    first = store.slab.allocate(2 << 20)
    with open(folder / "filler", "wb", buffering=0) as filler:
        try:
            while True:
                filler.write(bytes(1 << 20))
        except OSError:
            pass
"""


def test_a_slab_that_cannot_grow_is_an_error_and_never_a_sigbus(small_tmpfs: Path) -> None:
    script = (
        FILL
        + """
    try:
        store.slab.reserve(4 << 20)
    except NoSpace as error:
        print(error)
    assert store.slab.allocate(2 << 20) is None
    store.slab.array[first : first + (2 << 20)] = 1
    """
    )
    done = run(script, small_tmpfs)
    assert (done.returncode, done.stderr.splitlines()[-1:]) == (
        0,
        ["the system has no more memory for the RAM tier's slab: it stays at 2 MiB instead of 40 MiB"],
    )
    assert "shared memory has no room for a slab of 4 MiB; it has 2 MiB already" in done.stdout


def test_without_its_reservation_it_would_be_a_sigbus(small_tmpfs: Path) -> None:
    assert run(FILL + "    store.slab.array[4 << 20] = 1", small_tmpfs).returncode == -signal.SIGBUS


@pytest.mark.parametrize("capacity", [8 * MIB, None], ids=["fixed", "automatic"])
async def test_what_lies_in_a_slab_is_found_though_others_have_filled_its_file_system(
    small_tmpfs: Path, monkeypatch: pytest.MonkeyPatch, capacity: int | None
) -> None:
    monkeypatch.setattr(ram_store, "memory_limit", lambda: (32 * MIB, "the test"))
    async with opened(small_tmpfs / "ram", capacity) as store:
        take_extent(store, b"chunk")
        store.slab.prepare(share=1)
    with (small_tmpfs / "filler").open("wb", buffering=0) as filler, suppress(OSError):
        while filler.write(bytes(4096)):
            pass
    async with opened(small_tmpfs / "ram", capacity) as store:
        assert await read_extent(store, 0, 5) == b"chunk"


async def test_a_file_system_that_is_full_refuses_to_open(small_tmpfs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ram_store, "memory_limit", lambda: (160 * MIB, "the test"))
    async with opened(small_tmpfs / "ram", None) as store:
        take_extent(store, b"chunk")
    (small_tmpfs / "filler").write_bytes(bytes(60 * MIB))
    with pytest.raises(NoSpace, match="shared memory has no room for a slab of 40 MiB; it has 4 KiB already"):
        RamStore.open(small_tmpfs / "ram", 40 * MIB)
    (small_tmpfs / "filler").unlink()
    async with opened(small_tmpfs / "ram", 40 * MIB) as store:
        assert await read_extent(store, 0, 5) == b"chunk", "a refused open changes nothing"
    assert not opened_below(small_tmpfs), "and holds nothing"
