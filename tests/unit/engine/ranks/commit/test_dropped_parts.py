"""What becomes of parts on which rank 0 decides late, where a rank needs their room: promises 3 and 6."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from unittest import mock

import pytest
from support.cohort import DEADLINE, Cohort, assert_whole
from support.cohort import RanksPlace as Place
from support.scenes import SOON, polled, ram

from tieredckpt.engine.tier.tier import Tier
from tieredckpt.errors import RanksUnavailable
from tieredckpt.events import StepEvicted
from tieredckpt.format.manifest import StepId


@pytest.fixture
def place(shared_memory: Path, tmp_path: Path) -> Place:
    return Place(shared_memory, tmp_path / "disk", 2)


@contextlib.asynccontextmanager
async def first_drop_held_up(ranks: Cohort) -> AsyncIterator[threading.Event]:
    """Inside the block, hold up rank 1 before it drops a part; yields an event of that."""
    evictor, begun, go_on = ranks[1]._life.engine.collector.evictor, threading.Event(), threading.Event()
    drop_part = evictor.drop_part

    async def held_up(step: StepId, tier: Tier) -> None:
        if not begun.is_set():
            begun.set()
            await asyncio.to_thread(go_on.wait, SOON)
        await drop_part(step, tier)

    with mock.patch.object(evictor, "drop_part", held_up):
        try:
            yield begun
        finally:
            go_on.set()


async def alone_on_rank_1(ranks: Cohort, *steps: int) -> None:
    """Rank 1 saves steps that rank 0 has not saved within the deadline."""
    ranks.let_wait(DEADLINE)
    for step in steps:
        await ranks.save(step, ranks=[1])
        await ranks.failed([1], step=step)
    ranks.let_wait(SOON)


async def test_rank_0_knows_of_a_part_that_goes_before_it_has_gone(place: Place) -> None:
    """Else it could commit the step, and answer that it is in RAM, while the part goes."""
    tiers = {"ram": ram(place.shared_memory, capacity=1_200_000, on_close="keep")}  # for two steps
    async with place.open(tiers=tiers, crashing=True) as ranks:
        await ranks.reached(await ranks.save(1), "ram")
        await alone_on_rank_1(ranks, 2)
        votes = ranks[0]._life.engine.mode.ranked.votes.coordinator._box._votes
        async with first_drop_held_up(ranks) as begun:
            saving = asyncio.ensure_future(ranks.save(3, ranks=[1]))
            await polled(begun.is_set, within=SOON / 2)
            await polled(
                lambda: any(ballot.failure for each in votes.values() for ballot in each.values()), within=SOON / 2
            )
            (late,) = await ranks.save(2, ranks=[0])
            with pytest.raises(RanksUnavailable, match="rank 1: it dropped its part"):
                await late.reached("ram")
        await saving


async def test_a_part_whose_step_is_committed_while_another_part_goes_stays(place: Place) -> None:
    tiers = {"ram": ram(place.shared_memory, capacity=1_900_000, on_close="keep")}  # for three steps
    async with place.open(tiers=tiers, crashing=True) as ranks:
        await ranks.reached(await ranks.save(1), "ram")
        await alone_on_rank_1(ranks, 2, 3)
        held = ranks[1]._life.engine.state.tiers[0].steps.held
        async with first_drop_held_up(ranks) as begun:
            saving = asyncio.ensure_future(ranks.save(4, ranks=[1]))
            await polled(begun.is_set, within=SOON / 2)
            await ranks.save(2, ranks=[0])
            await ranks.failed([0], step=2)
            (late,) = await ranks.save(3, ranks=[0])
            await late.reached("ram")
            await polled(lambda: any(step.step == 3 for step in held), within=SOON / 2)
        await saving
        assert [step.step for step in await ranks[1].steps()] == [3]
    async with place.open(tiers=tiers) as ranks:
        for restored in await ranks.restored(3):
            assert_whole(restored, 3)


@pytest.mark.parametrize("ends", [False, True], ids=["rank 0 is silent", "rank 0 closes too"])
async def test_a_rank_that_closes_keeps_a_part_that_rank_0_may_still_commit(place: Place, ends: bool) -> None:
    """Once rank 0 has closed it commits nothing, and memory that nobody uses is given back."""
    async with place.open(ram_settings={"on_close": "release"}, crashing=not ends) as ranks:
        await ranks.reached(await ranks.save(1), "disk")
        await alone_on_rank_1(ranks, 2)
        if ends:
            await ranks[0].evict(1, "ram")  # rank 1 hears that rank 0 lives
            await ranks.heard[1].first(StepEvicted)
        else:
            ranks.let_wait(DEADLINE)
            await ranks[1].close()
            (late,) = await ranks.save(2, ranks=[0])
            await late.reached("ram")
    assert bool(list(place.shared_memory.glob("*/of-test/ram/*/rank-1/steps/*-000002"))) is not ends
