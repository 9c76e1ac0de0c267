"""A script of faults does what it says, when it says, and no more."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator

import pytest

from tieredckpt.blobs.base import Stretch
from tieredckpt.blobs.kvstore.store import KvStoreBlobs
from tieredckpt.errors import Corrupt, NoSpace, ShortRead, TierUnavailable
from tieredckpt.format.digest import digest
from tieredckpt.testing.backdoor import listed, verbs
from tieredckpt.testing.faulty import Faulty, Hold


@pytest.fixture
async def store() -> AsyncIterator[Faulty]:
    store = Faulty(await KvStoreBlobs.open("memory://"))
    yield store
    await store.close()


async def test_the_nth_matching_call_fails_and_no_other(store: Faulty) -> None:
    store.fail("put", NoSpace("full"), key="packs/*", nth=2, times=2)
    outcomes = []
    for key in ("steps/1", "packs/1", "packs/2", "steps/2", "packs/3", "packs/4"):
        try:
            await store.put(key, [b"x"])
            outcomes.append(key)
        except NoSpace:
            outcomes.append("full")
    assert outcomes == ["steps/1", "packs/1", "full", "steps/2", "full", "packs/4"]
    assert set(await listed(store)) == {"steps/1", "packs/1", "steps/2", "packs/4"}
    assert [call.key for call in store.calls if call.verb == "put"][:2] == ["steps/1", "packs/1"]


async def test_every_fault_is_counted_by_its_kind_and_verb(store: Faulty) -> None:
    await store.put("key", [b"xyz"])
    held = store.hold("stat", times=None)
    passing = asyncio.ensure_future(store.stat("key"))
    await held.reached()
    held.release()
    await passing
    await store.stat("key")  # which nothing held any more
    store.delay("stat", 0.0)
    await store.stat("key")
    store.cut("get", 1)
    store.cut("get", 100)  # of which there are fewer
    store.flip("get", 0)
    assert await store.get("key", limit=9) == b"y"
    store.cut("get_into", 1)
    with pytest.raises(ShortRead):
        await store.get_into("key", 0, memoryview(bytearray(3)))
    store.fail("put", TierUnavailable("lost"), after=True)
    store.fail("put", NoSpace("full"), nth=2)
    store.fail("delete", TierUnavailable("no answer"))
    for call in (store.put("key", [b"x"]), store.put("key", [b"x"]), store.delete("key")):
        with pytest.raises((TierUnavailable, NoSpace)):
            await call
    store.full_after(1)
    with pytest.raises(NoSpace):
        await store.put("key", [b"xy"])
    store.kill()
    with pytest.raises(TierUnavailable):
        await store.stat("key")
    assert store.struck == {
        ("hang", "stat"): 1,
        ("delay", "stat"): 1,
        ("short read", "get"): 1,
        ("wrong bytes", "get"): 1,
        ("short read", "get_into"): 1,
        ("answer lost", "put"): 1,
        ("no space", "put"): 2,
        ("error", "delete"): 1,
        ("gone", "stat"): 1,
    }


async def test_an_answer_may_be_lost(store: Faulty) -> None:
    store.fail("put", TierUnavailable("lost"), after=True)
    with pytest.raises(TierUnavailable):
        await store.put("key", [b"x"])
    assert await store.get("key", limit=1) == b"x"


async def test_a_call_is_held_before_or_after_its_work(store: Faulty) -> None:
    for after in (False, True):
        held = store.hold("put", key=f"{after}", after=after)
        putting = asyncio.ensure_future(store.put(f"{after}", [b"x"]))
        await held.reached()
        assert (f"{after}" in await listed(store)) == after
        assert not putting.done()
        held.release()
        held.release()
        await putting
        assert f"{after}" in await listed(store)


async def test_a_held_call_may_be_cancelled_unless_it_is_stubborn(store: Faulty) -> None:
    for stubborn in (False, True):
        held = store.hold("stat", stubborn=stubborn)
        task = asyncio.ensure_future(store.stat("key"))
        await held.reached()
        task.cancel()
        for _ in range(20):
            await asyncio.sleep(0)
        assert task.done() == (not stubborn)
        held.release()
        with pytest.raises(asyncio.CancelledError):
            await task


def test_a_hold_serves_a_loop_in_another_thread() -> None:
    ready = threading.Event()
    stores: list[Faulty] = []

    async def trainer() -> None:
        stores.append(Faulty(await KvStoreBlobs.open("memory://")))
        held.append(stores[0].hold("put"))
        ready.set()
        await stores[0].put("key", [b"x"])

    held: list[Hold] = []
    thread = threading.Thread(target=lambda: asyncio.run(trainer()))
    thread.start()
    assert ready.wait(10)
    held[0].wait(timeout=10)
    assert thread.is_alive()
    held[0].release()
    thread.join(10)
    assert not thread.is_alive()


async def test_reads_are_cut_short(store: Faulty) -> None:
    await store.put("key", [b"0123456789"])
    store.cut("get", 4)
    assert await store.get("key", limit=10) == b"0123"
    store.cut("get_into", 4)
    into = bytearray(6)
    with pytest.raises(ShortRead):
        await store.get_into("key", 2, memoryview(into))
    assert into == b"2345\0\0"
    await store.get_into("key", 2, memoryview(into))
    assert into == b"234567"


async def test_what_is_digested_is_what_a_script_lets_through(store: Faulty) -> None:
    await store.put("key", [b"0123456789"])
    into = memoryview(bytearray(4))
    stretches = [Stretch(1, 5, into), Stretch(8, 1, memoryview(bytearray(1)))]
    sound = await store.get_digested("key", stretches)
    assert sound == [digest(b"12345"), digest(b"8")]
    assert into.tobytes() == b"1234"
    store.flip("get_into", bit=0)
    flipped = await store.get_digested("key", stretches)
    assert flipped == [digest(b"02345"), digest(b"8")]
    assert into.tobytes() == b"0234"
    store.cut("get_into", 3)
    with pytest.raises(ShortRead):
        await store.get_digested("key", stretches)
    store.fail("get_into", NoSpace("odd"))
    with pytest.raises(NoSpace):
        await store.get_digested("key", stretches)
    assert [(call.verb, call.nbytes) for call in store.calls[1:]] == [("get_into", 8)] * 2 + [
        ("get_into", 3),
        ("get_into", 8),
    ]


async def test_bits_flip_without_a_word(store: Faulty) -> None:
    await store.put("key", [bytes(4)])
    store.flip("get", bit=9)
    store.flip("get_into", bit=32 + 9)
    assert await store.get("key", limit=4) == b"\0\2\0\0"
    into = bytearray(4)
    await store.get_into("key", 0, memoryview(into))
    assert into == b"\0\2\0\0"
    assert await store.get("key", limit=4) == bytes(4)


async def test_the_device_fills_up_at_a_byte(store: Faulty) -> None:
    store.full_after(10)
    await store.put("a", [b"12345", b"678"])
    with pytest.raises(NoSpace):
        await store.put("b", [b"123"])
    await store.put("c", [b"12"])
    with pytest.raises(NoSpace):
        await store.put("d", [b"1"])
    store.full_after(None)
    await store.put("d", [bytes(100)])
    assert await listed(store) == {"a": 8, "c": 2, "d": 100}


async def test_a_dead_store_answers_nothing_until_it_is_revived(store: Faulty) -> None:
    store.kill()
    for call in verbs(store, "key"):
        with pytest.raises(TierUnavailable, match="dead"):
            await call()
    with pytest.raises(TierUnavailable):
        await listed(store)
    store.revive()
    assert await listed(store) == {}
    store.kill(Corrupt("rotten"))
    with pytest.raises(Corrupt):
        await store.stat("key")
    store.clear()
    await store.put("key", [b"x"])


async def test_a_listing_fails_in_its_middle(store: Faulty) -> None:
    for number in range(4):
        await store.put(str(number), [b"x"])
    store.fail("list", TierUnavailable("broke off"), nth=3)
    seen = []

    async def look() -> None:
        async for info in store.list(""):
            seen.append(info.key)  # noqa: PERF401 - what was seen before the end counts

    with pytest.raises(TierUnavailable):
        await look()
    assert len(seen) == 2


async def test_a_call_is_delayed_and_may_be_cancelled_meanwhile(store: Faulty) -> None:
    store.delay("put", 3600.0, key="slow")
    putting = asyncio.create_task(store.put("slow", [b"1"]))
    done, _ = await asyncio.wait([putting], timeout=0.05)
    assert not done
    putting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await putting
    await store.put("slow", [b"2"])
    assert await store.get("slow", limit=9) == b"2"


async def test_a_store_comes_and_goes(store: Faulty) -> None:
    await store.put("key", [b"1"])
    store.come_and_go(up=2, down=1)
    for _ in range(3):
        for _ in range(2):
            assert await store.get("key", limit=9) == b"1"
        with pytest.raises(TierUnavailable, match="gone for a while"):
            await store.get("key", limit=9)
    store.clear()
    for _ in range(4):
        await store.get("key", limit=9)
