"""What the ranks of a store do together."""

from __future__ import annotations

import asyncio
import gc

import pytest
from reliability.ranks import World

from tieredckpt.engine.ranks.group import Group, vote
from tieredckpt.errors import NoSpace


async def test_work_that_was_started_when_the_group_closes_leaves_nothing_behind() -> None:
    (communicator,) = World(1).communicators()
    group = Group(communicator, deadline=5.0)
    begun = []

    async def work() -> None:
        begun.append(True)

    group.start(work(), "work that is never begun")
    await group.close()
    gc.collect()  # a coroutine that nobody has awaited would warn
    assert not begun


async def test_the_failure_of_a_rank_that_rank_0_leaves_without_an_answer_has_its_cause() -> None:
    """What the operating system said was lost."""
    leader, follower = (Group(communicator, deadline=0.1) for communicator in World(2).communicators())

    async def fail() -> bytes:
        raise NoSpace("no memory") from OSError("of the device")

    async def decide(_: dict[int, bytes]) -> bytes:
        return b""

    await asyncio.gather(*(group.communicator.open(timeout=5.0) for group in (leader, follower)))
    with pytest.raises(NoSpace, match="no memory") as raised:
        await vote(follower, "save", fail(), decide)
    assert isinstance(raised.value.__cause__, OSError)
    await asyncio.gather(leader.close(), follower.close())
