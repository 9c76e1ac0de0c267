"""The ranks of a world in one process die, hang and lag where the script says, and nowhere else."""

from __future__ import annotations

import asyncio
import time

import pytest
from reliability.ranks import InProcess, World

from tieredckpt import Closed, Invalid, RanksUnavailable
from tieredckpt.engine.ranks.communicator import exchange

ENOUGH = 20.0
SHORT = 0.1


async def met(world: World) -> list[InProcess]:
    ranks = world.communicators()
    await asyncio.gather(*(each.open(timeout=ENOUGH) for each in ranks))
    return ranks


async def close(ranks: list[InProcess]) -> None:
    await asyncio.gather(*(each.close() for each in ranks))


async def test_nodes_are_as_told() -> None:
    assert [each.node for each in World(3, nodes=["a", "a", "b"]).communicators()] == ["a", "a", "b"]
    assert len({each.node for each in World(3).communicators()}) == 3
    with pytest.raises(Invalid, match="3 ranks"):
        World(3, nodes=["a"])


async def test_a_rank_dies_at_the_call_that_was_named_and_says_nothing_more() -> None:
    world = World(2)
    ranks = await met(world)
    world.kill(1, "send", topic="part/*", nth=2)
    await ranks[1].send([0], "part/1", b"said")
    await ranks[1].send([0], "other", b"said")
    dying = asyncio.create_task(ranks[1].send([0], "part/2", b"never said"))
    await world.died(1)
    assert await ranks[0].recv(1, "part/1", timeout=ENOUGH) == b"said"
    assert await ranks[0].recv(1, "other", timeout=ENOUGH) == b"said"
    with pytest.raises(RanksUnavailable):
        await ranks[0].recv(1, "part/2", timeout=SHORT)
    more = asyncio.create_task(ranks[1].send([0], "part/3", b"never said"))
    await asyncio.sleep(0.02)
    assert not dying.done()
    assert not more.done()
    await close(ranks)
    outcomes = await asyncio.gather(dying, more, return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [Closed, Closed]
    assert world.calls[-1] == (0, "recv", "part/2")


@pytest.mark.parametrize("outcome", ["message", "deadline"])
async def test_a_call_under_way_never_comes_back_to_a_rank_that_was_killed(outcome: str) -> None:
    world = World(2)
    ranks = await met(world)
    taking = asyncio.create_task(ranks[1].recv(0, "word", timeout=ENOUGH if outcome == "message" else SHORT))
    await asyncio.sleep(0)  # it has begun to wait
    assert world.calls[-1] == (1, "recv", "word")
    world.kill_now(1)
    if outcome == "message":
        await ranks[0].send([1], "word", b"unheard")
    await asyncio.sleep(2 * SHORT)
    assert not taking.done()
    taking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await taking
    await close(ranks)


async def test_a_rank_hangs_until_it_is_released() -> None:
    world = World(2)
    ranks = await met(world)
    held = world.hold(1, "send")
    posting = [asyncio.create_task(ranks[1].send([0], f"word {number}", b"late")) for number in range(2)]
    await held.reached()
    with pytest.raises(RanksUnavailable):
        await ranks[0].recv(1, "word 0", timeout=SHORT)
    assert not any(task.done() for task in posting)
    held.release()
    for number in range(2):
        assert await ranks[0].recv(1, f"word {number}", timeout=ENOUGH) == b"late"
    await asyncio.gather(*posting)
    await close(ranks)


async def test_a_rank_lags_from_the_call_on_that_was_named() -> None:
    world = World(2)
    ranks = await met(world)
    world.delay(1, SHORT, "send", topic="slow", nth=2)
    world.delay(1, 100 * ENOUGH, "send", topic="slower", nth=2)
    seconds = []
    for _ in range(3):
        begin = time.monotonic()
        await ranks[1].send([0], "slow", b"")
        seconds.append(time.monotonic() - begin)
    assert min(seconds[1:]) >= SHORT
    async with asyncio.timeout(ENOUGH):
        await ranks[1].send([0], "slower", b"")
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(SHORT):
            await ranks[1].send([0], "slower", b"")
    await close(ranks)


async def test_after_a_restart_the_dead_live_and_the_script_is_forgotten() -> None:
    world = World(3)
    world.kill(2, "open")
    first = world.communicators()
    opening = [asyncio.create_task(each.open(timeout=SHORT)) for each in first]
    await world.died(2)
    assert all(isinstance(o, RanksUnavailable) for o in await asyncio.gather(*opening[:2], return_exceptions=True))
    await close(first)
    await asyncio.gather(*opening, return_exceptions=True)
    world.restart()
    ranks = await met(world)
    assert await asyncio.gather(*(exchange(each, "all", b"!", timeout=ENOUGH) for each in ranks)) == [[b"!"] * 3] * 3
    await close(ranks)


async def test_bulk_waits_for_who_receives_it() -> None:
    ranks = await met(World(2))
    sending = asyncio.create_task(ranks[0].send_bulk(1, memoryview(b"bytes"), tag=1, timeout=ENOUGH))
    await asyncio.sleep(0.02)
    assert not sending.done()
    into = bytearray(5)
    await ranks[1].recv_bulk(0, memoryview(into), tag=1, timeout=ENOUGH)
    await sending
    assert into == b"bytes"
    await close(ranks)
