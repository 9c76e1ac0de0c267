"""Listing a posix store: all that is there, folder by folder, several at a time where the file system is slow."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import itertools
import os
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tieredckpt.blobs.posix import paths
from tieredckpt.blobs.posix import store as posix_store
from tieredckpt.blobs.posix.paths import Folders, Scanned
from tieredckpt.blobs.posix.shared import SharedFolders
from tieredckpt.blobs.posix.store import PosixStore
from tieredckpt.concurrency import together
from tieredckpt.errors import Closed, TierUnavailable
from tieredckpt.testing.backdoor import listed


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[PosixStore]:
    store = await asyncio.to_thread(PosixStore, tmp_path)
    yield store
    await store.close()


@pytest.fixture
async def keys(store: PosixStore) -> dict[str, int]:
    keys = ["top", *(f"{a}/{b}/{name}" for a in "abcdef" for b in "gh" for name in ("one", "two"))]
    for key in keys:
        await store.put(key, [key.encode()])
    return {key: len(key) for key in keys}


class Scans:
    """The threads that list folders, one folder in each turn."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.under_way = 0
        self.at_once: list[int] = []
        """Of each round, how many began it."""
        self.share = 0.01
        """Of the time, what each works; it waits for the rest."""
        self.meet: Callable[[str], object] = lambda _: None
        """Called with the name of each folder, on its thread."""
        self._guards_count = threading.Lock()
        self._scandir, self._scan = os.scandir, Folders.scan
        monkeypatch.setattr(paths, "_SCAN_SECONDS", 0.0)
        monkeypatch.setattr(os, "scandir", self._list)
        monkeypatch.setattr(Folders, "scan", self._counted())
        monkeypatch.setattr(posix_store, "together", self._round)

    def _list(self, path: str) -> Any:
        self.meet(Path(path).name)
        return self._scandir(path)

    def _counted(self) -> Callable[..., Scanned]:
        def scan(*arguments: Any) -> Scanned:
            with self._guards_count:
                self.under_way += 1
            try:
                return Scanned(self._scan(*arguments).infos, took=1.0, worked=self.share)
            finally:
                with self._guards_count:
                    self.under_way -= 1

        return scan

    async def _round(self, works: Sequence[Coroutine[Any, Any, None]]) -> None:
        self.at_once.append(len(works))
        await together(works)


@pytest.fixture
def scans(keys: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> Scans:
    return Scans(monkeypatch)


@pytest.mark.parametrize("seconds", [0.0, 60.0])
async def test_folders_are_listed_side_by_side_where_the_file_system_lets_each_wait(
    store: PosixStore, keys: dict[str, int], scans: Scans, seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With time enough each thread goes on with folders that others have found."""
    side_by_side = threading.Barrier(6)

    def meet(name: str) -> None:
        if name in "abcdef":
            side_by_side.wait(30)
            monkeypatch.setattr(paths, "_SCAN_SECONDS", seconds)

    scans.meet = meet
    assert await listed(store) == keys


@pytest.mark.parametrize(("share", "threads"), [(1.0, 1), (0.6, 1), (0.4, 2), (0.2, 4), (0.1, 8), (0.0, 8)])
async def test_so_many_threads_list_them_as_one_processor_can_keep_busy(
    store: PosixStore, scans: Scans, share: float, threads: int
) -> None:
    for number in range(20):
        await store.put(f"many/{number}/key", [b"x"])
    scans.share = share
    assert len(await listed(store, "many/")) == 20
    assert scans.at_once[:3] == [1, threads, threads]


async def test_one_thread_goes_on_when_there_is_no_waiting_any_more(
    store: PosixStore, keys: dict[str, int], scans: Scans
) -> None:
    listing = store.list("")
    found = [await anext(listing)]
    scans.share = 1.0
    found += [info async for info in listing]
    assert {info.key: info.size for info in found} == keys
    assert scans.at_once[:2] == [1, 6]
    assert scans.at_once[-1] == 1


async def test_one_failure_ends_the_listing_at_once(store: PosixStore, scans: Scans) -> None:
    side_by_side, go_on = threading.Barrier(7), threading.Event()

    def meet(name: str) -> None:
        if name in "abcdef":
            side_by_side.wait(30)
            if name == "c":
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            go_on.wait(30)

    scans.meet = meet
    listing = asyncio.ensure_future(listed(store))
    await asyncio.to_thread(side_by_side.wait, 30)
    with pytest.raises(TierUnavailable, match="was not listed"):
        await listing
    assert store.hanging == scans.under_way == 5
    go_on.set()
    await until_none_hangs(store)


async def test_a_cancelled_listing_ends_at_once_and_its_threads_after_their_folders(
    store: PosixStore, scans: Scans
) -> None:
    side_by_side, go_on = threading.Barrier(7), threading.Event()
    scans.meet = lambda name: name in "abcdef" and (side_by_side.wait(30), go_on.wait(30))
    listing = asyncio.ensure_future(listed(store))
    await asyncio.to_thread(side_by_side.wait, 30)
    listing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await listing
    assert store.hanging == scans.under_way == 6
    go_on.set()
    await until_none_hangs(store)


async def test_a_name_that_the_system_lists_twice_is_listed_once(
    tmp_path: Path, keys: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As JuiceFS, a FUSE, does with one that is replaced meanwhile."""
    store = await asyncio.to_thread(PosixStore, tmp_path, folders=SharedFolders)
    real = os.scandir

    @contextlib.contextmanager
    def twice(path: str) -> Iterator[Iterator[os.DirEntry[str]]]:
        with real(path) as entries, real(path) as again:
            yield itertools.chain(entries, again)

    monkeypatch.setattr(os, "scandir", twice)
    assert await listed(store) == keys
    await store.close()


async def test_a_listing_says_that_its_store_was_closed_between_two_folders(store: PosixStore, scans: Scans) -> None:
    listing = store.list("")
    await anext(listing)
    await store.close()
    with pytest.raises(Closed):
        await anext(listing)
    assert scans.under_way == 0


async def test_a_listing_says_that_its_store_was_closed_while_threads_were_at_work(
    store: PosixStore, scans: Scans
) -> None:
    side_by_side, go_on = threading.Barrier(7), threading.Event()
    scans.meet = lambda name: name in "abcdef" and (side_by_side.wait(30), go_on.wait(30))
    listing = asyncio.ensure_future(listed(store))
    await asyncio.to_thread(side_by_side.wait, 30)
    await store.close()
    go_on.set()
    with pytest.raises(Closed):
        await listing
    assert scans.under_way == 0


async def until_none_hangs(store: PosixStore) -> None:
    async with asyncio.timeout(30):
        while store.hanging:
            await asyncio.sleep(0.001)
