"""A RAM tier's folder is ours alone, outlives the process if it can, and is never taken for what it is not."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import json
import os
import signal
import stat
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from support.insight import mapped_below, opened_below

from tieredckpt.blobs import mapping
from tieredckpt.blobs.base import ALIGNMENT, Survives
from tieredckpt.blobs.ram import store as ram_store
from tieredckpt.blobs.ram.folder import SHARED_MEMORY_VARIABLE, shared_memory_root
from tieredckpt.blobs.ram.store import RamStore
from tieredckpt.errors import Conflict, Invalid, NoSpace, NotFound, TierUnavailable

MIB = 1 << 20
as_root = pytest.mark.skipif(os.getuid() != 0, reason="only root may give files away")


@pytest.fixture
def folder(shared_memory: Path) -> Path:
    return shared_memory / "ram"


@asynccontextmanager
async def opened(folder: Path, capacity: int | None = MIB) -> AsyncIterator[RamStore]:
    store = RamStore.open(folder, capacity)
    try:
        yield store
    finally:
        await store.close()


def take_extent(store: RamStore, content: bytes) -> int:
    offset = store.slab.allocate(len(content))
    assert offset is not None
    store.slab.array[offset : offset + len(content)] = list(content)
    return offset


async def read_extent(store: RamStore, offset: int, nbytes: int) -> bytes:
    into = bytearray(nbytes)
    await store.get_into(store.slab_key, offset, memoryview(into))
    return bytes(into)


def run(script: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", textwrap.dedent(script), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


# -- what it makes ----------------------------------------------------------------------------------------


async def test_what_it_makes_is_closed_to_others(folder: Path) -> None:
    async with opened(folder) as store:
        await store.put("steps/1/btree", [b"index"])
        for path in (folder, *folder.rglob("*")):
            assert not stat.S_IMODE(path.stat().st_mode) & 0o077, path


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


# -- whose it is ------------------------------------------------------------------------------------------


async def test_one_store_at_a_time_writes_and_the_other_is_told_who(folder: Path) -> None:
    async with opened(folder):
        with pytest.raises(Conflict, match=f"in use by process {os.getpid()} on "):
            RamStore.open(folder, MIB)
    async with opened(folder):
        pass


async def test_the_lock_of_a_killed_process_is_free(folder: Path) -> None:
    script = """
        import os, signal, sys, pathlib
        from tieredckpt.blobs.ram.store import RamStore
        RamStore.open(pathlib.Path(sys.argv[1]), 1 << 20)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    assert run(script, folder).returncode == -signal.SIGKILL
    async with opened(folder):
        pass


async def test_a_symbolic_link_is_not_followed(shared_memory: Path) -> None:
    (shared_memory / "elsewhere").mkdir()
    (shared_memory / "link").symlink_to("elsewhere")
    (shared_memory / "nowhere").symlink_to("missing")
    for name in ("link", "nowhere"):
        with pytest.raises(Conflict, match=f"{name} is not a folder of user {os.getuid()}; remove it"):
            RamStore.open(shared_memory / name, MIB)
    assert not list((shared_memory / "elsewhere").iterdir())


async def test_a_file_in_the_folders_place_is_refused(shared_memory: Path) -> None:
    (shared_memory / "file").write_text("")
    with pytest.raises(Conflict, match="file is not a folder of user"):
        RamStore.open(shared_memory / "file", MIB)


@as_root
async def test_somebody_elses_folder_is_refused(folder: Path) -> None:
    folder.mkdir()
    os.chown(folder, 12345, 12345)
    with pytest.raises(Conflict, match="is not a folder of user 0"):
        RamStore.open(folder, MIB)
    assert not list(folder.iterdir())


@as_root
async def test_a_root_of_all_tiers_that_is_somebody_elses_is_refused(
    shared_memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = shared_memory / "tieredckpt-0"
    root.mkdir()
    os.chown(root, 12345, 12345)
    monkeypatch.setenv(SHARED_MEMORY_VARIABLE, str(root))
    with pytest.raises(Conflict, match="tieredckpt-0 is not a folder of user 0"):
        RamStore.open(root / "name", MIB)


@as_root
async def test_nobody_but_root_reads_somebody_elses_folder(folder: Path) -> None:
    script = """
        import os, sys, pathlib
        from tieredckpt.blobs.ram.store import RamStore
        from tieredckpt.errors import Conflict
        os.setuid(12345)
        try:
            RamStore.attach(pathlib.Path(sys.argv[1]))
        except Conflict as error:
            print(error)
    """
    async with opened(folder):
        RamStore.attach(folder).slab.close()
        folder.parent.chmod(0o755)
        folder.chmod(0o777)
        for path in folder.rglob("*"):
            path.chmod(0o777)
        done = run(script, folder)
    assert "is not a folder of user 12345" in done.stdout, done.stderr


async def test_a_folder_that_was_open_to_others_is_closed(folder: Path) -> None:
    folder.mkdir(mode=0o777)
    folder.chmod(0o777)
    async with opened(folder):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700


async def test_the_folder_above_is_left_as_it_is(shared_memory: Path) -> None:
    shared_memory.chmod(0o755)
    async with opened(shared_memory / "ram") as store:
        store.remove()
    assert stat.S_IMODE(shared_memory.stat().st_mode) == 0o755
    (shared_memory / "made").mkdir()
    async with opened(shared_memory / "made" / "ram") as store:
        store.remove()
    assert [path.name for path in shared_memory.iterdir()] == ["made"]


async def test_a_folder_that_cannot_be_made_is_an_unavailable_tier(shared_memory: Path) -> None:
    (shared_memory / "file").write_text("")
    with pytest.raises(TierUnavailable, match="file/ram cannot be opened: File exists; choose another path"):
        RamStore.open(shared_memory / "file" / "ram", MIB)


# -- what outlives ----------------------------------------------------------------------------------------


async def test_what_was_put_and_what_lies_in_the_slab_is_there_when_it_is_opened_again(folder: Path) -> None:
    async with opened(folder) as store:
        await store.put("steps/1/manifest.ocdbt", [b"commit"])
        offset = take_extent(store, b"chunk")
        key = store.slab_key
    async with opened(folder) as store:
        assert store.slab_key == key
        assert await store.get("steps/1/manifest.ocdbt", limit=100) == b"commit"
        assert await read_extent(store, offset, 5) == b"chunk"
        assert store.slab.used == 0, "who owns an extent is found out from the steps"
        assert store.slab.claim(offset, 5)


async def test_a_slab_grows_to_a_larger_capacity_and_keeps_what_it_holds(folder: Path) -> None:
    async with opened(folder, MIB) as store:
        offset = take_extent(store, b"chunk")
    async with opened(folder, 3 * MIB) as store:
        store.slab.prepare(share=1)
        assert store.slab.reserved == store.slab.capacity == 3 * MIB
        assert await read_extent(store, offset, 5) == b"chunk"
    async with opened(folder, MIB) as store:
        assert store.slab.capacity == 3 * MIB, "its steps may lie anywhere in it"


def of_another_boot(folder: Path, key: str) -> None:
    note = json.loads((folder / "slab.json").read_text())
    (folder / "slab.json").write_text(json.dumps(note | {"boot_id": "another"}))


def shortened(folder: Path, key: str) -> None:
    os.truncate(folder / key, 4096)


def without_its_slab(folder: Path, key: str) -> None:
    (folder / key).unlink()


def with_a_link_for_a_slab(folder: Path, key: str) -> None:
    (folder / key).rename(folder / "moved")
    (folder / key).symlink_to(folder / "moved")


def with_note(text: str) -> Callable[[Path, str], None]:
    def write(folder: Path, key: str) -> None:
        (folder / "slab.json").write_text(text)

    return write


@pytest.mark.parametrize(
    "become",
    [
        of_another_boot,
        shortened,
        without_its_slab,
        with_a_link_for_a_slab,
        with_note(""),
        with_note("[]"),
        with_note("{" * 100_000),
        with_note('{"slab": "../../x", "capacity": 4096, "boot_id": "x"}'),
    ],
    ids=["another boot", "shortened", "no slab", "a link", "no note", "no object", "too deep", "another slab"],
)
async def test_a_folder_that_is_stale_is_emptied(folder: Path, become: Callable[[Path, str], None]) -> None:
    async with opened(folder) as store:
        await store.put("steps/1/manifest.ocdbt", [b"commit"])
        key = store.slab_key
    become(folder, key)
    if become is not with_a_link_for_a_slab:  # which leads a reader to the slab all the same
        with pytest.raises(NotFound, match=r"there is no RAM tier|has lost its slab"):
            RamStore.attach(folder)
    async with opened(folder) as store:
        assert [info async for info in store.list("steps/")] == []
        assert store.slab_key != key
        assert (await read_extent(store, 0, 100)) == bytes(100)


async def test_what_a_killed_writer_left_unfinished_is_swept(folder: Path) -> None:
    async with opened(folder) as store:
        await store.put("steps/1/btree", [b"x"])
        left = folder / "steps" / "1" / f".{'0' * 32}.tmp~"
        left.write_bytes(bytes(1000))
    async with opened(folder):
        assert not left.exists()
        assert (folder / "steps/1/btree").exists()


async def test_removed_it_is_gone_and_opened_again_it_is_empty(folder: Path) -> None:
    async with opened(folder) as store:
        await store.put("steps/1/btree", [b"x"])
        store.remove()
        assert not folder.exists()
    async with opened(folder) as store:
        assert [info async for info in store.list("")] == []


async def test_nobody_gets_a_folder_that_is_being_removed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    unlink, refused = Path.unlink, []

    def try_first(path: Path, **arguments: bool) -> None:
        with pytest.raises(Conflict):
            RamStore.open(folder, MIB)
        refused.append(path.name)
        unlink(path, **arguments)

    async with opened(folder) as store:
        for name in ("a", "m", "z"):
            await store.put(name, [b"x"])
        monkeypatch.setattr(Path, "unlink", try_first)
        store.remove()
        monkeypatch.undo()
    assert sorted(refused) == ["a", "lock", "m", "slab.json", "z"]


async def test_who_waits_for_the_lock_of_a_folder_that_is_removed_gets_a_new_one(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = RamStore.open(folder, MIB)
    flock, calls = fcntl.flock, []

    def removed_first(fd: int, operation: int) -> None:
        calls.append(operation)
        if len(calls) == 1:
            before.remove()
            os.close(before._lock)
            before._lock = -1
        flock(fd, operation)

    monkeypatch.setattr(ram_store.fcntl, "flock", removed_first)
    async with opened(folder) as store:
        await store.put("a", [b"x"])
        assert (folder / "a").exists()
        with pytest.raises(Conflict):
            RamStore.open(folder, MIB)
    await before.close()


# -- beside the writer ------------------------------------------------------------------------------------


async def test_a_reader_sees_what_the_writer_puts_and_hinders_nobody(folder: Path) -> None:
    with pytest.raises(NotFound, match="there is no RAM tier at"):
        RamStore.attach(folder)
    async with opened(folder) as store:
        reader = RamStore.attach(folder)
        offset = take_extent(store, b"chunk")
        await store.put("steps/1/manifest.ocdbt", [b"commit"])
        assert await reader.get("steps/1/manifest.ocdbt", limit=100) == b"commit"
        assert bytes(reader.slab.array[offset : offset + 5]) == await read_extent(reader, offset, 5) == b"chunk"
        with pytest.raises(ValueError, match="read-only"):
            reader.slab.array[offset] = 0
        await reader.close()
        with pytest.raises(Conflict):
            RamStore.open(folder, MIB)


async def test_what_is_read_is_not_given_back_before_the_last_reader_has_gone(folder: Path) -> None:
    async with opened(folder) as store:
        for name in ("unread", "read"):
            await store.put(name, [b"x"])
        readers = [store.share("read"), store.share("read")]
        assert store.retire("unread")()
        unread = store.retire("read")
        assert not unread()
        with pytest.raises(NotFound, match="read does not exist"):
            store.share("read")
        os.close(readers.pop())
        assert not unread()
        os.close(readers.pop())
        assert unread()
        assert unread()
        assert store.retire("never there")()


async def test_a_reader_that_comes_between_removal_and_lock_is_turned_away(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(folder) as store:
        await store.put("step", [b"x"])
        flock, retired = fcntl.flock, []

        def retired_first(fd: int, operation: int) -> None:
            if operation == fcntl.LOCK_SH and not retired:
                retired.append(store.retire("step")())
            flock(fd, operation)

        monkeypatch.setattr(ram_store.fcntl, "flock", retired_first)
        with pytest.raises(NotFound, match="step is gone"):
            store.share("step")
        assert retired == [True], "for the writer nobody was reading"


async def test_no_descriptor_stays_open(folder: Path) -> None:
    before = os.listdir("/proc/self/fd")
    async with opened(folder) as store:
        await store.put("step", [b"x"])
        reader = store.share("step")
        unread = store.retire("step")
        assert not unread()
    os.close(reader)
    assert os.listdir("/proc/self/fd") == before


# -- shared memory that is too small ----------------------------------------------------------------------


async def test_where_shared_memory_is_too_small_a_memfd_takes_its_place_and_it_is_said(small_tmpfs: Path) -> None:
    async with opened(small_tmpfs / "ram", 128 * MIB) as store:
        store.slab.prepare(share=1)
        assert store.slab.reserved == 128 * MIB
        assert store.traits.survives is Survives.NOTHING
        found = f"shared memory at {small_tmpfs}/ram has 64 MiB left, too little for the RAM tier's 128 MiB"
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
            assert "too little for the RAM tier's 40 MiB" in second.notice
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


def test_the_environment_names_the_folder_of_ram_tiers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SHARED_MEMORY_VARIABLE, str(tmp_path))
    assert shared_memory_root() == tmp_path
    monkeypatch.delenv(SHARED_MEMORY_VARIABLE)
    assert shared_memory_root().name == f"tieredckpt-{os.getuid()}"


async def test_a_store_that_is_closed_twice_is_closed(folder: Path) -> None:
    async with opened(folder) as store:
        await asyncio.gather(store.close(), store.close())


async def test_a_close_that_is_cancelled_closes_none_the_less(folder: Path) -> None:
    store = RamStore.open(folder, MIB)
    go_on = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        asyncio.get_running_loop().set_default_executor(pool)
        pool.submit(go_on.wait)  # so that no thread is free when the slab is to be closed
        closing = asyncio.create_task(store.close())
        while not pool._work_queue.qsize():
            await asyncio.sleep(0.001)
        closing.cancel()
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await closing
    assert not opened_below(folder)
    assert not mapped_below(folder)


@pytest.mark.parametrize("how", ["to write", "to read"])
async def test_what_fails_while_a_folder_is_opened_leaves_nothing_open(
    how: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(folder):
        pass

    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, "no space, by script")

    by_name, open_it = {
        "to write": ("write_note", lambda: RamStore.open(folder, MIB)),
        "to read": ("_notice", lambda: RamStore.attach(folder)),
    }[how]
    with monkeypatch.context() as patch:
        patch.setattr(ram_store, by_name, fail)
        with pytest.raises((NoSpace, NotFound), match="no space, by script") as kept:
            open_it()
    assert not opened_below(folder), kept
    assert not mapped_below(folder)
    async with opened(folder):
        pass
