"""Bytes come over messages as they come in bulk: whole, in order, or with an error in time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from reliability.ranks import InProcess, World
from support.limits import limit

from tieredckpt.engine.ranks.restore.peers import MessageBulk
from tieredckpt.errors import RanksUnavailable

SOON = 20.0


@asynccontextmanager
async def pair(world: World) -> AsyncIterator[tuple[InProcess, InProcess]]:
    one, other = world.communicators()
    await asyncio.gather(one.open(timeout=SOON), other.open(timeout=SOON))
    yield one, other
    await asyncio.gather(one.close(), other.close())


async def test_bytes_arrive_in_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    limit(monkeypatch, message_size=1000)
    sent = [bytes([i]) * (700 * i) for i in range(6)]
    async with pair(World(2, bulk=False)) as (one, other):
        giver, taker = MessageBulk(one), MessageBulk(other)
        got = [bytearray(len(each)) for each in sent]

        async def give() -> None:
            for each in sent:
                await giver.send_bulk(1, memoryview(each), tag=3, timeout=SOON)

        async def take() -> None:
            for each in got:
                await taker.recv_bulk(0, memoryview(each), tag=3, timeout=SOON)

        await asyncio.gather(give(), take())
        assert [bytes(each) for each in got] == sent


@pytest.mark.parametrize("silent", [0, 1])
async def test_a_silent_rank_is_waited_for_until_the_deadline(silent: int) -> None:
    async with pair(World(2, bulk=False)) as communicators:
        alive = MessageBulk(communicators[1 - silent])
        with pytest.raises(RanksUnavailable):
            await (alive.send_bulk if silent else alive.recv_bulk)(
                silent, memoryview(bytearray(10)), tag=1, timeout=0.1
            )
