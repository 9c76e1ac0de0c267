"""Missing is believed only when the ring is whole: a lost server makes the tier unavailable, never its objects."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import pytest
from support.scenes import SOON

from tieredckpt.blobs.base import Outgrown, Unanswered
from tieredckpt.blobs.chfs import frames
from tieredckpt.blobs.chfs.store import ChfsStore
from tieredckpt.blobs.wrap import Retrying
from tieredckpt.blobs.wrap.forward import Forward, Operation
from tieredckpt.errors import NotFound, ShortRead, TierUnavailable
from tieredckpt.testing.backdoor import listed, pattern

T = TypeVar("T")

MIB = 1 << 20
KEYS = [f"folder/{number}" for number in range(6)]


@pytest.fixture
async def filled(store: ChfsStore) -> ChfsStore:
    for number, key in enumerate(KEYS):
        await store.put(key, [pattern(5 * MIB if number == 0 else 100, number)])
    return store


async def assert_nothing_is_called_missing(store: ChfsStore) -> None:
    unavailable = 0
    for number, key in enumerate(KEYS):
        try:
            data = await store.get(key, limit=5 * MIB)
        except TierUnavailable:
            unavailable += 1
        else:
            assert data == pattern(5 * MIB if number == 0 else 100, number)
    assert unavailable
    with pytest.raises(TierUnavailable):
        await listed(store)
    with pytest.raises(TierUnavailable):
        await store.stat("not/there")


@pytest.mark.parametrize("switch", ["dead = 1", "hang = 1", "dead = 0 2"])
async def test_a_server_that_dies_makes_no_object_missing(chfs: Any, filled: ChfsStore, switch: str) -> None:
    chfs.switch(switch)
    await assert_nothing_is_called_missing(filled)
    chfs.switch()
    assert set(await listed(filled)) == set(KEYS)
    assert await filled.get(KEYS[0], limit=5 * MIB) == pattern(5 * MIB, 0)


async def test_a_call_that_was_lost_once_is_tried_again(chfs: Any, filled: ChfsStore) -> None:
    class Passing(Forward):
        """A store whose trouble is over when a call has failed."""

        async def around(self, operation: Operation, call: Callable[[], Awaitable[T]]) -> T:
            try:
                return await call()
            except TierUnavailable:
                chfs.switch()
                raise

    store = Retrying(Passing(filled), wait_initial=0.0, wait_jitter=0.0)
    for switch in ("fail.pread = 1:ENOTCONN", "fail.stat = *:ENOTCONN"):
        chfs.switch(switch)
        assert await store.get(KEYS[0], limit=5 * MIB) == pattern(5 * MIB, 0)


async def test_a_server_that_does_not_answer_is_not_asked_again_at_once(chfs: Any, filled: ChfsStore) -> None:
    chfs.switch("hang = 1")
    for _ in range(2):  # of the worker that there is, and of a new one
        with pytest.raises(Unanswered, match=r"server 2 of 3 at .*/servers/1 does not answer"):
            await Retrying(filled).stat("not/there")


async def test_a_silent_server_that_a_new_client_asks_for_the_others_is_named(
    chfs: Any, stores: Callable[..., ChfsStore]
) -> None:
    await stores().connect()
    chfs.switch("hang = 0 1 2")
    with pytest.raises(Unanswered, match=rf"could not connect to directory:{chfs.directory}; see that all servers run"):
        await Retrying(stores()).stat("not/there")


async def test_a_ring_that_has_changed_is_looked_at_again_at_once(chfs: Any, stores: Callable[..., ChfsStore]) -> None:
    chfs.switch("late = 1 2")
    store = stores()
    await store.put("key", [b"x"])
    chfs.switch()
    with pytest.raises(Outgrown):
        await Retrying(store, wait_initial=0.0, wait_jitter=0.0).get("other", limit=1)


@pytest.mark.parametrize("dead", [0, 1, 2])
async def test_whichever_server_is_gone_a_new_process_knows_how_many_there_were(
    chfs: Any, filled: ChfsStore, stores: Callable[..., ChfsStore], dead: int
) -> None:
    chfs.switch(f"dead = {dead}")
    with pytest.raises(TierUnavailable, match="has 2 servers, and 3 are expected"):
        await stores().get(KEYS[0], limit=5 * MIB)


async def test_a_configuration_may_accept_the_servers_that_are_left(
    chfs: Any, filled: ChfsStore, stores: Callable[..., ChfsStore]
) -> None:
    chfs.switch("dead = 2")
    store = stores(servers=2)
    await store.put("new", [b"x"])
    await stores().get("new", limit=1)  # remembered from then on
    chfs.switch()
    with pytest.raises(TierUnavailable, match="has 3 servers, and 2 or 3 are expected"):
        await stores().get("new", limit=1)
    await stores(servers=3).put("all/back", [b"x"])
    assert await stores().get("all/back", limit=1) == b"x"


async def test_looking_makes_nothing(chfs: Any, store: ChfsStore) -> None:
    assert await listed(store) == {}
    with pytest.raises(NotFound):
        await store.get("key", limit=1)
    await store.delete("key")
    made = {path.name for server in (chfs.directory / "servers").iterdir() for path in server.rglob("*")}
    assert made == set()


async def test_the_record_is_not_listed_and_survives_use(chfs: Any, store: ChfsStore) -> None:
    await store.put("key", [b"x"])
    assert await listed(store) == {"key": 1}
    names = {path.name for path in (chfs.directory / "servers").rglob("~ring/*")}
    assert names == {f"3-{number}" for number in range(32)}


@pytest.mark.parametrize("dead", [0, 1, 2])
async def test_a_short_object_is_short_only_while_all_servers_answer(chfs: Any, filled: ChfsStore, dead: int) -> None:
    into = memoryview(bytearray(200))
    with pytest.raises(ShortRead):
        await filled.get_into(KEYS[1], 0, into)
    chfs.switch(f"dead = {dead}")
    with pytest.raises(TierUnavailable):
        await filled.get_into(KEYS[1], 0, into)


async def test_all_servers_are_asked_after_every_small_put(store: ChfsStore, monkeypatch: pytest.MonkeyPatch) -> None:
    await store.connect()
    assert store.link is not None
    commands, ask = list[frames.Command](), store.link.ask

    async def noting(command: frames.Command, **more: Any) -> Any:
        commands.append(command)
        return await ask(command, **more)

    monkeypatch.setattr(store.link, "ask", noting)
    await store.put("pack", [pattern(3 * MIB)])  # a chunk for each server
    assert not isinstance(commands[-1], frames.CheckRing)
    await store.put("pack", [pattern(3 * MIB - 1)])
    assert isinstance(commands[-1], frames.CheckRing)


async def test_a_link_that_somebody_made_is_no_object(chfs: Any, store: ChfsStore) -> None:
    await store.put("folder/key", [b"x"])
    chfs.back_door._chunk("folder/link", 0).symlink_to(":key")  # as the look-alike keeps links
    with pytest.raises(NotFound, match="folder/link is a link"):
        await store.get("folder/link", limit=10)
    assert await listed(store) == {"folder/key": 1}
    await store.delete("folder/link")
    assert not chfs.back_door._chunk("folder/link", 0).is_symlink()


async def test_a_sweep_removes_empty_folders_and_no_others(chfs: Any, store: ChfsStore) -> None:
    async def folders(key: str) -> set[str]:
        assert store.link is not None
        return {name for name, *_ in await store.link.ask(frames.ListFolder(f"{chfs.root}{key}"))}

    await store.put("steps/1/parts/0", [b"x"])
    await store.put("steps/2/parts/0", [b"y"])
    await store.delete("steps/1/parts/0")
    await store.sweep(3600.0)
    assert await folders("/steps/1") == {"parts"}
    await store.sweep(0.0)
    await store.sweep(0.0)  # what held nothing but empty folders
    assert await folders("/steps") == {"2"}
    assert await listed(store) == {"steps/2/parts/0": 1}
    await store.put("steps/1/parts/0", [b"again"])
    assert set(await listed(store)) == {"steps/1/parts/0", "steps/2/parts/0"}
    assert "~ring" in await folders("")


async def test_nothing_that_is_put_during_sweeps_gets_lost(store: ChfsStore) -> None:
    async def put(number: int) -> None:
        for turn in range(6):
            key = f"steps/{number}/{turn % 2}/object"
            await store.put(key, [b"x"])
            if turn < 5:
                await store.delete(key)

    putting = asyncio.gather(*map(put, range(6)))
    while not putting.done():
        await store.sweep(0.0)
    await putting
    assert set(await listed(store)) == {f"steps/{number}/1/object" for number in range(6)}


@pytest.mark.parametrize("empty", ["0", "1", "2", "0 1 2"])
async def test_a_commit_is_not_acknowledged_once_a_server_has_lost_its_data(
    chfs: Any, filled: ChfsStore, stores: Callable[..., ChfsStore], empty: str
) -> None:
    chfs.switch(f"empty = {empty}")  # as it answers each call, nothing else tells
    for _ in range(2):
        with pytest.raises(Outgrown, match="without what they held"):
            await filled.put("steps/0000000008-000002/manifest.ocdbt", [b"commit"])
    again = stores()
    await again.put("steps/0000000008-000002/manifest.ocdbt", [b"commit"])
    assert await again.get("steps/0000000008-000002/manifest.ocdbt", limit=6) == b"commit"


# -- rings that grow ------------------------------------------------------------------------------------------


async def test_servers_that_join_make_the_store_unavailable_and_no_object_missing(
    chfs: Any, stores: Callable[..., ChfsStore]
) -> None:
    chfs.switch("late = 1 2")
    store = stores()
    for number, key in enumerate(KEYS):
        await store.put(key, [pattern(5 * MIB if number == 0 else 100, number)])
    chfs.switch()
    await assert_nothing_is_called_missing(store)


async def test_a_put_is_not_acknowledged_once_servers_have_joined(chfs: Any, stores: Callable[..., ChfsStore]) -> None:
    chfs.switch("late = 1 2")
    store = stores()
    await store.put("before", [b"x"])
    chfs.switch()
    with pytest.raises(TierUnavailable, match=r"servers/1.*joined it|another number of servers"):
        await store.put("after", [b"x"])


@pytest.mark.parametrize("late", ["2", "1 2", "0"])
async def test_a_store_goes_on_with_the_servers_that_joined_and_mixes_nothing(
    chfs: Any, stores: Callable[..., ChfsStore], late: str, caplog: pytest.LogCaptureFixture
) -> None:
    chfs.switch(f"late = {late}")
    before = stores()
    await before.put("steps/0000000007-000001/manifest.ocdbt", [b"small"])
    await before.put("packs/ab/large", [pattern(5 * MIB)])
    chfs.switch()
    with pytest.raises(TierUnavailable, match="without step 7"):
        await stores(writes=False).get("tieredckpt.json", limit=1)
    grown = stores()
    assert await listed(grown) == {}
    await grown.put("packs/ab/other", [pattern(5 * MIB, 1)])
    assert "without step 7" in caplog.text
    with pytest.raises(TierUnavailable, match="joined it"):
        await before.get("packs/ab/large", limit=5 * MIB)
    with pytest.raises(Outgrown, match="opened anew"):
        await before.get("packs/ab/large", limit=5 * MIB)
    for store in (stores(), stores(writes=False), stores(servers=3)):
        assert await listed(store) == {"packs/ab/other": 5 * MIB}
        assert await store.get("packs/ab/other", limit=5 * MIB) == pattern(5 * MIB, 1)
    chfs.switch(f"late = {late}")
    fewer = 3 - len(late.split())
    with pytest.raises(TierUnavailable, match="expected"):
        await stores().get("packs/ab/large", limit=1)
    found = stores(servers=fewer)
    assert await found.get("packs/ab/large", limit=5 * MIB) == pattern(5 * MIB)
    assert await found.get("steps/0000000007-000001/manifest.ocdbt", limit=5) == b"small"


async def test_a_new_store_waits_until_no_more_servers_join(chfs: Any, stores: Callable[..., ChfsStore]) -> None:
    chfs.switch("late = 1 2")
    early = stores(stable_for=SOON)
    await early.connect()
    putting = asyncio.ensure_future(early.put("key", [b"x"]))
    chfs.switch("late = 2")
    with pytest.raises(TierUnavailable):
        await putting
    chfs.switch()
    assert await listed(stores()) == {}  # as if nothing had been
    await stores(stable_for=0.2).put("key", [b"x"])
    assert await stores().get("key", limit=1) == b"x"
    names = {path.name for path in (chfs.directory / "servers").rglob("~ring/*")}
    assert names == {f"3-{number}" for number in range(32)}


async def test_a_configuration_that_says_how_many_there_are_waits_for_these(
    chfs: Any, stores: Callable[..., ChfsStore]
) -> None:
    chfs.switch("late = 1 2")
    with pytest.raises(TierUnavailable, match=r"has 1 server, and 3 are expected.* beside .*servers/0") as refused:
        await stores(servers=3, stable_for=SOON).put("key", [b"x"])
    assert "servers = 1" not in str(refused.value)
    chfs.switch()
    await stores(servers=3, stable_for=SOON).put("key", [b"x"])  # at once
    assert await stores().get("key", limit=1) == b"x"


async def test_the_record_of_many_servers_is_found_though_none_owns_it(
    chfs: Any, filled: ChfsStore, stores: Callable[..., ChfsStore]
) -> None:
    assert filled.link is not None
    names = [f"{chfs.root}/~ring/3-{number}" for number in range(32)]
    chfs.switch("dead = 2")
    fewer = stores(servers=2)
    await fewer.connect()
    assert fewer.link is not None
    owned = {name for name, *_ in await fewer.link.ask(frames.ListFolder(f"{chfs.root}/~ring"))}
    for path in (chfs.directory / "servers").rglob("~ring/*"):
        if path.name in owned:
            path.rmdir()
    assert len(list((chfs.directory / "servers").rglob("~ring/*"))) in range(1, len(names))
    with pytest.raises(TierUnavailable, match="has 2 servers, and 3 are expected"):
        await stores().get(KEYS[0], limit=1)


async def test_servers_that_come_back_one_by_one_and_empty_are_waited_for(
    chfs: Any, filled: ChfsStore, stores: Callable[..., ChfsStore]
) -> None:
    chfs.switch("empty = 0 1 2", "late = 1 2")
    early = stores(stable_for=SOON)
    await early.connect()
    putting = asyncio.ensure_future(early.put("key", [b"x"]))
    chfs.switch("empty = 0 1 2")
    with pytest.raises(TierUnavailable):
        await putting
    await stores(stable_for=0.2).put("key", [b"x"])
    assert await listed(stores()) == {"key": 1}
