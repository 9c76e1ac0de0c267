"""Listing a posix store: all that is there, folder by folder, several at a time where the file system is slow."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
import time
from collections.abc import AsyncIterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tieredckpt.blobs import folders
from tieredckpt.blobs.posix import PosixStore
from tieredckpt.errors import TierUnavailable
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
    """In place of `os.scandir`: notes how many folders are being listed at a time, and lets each take a while."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.under_way = self.most = 0
        self.meet: threading.Barrier | None = None
        self.fails = ""
        self._guards_count = threading.Lock()
        self._real = os.scandir
        monkeypatch.setattr(os, "scandir", self)
        monkeypatch.setattr(folders, "_SCAN_SECONDS", 0.0)  # each thread takes one folder at a time

    @contextmanager
    def _counted(self) -> Any:
        with self._guards_count:
            self.under_way += 1
            self.most = max(self.most, self.under_way)
        try:
            yield
        finally:
            with self._guards_count:
                self.under_way -= 1

    def __call__(self, path: str) -> Any:
        with self._counted():
            name = Path(path).name
            if name == self.fails:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            if self.meet is not None and name in "abcdef":
                self.meet.wait(30)
            time.sleep(0.005)
            return self._real(path)


@pytest.fixture
def scans(keys: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> Scans:
    return Scans(monkeypatch)


async def test_folders_are_listed_side_by_side_where_the_file_system_lets_each_wait(
    store: PosixStore, keys: dict[str, int], scans: Scans
) -> None:
    scans.meet = threading.Barrier(6)
    assert await listed(store) == keys


async def test_one_thread_lists_them_where_it_waits_for_nothing(
    store: PosixStore, keys: dict[str, int], scans: Scans, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "thread_time", time.monotonic)  # all the time was spent on this processor
    assert await listed(store) == keys
    assert scans.most == 1


async def test_one_failure_ends_the_listing_when_no_thread_is_at_work_any_more(store: PosixStore, scans: Scans) -> None:
    scans.fails = "c"
    with pytest.raises(TierUnavailable, match="was not listed"):
        await listed(store)
    assert scans.most > 1
    assert scans.under_way == 0
