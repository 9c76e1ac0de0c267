"""A listing asks for several folders at a time, and for nothing that the folders themselves tell."""

from __future__ import annotations

import asyncio
import shutil
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from support.scenes import SOON

from tieredckpt.blobs.chfs import frames
from tieredckpt.blobs.chfs.link import Link
from tieredckpt.blobs.chfs.store import ChfsStore
from tieredckpt.errors import TierUnavailable
from tieredckpt.testing.backdoor import listed, pattern

MIB = 1 << 20
SIZES = [0, 1, 4095, 4096, 4097, 100_000, MIB - 1, MIB, MIB + 1, 3 * MIB, 5 * MIB + 4096]
STEPS = [f"steps/{number:010}-000001/{name}" for number in range(20) for name in ("btree", "manifest.ocdbt")]


@pytest.fixture
async def filled(store: ChfsStore) -> ChfsStore:
    await asyncio.gather(*(store.put(key, [key.encode()]) for key in STEPS))
    return store


class Asked:
    """Counts the commands to workers, and those that are answered side by side."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.commands: Counter[type[Any]] = Counter()
        self.most = 0
        pending = 0
        ask = Link.ask

        async def counted(link: Link, command: frames.Command, **more: Any) -> Any:
            nonlocal pending
            self.commands[type(command)] += 1
            pending += 1
            self.most = max(self.most, pending)
            try:
                return await ask(link, command, **more)
            finally:
                pending -= 1

        monkeypatch.setattr(Link, "ask", counted)


def others() -> set[asyncio.Task[Any]]:
    return asyncio.all_tasks() - {asyncio.current_task()}


async def test_a_listing_tells_what_a_look_at_each_object_tells(chfs: Any, store: ChfsStore) -> None:
    for number, size in enumerate(SIZES):
        await store.put(f"here/{number}", [pattern(size, number)])
        await chfs.back_door.put(f"there/{number}", pattern(min(size, 9000), number))
    infos = {info.key: info async for info in store.list("")}
    assert len(infos) == 2 * len(SIZES)
    assert infos == {key: await store.stat(key) for key in infos}


async def test_steps_cost_a_command_for_each_folder(filled: ChfsStore, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = Asked(monkeypatch)
    assert await listed(filled, "steps/") == {key: len(key) for key in STEPS}
    assert asked.commands == {frames.ListFolder: 1 + len(STEPS) // 2, frames.CheckRing: 1}
    assert asked.most == 8


async def test_objects_in_a_listing_are_read_without_another_look(
    filled: ChfsStore, stores: Callable[..., ChfsStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = stores()
    await listed(reader)
    asked = Asked(monkeypatch)
    into = bytearray(5)
    await reader.get_into(STEPS[0], 0, memoryview(into))
    assert into == STEPS[0].encode()[:5]
    assert asked.commands[frames.Stat] == 0


@pytest.mark.parametrize("call", [1, 2, 5, 11, 17, 40])
async def test_an_error_in_one_folder_is_that_of_the_listing(chfs: Any, filled: ChfsStore, call: int) -> None:
    chfs.switch(f"fail.readdir_index = {call}:EIO", "delay.readdir_index = 1")
    before = others()
    with pytest.raises(TierUnavailable, match="cannot list"):
        await listed(filled, "steps/")
    assert others() == before
    assert filled.link is not None
    number = filled.link.process.number
    chfs.switch()
    assert await listed(filled, "steps/") == {key: len(key) for key in STEPS}
    assert filled.link.process.number == number  # what ran beside the error ended by itself


async def test_a_cancelled_listing_leaves_nothing_behind(chfs: Any, filled: ChfsStore) -> None:
    before = others()
    chfs.switch("hang.readdir_index = 9+")
    listing = asyncio.ensure_future(listed(filled, "steps/"))
    await chfs.hangs("readdir_index")
    listing.cancel()
    async with asyncio.timeout(SOON):
        with pytest.raises(asyncio.CancelledError):
            await listing
    assert others() <= before  # the worker that hung was ended, and its watch with it
    chfs.switch()
    assert await listed(filled, "steps/") == {key: len(key) for key in STEPS}


@pytest.mark.parametrize("switch", ["dead = 1", "dead = 2", "hang = 0"])
async def test_a_server_that_dies_during_a_listing_makes_it_no_shorter(
    chfs: Any, filled: ChfsStore, switch: str
) -> None:
    await during_a_listing(chfs, filled, lambda: chfs.switch(switch))


async def test_servers_that_join_during_a_listing_make_it_no_shorter(
    chfs: Any, stores: Callable[..., ChfsStore]
) -> None:
    chfs.switch("late = 2")
    store = stores()
    for key in STEPS:
        await store.put(key, [key.encode()])
    await during_a_listing(chfs, store, chfs.switch, "late = 2")


async def during_a_listing(chfs: Any, store: ChfsStore, change: Callable[[], None], *switches: str) -> None:
    chfs.switch("hang.readdir_index = 20", *switches)
    found: dict[str, int] = {}

    async def look() -> None:
        async for info in store.list("steps/"):
            found[info.key] = info.size

    listing = asyncio.ensure_future(look())
    await chfs.hangs("readdir_index")
    change()
    with pytest.raises(TierUnavailable):
        await listing
    assert found.items() < {key: len(key) for key in STEPS}.items()


async def test_a_folder_that_goes_during_a_listing_takes_nothing_else_out_of_it(chfs: Any, filled: ChfsStore) -> None:
    chfs.switch("hang.readdir_index = 4")  # the folders are known, and none of them is listed
    listing = asyncio.ensure_future(listed(filled, "steps/"))
    await chfs.hangs("readdir_index")
    for folder in (chfs.directory / "servers").glob("*/job/checkpoints/steps/*3-000001"):
        shutil.rmtree(folder)
    chfs.switch()
    left = {key: len(key) for key in STEPS if "3-" not in key}
    assert left.items() <= (await listing).items()
    assert await listed(filled, "steps/") == left
