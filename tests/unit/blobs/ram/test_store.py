"""A RAM tier outlives the process if it can, is never taken for what it is not, and has readers beside its writer."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import json
import os
import shutil
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from support.insight import mapped_below, opened_below
from support.limits import descriptors_left
from support.ram_folders import MIB, opened, read_extent, take_extent

from tieredckpt.blobs import boot
from tieredckpt.blobs.ram import slab_meta
from tieredckpt.blobs.ram import store as ram_store
from tieredckpt.blobs.ram.store import RamStore
from tieredckpt.errors import Conflict, NoSpace, NotFound, TierUnavailable

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


def with_a_slab_outside(folder: Path, key: str) -> None:
    note = json.loads((folder / "slab.json").read_text())
    (folder / key).rename(folder.parent / "outside")
    (folder / "slab.json").write_text(json.dumps(note | {"slab": "../outside"}))


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
        with_a_slab_outside,
    ],
    ids=["another boot", "shortened", "no slab", "a link", "no note", "no object", "too deep", "outside"],
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


@pytest.mark.parametrize("read", [slab_meta.read_json, slab_meta.boot_id])
async def test_a_folder_is_not_taken_for_a_stale_one_at_a_moment_when_no_file_can_be_opened(
    folder: Path, monkeypatch: pytest.MonkeyPatch, read: Callable[..., Any]
) -> None:
    async with opened(folder) as store:
        await store.put("steps/1/manifest.ocdbt", [b"commit"])

    def short_of_descriptors(*what: Any, **options: Any) -> Any:
        boot.boot_id.cache_clear()
        with descriptors_left(0):
            return read(*what, **options)

    with monkeypatch.context() as patched:
        patched.setattr(slab_meta, read.__name__, short_of_descriptors)
        with pytest.raises(TierUnavailable, match="Too many open files"):
            RamStore.open(folder, MIB)
    async with opened(folder) as store:
        assert await store.get("steps/1/manifest.ocdbt", limit=100) == b"commit"


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


async def test_who_attaches_while_the_writer_removes_the_folder_makes_none(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor those above it: a trainer's agent left them behind."""
    files = ram_store._files

    def late(*arguments: Any, **how: Any) -> Any:
        shutil.rmtree(folder)
        return files(*arguments, **how)

    async with opened(folder / "own"):
        monkeypatch.setattr(ram_store, "_files", late)
        with pytest.raises(NotFound, match="has just gone"):
            RamStore.attach(folder / "own")
        assert not folder.exists()


def no_inode(*_: object, **__: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


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


async def test_where_there_is_room_for_no_file_what_nobody_reads_goes(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(folder) as store:
        for name in ("unread", "read"):
            await store.put(name, [b"x"])
        monkeypatch.setattr(Path, "mkdir", no_inode)
        assert store.retire("unread")()
        reader = store.share("read")
        with pytest.raises(NoSpace, match="read was not evicted: No space left"):
            store.retire("read")
        os.close(reader)
        assert store.retire("read")()


async def test_what_is_no_file_among_the_evicted_is_left_alone(folder: Path) -> None:
    async with opened(folder) as store:
        await store.put("step", [b"x"])
    for name in ("strange.btree", "strange"):
        (folder / "retired" / name).mkdir(parents=True)
        async with opened(folder) as store:
            assert store.still_read() == []
        assert (folder / "retired" / name).is_dir()


async def test_a_reader_that_comes_between_removal_and_lock_is_turned_away(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(folder) as store:
        await store.put("step", [b"x"])
        flock = fcntl.flock
        retired: list[bool] = []

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


# -- opening and closing ----------------------------------------------------------------------------------


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
