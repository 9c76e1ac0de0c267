"""The record of the number of servers, cut off at any moment: the store stays where it was, or gets where it goes."""

from __future__ import annotations

import asyncio
import random
import zlib
from collections.abc import Callable
from typing import Any

import pytest

from tieredckpt.blobs.base import Unanswered
from tieredckpt.blobs.chfs import frames, record
from tieredckpt.blobs.chfs.store import ChfsStore
from tieredckpt.errors import NotFound, TierUnavailable

ROOT = "/store"


class _Folders:
    """Empty folders on servers, by path; a folder is on the server that its path and the number of servers tell."""

    addresses = ()

    def __init__(self, servers: int) -> None:
        self.servers = servers
        self.on: dict[int, set[str]] = {number: set() for number in range(8)}
        self.before: list[_Folders] = []
        """What there was before each change: what a writer leaves that is killed there."""

    def _owner(self, path: str) -> set[str]:
        return self.on[zlib.crc32(path.encode()) % self.servers]

    async def ask(self, command: frames.Command) -> Any:
        match command:
            case frames.CheckRing():
                return None
            case frames.ListFolder(folder, replicas):
                paths = {path for server in range(self.servers) for path in self.on[server]}
                owned = {path for path in paths if path in self._owner(path)}
                names = {path.removeprefix(f"{folder}/") for path in (paths if replicas else owned)}
                return [(name, "folder", 0, 0) for name in names if "/" not in name]
        self.before.append(self.copy(self.servers))
        match command:
            case frames.MakeFolder(path):
                self._owner(path).add(path)
            case frames.RemoveFolder(path):
                if path not in self._owner(path):
                    raise NotFound(path)
                self._owner(path).remove(path)
        return None

    def copy(self, servers: int) -> _Folders:
        other = _Folders(servers)
        other.on = {number: set(paths) for number, paths in self.on.items()}
        return other


async def go_on(link: Any, expected: int | None = None) -> str:
    """The folder of a store, its record written as a put does."""
    found = await record.place(link, ROOT, "chfs:/store", expected)
    if found.record != "complete":
        await record.write(link, ROOT, found)
    return found.folder


async def cut_off(before: _Folders, servers: int, expected: int | None = None) -> list[_Folders]:
    """What a writer with so many servers leaves if it is killed before each of its changes, made in two orders."""
    states = []
    for seed in (1, 2):
        random.seed(seed)
        link = before.copy(servers)
        await go_on(link, expected)
        states += link.before
    return states


@pytest.fixture
def any_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make what is made together in an order that `random.seed` decides."""
    together = record.together

    async def shuffled(calls: Any) -> Any:
        listed = list(calls)
        random.shuffle(listed)
        for number, call in enumerate(listed):
            try:
                await together([call])
            except BaseException:
                for rest in listed[number + 1 :]:
                    rest.close()
                raise

    monkeypatch.setattr(record, "together", shuffled)


@pytest.mark.usefixtures("any_order")
async def test_a_growth_that_was_cut_off_is_finished_by_the_next_writer() -> None:
    before = _Folders(3)
    assert await go_on(before) == ROOT
    cuts = await cut_off(before, 5)
    assert len(cuts) > 2 * 64
    for cut in cuts:
        link = cut.copy(5)
        assert await go_on(link) == f"{ROOT}/~5"
        assert await record.place(link, ROOT, "chfs:/store", None) == record.Placement(f"{ROOT}/~5", "complete")
        with pytest.raises(Unanswered, match=r"has 3 servers, and (5|3 or 5) are"):
            await record.place(link.copy(3), ROOT, "chfs:/store", None)


@pytest.mark.usefixtures("any_order")
async def test_a_growth_that_was_cut_off_leaves_the_store_to_as_many_servers_as_before() -> None:
    before = _Folders(3)
    await go_on(before)
    for cut in await cut_off(before, 5):
        paths = " ".join(path for server in range(5) for path in cut.on[server])
        if "5~" not in paths or paths.count("5+") == 32:  # else only the begun entries were left to be removed
            link = cut.copy(3)
            assert await go_on(link) == ROOT
            assert (await record.place(link, ROOT, "chfs:/store", None)).record == "complete"
            assert await go_on(cut.copy(5)) == f"{ROOT}/~5"


@pytest.mark.usefixtures("any_order")
async def test_what_was_cut_off_twice_is_finished() -> None:
    before = _Folders(3)
    await go_on(before)
    once = await cut_off(before, 5)
    for first in once[:: len(once) // 8]:
        for servers in (5, 7):
            twice = await cut_off(first, servers)
            for second in twice[:: max(1, len(twice) // 16)]:
                assert await go_on(second.copy(7)) == f"{ROOT}/~7"


@pytest.mark.usefixtures("any_order")
async def test_a_change_to_fewer_servers_that_was_cut_off_needs_to_be_asked_for_again() -> None:
    before = _Folders(3)
    await go_on(before)
    for cut in await cut_off(before, 2, expected=2):
        assert await go_on(cut.copy(2), expected=2) == f"{ROOT}/~2"


@pytest.mark.usefixtures("any_order")
async def test_a_return_to_a_number_that_was_cut_off_finds_what_lies_there() -> None:
    before = _Folders(5)
    assert await go_on(before) == ROOT
    fewer = before.copy(3)
    assert await go_on(fewer, expected=3) == f"{ROOT}/~3"
    for cut in await cut_off(fewer, 5, expected=5):
        assert await go_on(cut.copy(5), expected=5) == ROOT


async def test_records_of_versions_before_are_read() -> None:
    link = _Folders(5)
    for entry in [*(f"5~{n}" for n in range(32)), "3-1", "3-2"]:
        await link.ask(frames.MakeFolder(f"{ROOT}/~ring/{entry}"))
    assert await go_on(link) == f"{ROOT}/~5"


@pytest.mark.parametrize("hang", ["hang.mkdir = 1+", "hang.mkdir = 17+", "hang.mkdir = 49+", "hang.rmdir = 1+"])
async def test_a_worker_that_is_killed_while_it_records_more_servers_locks_nobody_out(
    chfs: Any, stores: Callable[..., ChfsStore], hang: str
) -> None:
    chfs.switch("late = 1 2")
    await stores().put("before", [b"x"])
    chfs.switch(hang)
    killed = stores()
    putting = asyncio.ensure_future(killed.put("key", [b"x"]))
    await chfs.hangs(hang[5:10])
    assert killed.link is not None
    killed.link.process.kill("the node is gone")
    with pytest.raises(TierUnavailable, match="the node is gone"):
        await putting
    chfs.switch()
    await stores().put("key", [b"y"])
    assert await stores().get("key", limit=1) == b"y"
    names = {path.name for path in (chfs.directory / "servers").rglob("~ring/*") if "-" not in path.name}
    assert names == {f"3~{number}" for number in range(32)}
