"""Listing a posix store: all that is there, folder by folder, several at a time where the file system is slow."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from tieredckpt.blobs import folders
from tieredckpt.blobs.folders import Folders, Scanned
from tieredckpt.blobs.posix import PosixStore
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
        """Of each turn, how many were under way when it began."""
        self.working = False
        """All their time is the processor's; else they wait."""
        self.meet: Callable[[str], object] = lambda _: None
        """Called with the name of each folder, on its thread."""
        self._guards_count = threading.Lock()
        self._scandir, self._scan, self._thread_time = os.scandir, Folders.scan, time.thread_time
        monkeypatch.setattr(folders, "_SCAN_SECONDS", 0.0)
        monkeypatch.setattr(os, "scandir", self._list)
        monkeypatch.setattr(Folders, "scan", self._counted())
        monkeypatch.setattr(time, "thread_time", lambda: time.monotonic() if self.working else self._thread_time())

    def _list(self, path: str) -> Any:
        self.meet(Path(path).name)
        time.sleep(0.005)
        return self._scandir(path)

    def _counted(self) -> Callable[..., Scanned]:
        def scan(*arguments: Any) -> Scanned:
            with self._guards_count:
                self.under_way += 1
                self.at_once.append(self.under_way)
            try:
                return self._scan(*arguments)
            finally:
                with self._guards_count:
                    self.under_way -= 1

        return scan


@pytest.fixture
def scans(keys: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> Scans:
    return Scans(monkeypatch)


async def test_folders_are_listed_side_by_side_where_the_file_system_lets_each_wait(
    store: PosixStore, keys: dict[str, int], scans: Scans
) -> None:
    together = threading.Barrier(6)
    scans.meet = lambda name: name in "abcdef" and together.wait(30)
    assert await listed(store) == keys


async def test_one_thread_lists_them_where_it_waits_for_nothing(
    store: PosixStore, keys: dict[str, int], scans: Scans
) -> None:
    scans.working = True
    assert await listed(store) == keys
    assert max(scans.at_once) == 1


async def test_one_thread_goes_on_when_there_is_no_waiting_any_more(
    store: PosixStore, keys: dict[str, int], scans: Scans
) -> None:
    listing = store.list("")
    found = [await anext(listing)]
    scans.working = True
    found += [info async for info in listing]
    assert {info.key: info.size for info in found} == keys
    assert max(scans.at_once[1:7]) > 1
    assert max(scans.at_once[7:]) == 1


async def test_one_failure_ends_the_listing_when_no_thread_is_at_work_any_more(store: PosixStore, scans: Scans) -> None:
    def fail(name: str) -> None:
        if name == "c":
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    scans.meet = fail
    with pytest.raises(TierUnavailable, match="was not listed"):
        await listed(store)
    assert max(scans.at_once) > 1
    assert scans.under_way == 0


async def test_a_cancelled_listing_ends_when_no_thread_is_at_work_any_more(store: PosixStore, scans: Scans) -> None:
    together, go_on = threading.Barrier(7), threading.Event()
    scans.meet = lambda name: name in "abcdef" and (together.wait(30), go_on.wait(30))
    listing = asyncio.ensure_future(listed(store))
    await asyncio.to_thread(together.wait, 30)
    listing.cancel()
    for _ in range(100):
        await asyncio.sleep(0)
    assert not listing.done()
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await listing
    assert scans.under_way == 0


@pytest.mark.parametrize("working", [True, False])
async def test_a_listing_of_a_store_that_is_closed_meanwhile_says_so(
    store: PosixStore, scans: Scans, working: bool
) -> None:
    scans.working = working
    listing = store.list("")
    await anext(listing)
    await store.close()
    with pytest.raises(Closed):
        async for _ in listing:
            pass
    assert scans.under_way == 0


async def test_a_listing_that_is_given_up_leaves_no_thread_at_work(store: PosixStore, scans: Scans) -> None:
    listing = store.list("")
    async for _ in listing:
        if len(scans.at_once) > 1:
            break
    await listing.aclose()
    assert scans.under_way == 0
