"""Objects stay open for the next reader, who never meets an older one, and never waits for what is closed."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from typing import Any

import psutil
import pytest
from support.scenes import SOON

from tieredckpt.blobs.chfs import frames
from tieredckpt.blobs.chfs.link import Link
from tieredckpt.blobs.chfs.store import ChfsStore
from tieredckpt.errors import Closed, NotFound, TierUnavailable
from tieredckpt.testing.backdoor import pattern

MIB = 1 << 20
SMALL, LARGE = pattern(100_000), pattern(3 * MIB, 1)  # one CHFS chunk of 100 KiB, and three of 1 MiB


async def read(store: ChfsStore, key: str, nbytes: int) -> bytes:
    into = bytearray(nbytes)
    await store.get_into(key, 0, memoryview(into))
    return bytes(into)


def linked(store: ChfsStore) -> Link:
    assert store.link is not None
    return store.link


async def asked(link: Link, kind: type[frames.Command], monkeypatch: pytest.MonkeyPatch) -> asyncio.Event:
    """Set when the worker is sent such a command next."""
    sent, ask = asyncio.Event(), link.ask

    async def noting(command: frames.Command, **more: Any) -> Any:
        if isinstance(command, kind):
            sent.set()
        return await ask(command, **more)

    monkeypatch.setattr(link, "ask", noting)
    return sent


async def test_a_second_read_opens_nothing(store: ChfsStore, monkeypatch: pytest.MonkeyPatch) -> None:
    await store.put("key", [LARGE])
    assert await read(store, "key", len(LARGE)) == LARGE
    opened = await asked(linked(store), frames.Open, monkeypatch)
    assert await read(store, "key", len(LARGE)) == LARGE
    assert not opened.is_set()


async def test_a_cancelled_read_ends_though_opening_hangs(
    chfs: Any, store: ChfsStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    await store.put("key", [LARGE])
    process = psutil.Process(linked(store).process.number)
    opening = await asked(linked(store), frames.Open, monkeypatch)
    chfs.switch("hang.open = *")
    reading = asyncio.ensure_future(read(store, "key", len(LARGE)))
    await opening.wait()
    reading.cancel()
    done, _ = await asyncio.wait([reading], timeout=SOON)
    chfs.switch()
    assert done
    assert reading.cancelled()
    assert not process.is_running()
    assert await read(store, "key", len(LARGE)) == LARGE


async def test_one_reader_that_gives_up_takes_nothing_from_the_other(
    chfs: Any, store: ChfsStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    await store.put("key", [LARGE])
    opening = await asked(linked(store), frames.Open, monkeypatch)
    chfs.switch("delay.open = 100")
    first, second = (asyncio.ensure_future(read(store, "key", len(LARGE))) for _ in range(2))
    await opening.wait()
    first.cancel()
    assert await second == LARGE
    assert first.cancelled()


async def test_closing_waits_for_no_server(chfs: Any, stores: Callable[..., ChfsStore]) -> None:
    store = stores(threads=1)
    await store.connect()
    chfs.switch("hang.stat = *")
    looking = [asyncio.ensure_future(linked(store).ask(frames.Stat("/nothing"))) for _ in range(9)]
    async with asyncio.timeout(SOON):
        await linked(store).ask(frames.Close(7))
    assert not any(look.done() for look in looking)
    chfs.switch()
    await asyncio.gather(*looking, return_exceptions=True)


@pytest.mark.parametrize(("before", "after"), [(SMALL, LARGE), (LARGE, SMALL)], ids=["larger", "smaller"])
async def test_what_another_process_has_replaced_is_read_as_it_is_now(
    store: ChfsStore, stores: Callable[..., ChfsStore], before: bytes, after: bytes
) -> None:
    other = stores()
    await other.put("key", [before])
    assert await store.get("key", limit=len(before)) == before
    await other.put("key", [after])
    assert await store.get("key", limit=len(after)) == after


async def test_what_a_reader_opened_during_a_put_is_not_read_after_it(
    chfs: Any, store: ChfsStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    await store.put("key", [SMALL])
    creating = await asked(linked(store), frames.Create, monkeypatch)
    chfs.switch("hang.stat = *")  # creating begins by that
    putting = asyncio.ensure_future(store.put("key", [LARGE]))
    await creating.wait()
    assert await read(store, "key", 10) == SMALL[:10]
    chfs.switch()
    await putting
    into = bytearray(10)
    await store.get_into("key", 2 * len(SMALL), memoryview(into))  # in the first chunk now, behind that of before
    assert into == LARGE[2 * len(SMALL) :][:10]


async def test_an_object_that_was_removed_and_made_anew_is_read(
    store: ChfsStore, stores: Callable[..., ChfsStore]
) -> None:
    await store.put("key", [LARGE])
    assert await read(store, "key", len(LARGE)) == LARGE
    await store.delete("key")
    await store.put("key", [LARGE[::-1]])
    assert await read(store, "key", len(LARGE)) == LARGE[::-1]


async def test_many_objects_are_read_with_few_open(store: ChfsStore) -> None:
    for number in range(80):  # the worker makes who opens a 65th wait
        await store.put(f"key-{number}", [b"%d" % number])
    for _ in range(2):
        read_all = await asyncio.gather(*(read(store, f"key-{number}", len(str(number))) for number in range(80)))
        assert read_all == [b"%d" % number for number in range(80)]


async def test_a_command_that_cannot_be_sent_fails(store: ChfsStore) -> None:
    await store.connect()
    with pytest.raises(TierUnavailable, match="nothing could be sent"):
        async with asyncio.timeout(SOON):
            await linked(store).ask(frames.Stat("/" + "x" * 300_000))
    await store.put("key", [SMALL])


async def test_a_worker_ends_by_itself_though_a_forked_process_holds_its_socket(store: ChfsStore) -> None:
    await store.connect()
    process = linked(store).process
    copy = os.dup(linked(store)._socket.fileno())
    try:
        await store.close()
        assert process.what_happened() == "ended by itself with exit status 0"
    finally:
        os.close(copy)


async def test_a_verb_that_is_cancelled_while_its_store_closes_is_cancelled(chfs: Any, store: ChfsStore) -> None:
    chfs.switch("hang.init = *")
    verbs = [asyncio.ensure_future(store.stat("key")) for _ in range(2)]
    await chfs.hangs("init")
    closing = asyncio.ensure_future(store.close())
    await asyncio.sleep(0)
    verbs[0].cancel()
    with pytest.raises(asyncio.CancelledError):
        await verbs[0]
    chfs.switch()
    with pytest.raises((NotFound, Closed)):
        await verbs[1]
    await closing
    with pytest.raises(Closed):
        await store.stat("key")
