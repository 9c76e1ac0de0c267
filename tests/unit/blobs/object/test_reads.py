"""Reads of an object store that come whole or say why: in one answer up to 16 MiB, in pieces beyond."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from itertools import pairwise
from typing import Any

import pytest
from support.proxy import Fault, Handler, Proxy, abridge, cut, internal_error, lengthen, slow_down
from support.scenes import SOON

from tieredckpt.blobs.base import BlobStore, Stretch
from tieredckpt.blobs.landing import Landing
from tieredckpt.errors import ShortRead, TierUnavailable
from tieredckpt.format.digest import digest
from tieredckpt.testing.backdoor import pattern

MIB = 1 << 20


@pytest.mark.parametrize("size", [9 * MIB, 35 * MIB])  # at once, and in pieces
@pytest.mark.parametrize("fault", [cut, internal_error])
async def test_an_answer_that_breaks_off_is_no_shorter_object(
    store: BlobStore, between: Proxy, fault: Any, size: int
) -> None:
    data = pattern(size)
    await store.put("a", [data])
    into = bytearray(len(data))
    for read in (
        lambda: store.get("a", limit=len(data)),
        lambda: store.get_into("a", 0, memoryview(into)),
        lambda: digested(store, into),
    ):
        await fails_once(read, between, fault)
    assert into == data


@pytest.mark.parametrize("size", [9 * MIB, 35 * MIB])
@pytest.mark.parametrize("fault", [abridge, lengthen])
async def test_a_range_of_which_another_number_of_bytes_comes_is_no_shorter_object(
    store: BlobStore, between: Proxy, fault: Any, size: int
) -> None:
    data = pattern(size)
    await store.put("a", [data])
    into = bytearray(len(data))
    for read in (lambda: store.get_into("a", 0, memoryview(into)), lambda: digested(store, into)):
        await fails_once(read, between, fault, says=r"\d+ bytes came of")
    assert into == data


async def test_of_a_large_range_every_stretch_is_digested_and_one_beyond_the_end_is_a_short_read(
    store: Any, between: Proxy
) -> None:
    """The range arrives in pieces of 16 MiB, and stretches end where pieces do not."""
    data = pattern(35 * MIB)
    await store.put("a", [data])
    ends = [0, 100, 15 * MIB + 1, 17 * MIB, 31 * MIB, 35 * MIB]
    wanted = [(start, end) for start, end in pairwise(ends) if start != 17 * MIB]  # and a gap
    into = [memoryview(bytearray(end - start)) for start, end in wanted]
    stretches = [Stretch(start, len(room), room) for (start, _), room in zip(wanted, into, strict=True)]
    between.fail("GET", slow_down)
    found = await store.get_digested("a", stretches)
    for (start, end), room, one in zip(wanted, into, found, strict=True):
        assert room == data[start:end]
        assert one == digest(data[start:end])
    beyond = memoryview(bytearray(len(data) + 1))
    with pytest.raises(ShortRead, match=f"has {len(data)} bytes"):
        await store.get_into("a", 0, beyond)
    with pytest.raises(ShortRead, match=f"has {len(data)} bytes"):
        await store.get_digested("a", [Stretch(MIB, len(data), beyond[1:])])


@pytest.mark.parametrize("size", [9 * MIB, 35 * MIB])
async def test_a_read_that_is_cancelled_while_its_bytes_are_placed_ends_when_they_are(
    store: BlobStore, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    await store.put("a", [pattern(size)])
    placing, go_on, take = threading.Event(), threading.Event(), Landing.take
    ended: list[bool] = []

    def slowly(self: Landing, piece: Any) -> None:
        placing.set()
        go_on.wait(SOON)
        take(self, piece)
        ended.append(True)

    monkeypatch.setattr(Landing, "take", slowly)
    reading = asyncio.ensure_future(store.get_into("a", 0, memoryview(bytearray(size))))
    await asyncio.to_thread(placing.wait, SOON)
    reading.cancel()
    await asyncio.wait([reading], timeout=0.05)
    assert not reading.done()
    await store.close()
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await reading
    assert ended == [True]


@pytest.mark.parametrize("placing", [False, True], ids=["waiting for more", "placing a piece"])
async def test_a_read_whose_server_stops_in_the_middle_ends_when_it_is_cancelled(
    store: BlobStore, between: Proxy, monkeypatch: pytest.MonkeyPatch, placing: bool
) -> None:
    size = 35 * MIB
    await store.put("a", [pattern(size)])
    arrived, go_on, ended, take = threading.Event(), threading.Event(), threading.Event(), Landing.take

    def stop(request: Handler) -> None:
        request.answer(request.forward(), cut=True)  # half of it, more than a piece
        ended.wait(SOON)

    def slowly(self: Landing, piece: Any) -> None:
        arrived.set()
        go_on.wait(SOON)
        take(self, piece)

    monkeypatch.setattr(Landing, "take", slowly)
    between.fail("GET", stop)
    reading = asyncio.ensure_future(store.get_into("a", 0, memoryview(bytearray(size))))
    await asyncio.to_thread(arrived.wait, SOON)
    if not placing:
        go_on.set()
        await asyncio.wait([reading], timeout=0.1)
    reading.cancel()
    go_on.set()
    await asyncio.wait([reading], timeout=SOON / 2)
    assert reading.cancelled()
    ended.set()


@pytest.mark.parametrize("size", [9 * MIB, 35 * MIB])  # at once, and in pieces
async def test_reads_under_way_end_as_they_would_have_when_the_store_is_closed(store: BlobStore, size: int) -> None:
    data = pattern(size)
    await store.put("a", [data])
    into = bytearray(size)
    under_way = [
        asyncio.ensure_future(read)
        for read in (store.get("a", limit=size), store.get_into("a", 0, memoryview(into)), digested(store, into))
    ]
    await asyncio.sleep(0)
    await store.close()
    whole, _, _ = await asyncio.gather(*under_way)
    assert whole == into == data


async def digested(store: Any, into: bytearray) -> Any:
    return await store.get_digested("a", [Stretch(0, len(into), memoryview(into))])


async def fails_once(
    read: Callable[[], Awaitable[object]], between: Proxy, fault: Fault, says: str | None = None
) -> None:
    """With a fault the read says that the tier is unavailable, and not that the object is short; then it works."""
    between.fail("GET", fault)
    with pytest.raises(TierUnavailable, match=says) as raised:
        await read()
    assert not isinstance(raised.value, ShortRead)
    await read()
