"""All ranks number their saves in the order of the calls, also those that one rank refuses, loses or never begins."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from support.cohort import DEADLINE, assert_whole, part
from support.cohort import RanksPlace as Place
from support.limits import limit
from support.scenes import SOON, polled
from support.votes import SIZE, held_up, votes_kept, works

from tieredckpt import CheckpointStore
from tieredckpt.checkpoint import Checkpoint
from tieredckpt.errors import Conflict, Invalid


@pytest.fixture
def place(shared_memory: Path, tmp_path: Path) -> Place:
    return Place(shared_memory, tmp_path / "disk")


@pytest.mark.parametrize("hurt", [0, 1])
@pytest.mark.parametrize("how", ["cancelled", "refused"])
async def test_a_save_that_is_lost_while_it_waits_for_another_costs_no_other_save(
    place: Place, monkeypatch: pytest.MonkeyPatch, how: str, hurt: int
) -> None:
    limit(monkeypatch, save_again=0.0)
    others = [rank for rank in range(SIZE) if rank != hurt]
    async with place.open() as ranks:
        with held_up(ranks[hurt], early=True) as (is_held, go_on):
            first = asyncio.create_task(ranks.save(1, ranks=[hurt]))
            assert await asyncio.to_thread(is_held.wait, SOON)
            change = {"own": {"bad": object()}} if how == "refused" else {}
            waiting = asyncio.create_task(ranks[hurt].save(2, part(2, hurt, SIZE) | change))
            await asyncio.sleep(0.05)
            if how == "cancelled":
                waiting.cancel()
            with pytest.raises((Invalid, asyncio.CancelledError)):
                await waiting
            await asyncio.sleep(0.05)
            go_on.set()
        checkpoints = {1: await first, 3: await ranks.save(3, ranks=[hurt])}
        for step in (1, 2, 3):
            checkpoints.setdefault(step, []).extend(await ranks.save(step, ranks=others))
        for step in (1, 3):
            await ranks.reached(checkpoints[step], "disk")
        for event in await ranks.failed(step=2):
            assert event.ranks == (hurt,)


async def test_a_vote_against_a_save_that_comes_before_those_ahead_of_it_are_numbered_counts(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 forgot it with its decision on the first of these, and waited for it for the whole deadline."""
    limit(monkeypatch, save_again=0.0)
    async with place.open() as ranks:
        with held_up(ranks[1], early=True) as (is_held, go_on):
            first = asyncio.create_task(ranks.save(1, ranks=[1]))
            assert await asyncio.to_thread(is_held.wait, SOON)
            with pytest.raises(Invalid):
                await ranks[1].save(2, part(2, 1, SIZE) | {"own": {"bad": object()}})
            async with asyncio.timeout(SOON):
                while not votes_kept(ranks):
                    await asyncio.sleep(0.01)
            go_on.set()
        await ranks.reached([*await first, *await ranks.save(1, ranks=[0, 2])], "disk")
        await ranks.save(2, ranks=[0, 2])
        for event in await ranks.failed(step=2):
            assert event.ranks == (1,)
            assert "bad" in event.reason


@pytest.mark.parametrize("hurt", [0, 1])
async def test_a_save_that_is_refused_behind_others_costs_none_of_them_though_other_ranks_are_ahead(
    place: Place, hurt: int
) -> None:
    """The decision on it came before this rank had numbered those, which then began after it."""
    others = [rank for rank in range(SIZE) if rank != hurt]
    async with place.open() as ranks:
        turns = ranks[hurt]._life.engine.mode.ranked.votes.turns
        with held_up(ranks[hurt], early=True) as (is_held, go_on):
            saving = [asyncio.create_task(ranks.save(1, ranks=[hurt]))]
            assert await asyncio.to_thread(is_held.wait, SOON)
            saving.append(asyncio.create_task(ranks.save(2, ranks=[hurt])))
            await polled(lambda: len(turns._due) == 2)
            with pytest.raises(Invalid):
                await ranks[hurt].save(3, part(3, hurt, SIZE) | {"own": {"bad": object()}})
            ahead = [await ranks.save(step, ranks=others) for step in (1, 2, 3)]
            await ranks.failed(step=3)
            go_on.set()
        for there, here in zip(ahead, saving, strict=False):
            await ranks.reached([*there, *await here], "disk")
        await works(ranks, 4)


async def test_a_rank_that_copies_past_the_deadline_of_two_saves_makes_the_third_with_the_others(place: Place) -> None:
    """It went back to the number of the save that it copied, when it ended."""
    async with place.open() as ranks:
        with held_up(ranks[1]) as (is_held, go_on):
            saving = asyncio.create_task(ranks.save(1, ranks=[1]))
            assert await asyncio.to_thread(is_held.wait, SOON)
            ranks.let_wait(DEADLINE)
            for step in (1, 2):
                await ranks.save(step, ranks=[0, 2])
                await ranks.failed(step=step)
            ranks.let_wait(SOON)
            go_on.set()
            await saving
        (skipped,) = await ranks.save(2, ranks=[1])
        assert "not saved" in skipped.skipped
        await works(ranks, 3)


async def test_saves_called_at_the_same_time_are_made_in_the_order_of_the_calls_by_all_ranks(place: Place) -> None:
    """Decision 26: the tree that was flattened first came first, a race in each rank, and a refused one last."""
    many = {"many": {str(key): key for key in range(3000)}}
    async with place.open() as ranks:
        for first in range(1, 13, 3):
            checkpoints: list[Checkpoint] = []

            def saves(rank: int, first: int = first) -> list[Any]:
                trees = [part(first, rank, SIZE) | many, {"bad": object()}, part(first + 2, rank, SIZE)]
                return [ranks[rank].save(step, tree) for step, tree in enumerate(trees, first)]

            calls = [asyncio.gather(*saves(rank), return_exceptions=True) for rank in range(SIZE)]
            for one, refused, other in await asyncio.gather(*calls):
                assert isinstance(refused, Invalid)
                assert one.saved.step < other.saved.step
                checkpoints += one, other
            await ranks.reached(checkpoints, "disk")
        await works(ranks, 13)


@pytest.mark.parametrize("hurt", [0, 1])
async def test_a_call_that_is_cancelled_behind_others_costs_none_of_them(place: Place, hurt: int) -> None:
    """Its rank numbered it before a call that was still waiting until an earlier lazy save had its copy."""
    async with place.open() as ranks:
        calls = []
        with held_up(ranks[hurt], early=True) as (_, go_on):
            for step in (1, 2, 3):
                saving = ranks[hurt].save(step, part(step, hurt, SIZE), capture="lazy")
                calls.append(asyncio.create_task(saving))
                await (calls[0] if step == 1 else asyncio.sleep(0))
            calls[2].cancel()
            await asyncio.wait(calls[2:])
            assert not calls[1].done()
            go_on.set()
            mine = [await call for call in calls[:2]]
        for step in (1, 2, 3):
            others = await ranks.save(step, ranks=[rank for rank in range(SIZE) if rank != hurt])
            if step < 3:
                await ranks.reached([mine[step - 1], *others], "disk")
        await ranks.failed(step=3)
        await works(ranks, 4)


@pytest.mark.parametrize("hurt", [0, 1])
async def test_a_save_that_a_rank_calls_again_without_what_was_refused_is_made_by_all(place: Place, hurt: int) -> None:
    async with place.open() as ranks:
        others = [rank for rank in range(SIZE) if rank != hurt]
        checkpoints = await ranks.save(1, ranks=others)
        with pytest.raises(Invalid, match="bad"):
            await ranks[hurt].save(1, part(1, hurt, SIZE) | {"bad": object()})
        checkpoints.append(await ranks[hurt].save(1, part(1, hurt, SIZE)))
        await ranks.reached(checkpoints, "disk")
        await works(ranks, 2)


@pytest.mark.parametrize("hurt", [0, 1])
async def test_a_save_that_is_refused_before_a_restore_costs_none_after_it(place: Place, hurt: int) -> None:
    """Its rank voted on it after the restore, as on another save: the ranks waited in vain for votes on both."""
    async with place.open() as ranks:
        await works(ranks, 1)
        await ranks.save(2, ranks=[rank for rank in range(SIZE) if rank != hurt])
        with pytest.raises(Invalid, match="bad"):
            await ranks[hurt].save(2, part(2, hurt, SIZE) | {"bad": object()})
        for restored in await ranks.restored():
            assert_whole(restored, 1)
        for event in await ranks.failed(step=2):
            assert event.ranks == (hurt,)
        await works(ranks, 2)
        assert not votes_kept(ranks)


@pytest.mark.parametrize("call", ["invalid", "saved before"])
async def test_a_save_that_no_rank_can_make_costs_no_other(place: Place, call: str) -> None:
    """Whenever each of them hears of it, they number the saves that they go on to make alike."""
    async with place.open() as ranks:
        await works(ranks, 1)

        async def save(store: CheckpointStore, rank: int) -> list[Checkpoint]:
            tree = part(1, rank, SIZE)
            with pytest.raises((Conflict, Invalid)):
                await store.save(
                    1 if call == "saved before" else 2, tree | ({"bad": object()} if call == "invalid" else {})
                )
            await asyncio.sleep(0.05 * rank)
            return [await store.save(step, part(step, rank, SIZE)) for step in (2, 3)]

        for checkpoints in await ranks.all(save):
            await ranks.reached(checkpoints, "disk")


async def test_a_rank_that_is_two_saves_behind_when_a_third_is_aborted_makes_the_next_with_the_others(
    place: Place,
) -> None:
    """It numbered the second after the third, and so counted one more than the others."""
    async with place.open() as ranks:
        await works(ranks, 1)
        ranks.let_wait(DEADLINE)
        turns = ranks[1]._life.engine.mode.ranked.votes.turns
        with held_up(ranks[1], early=True) as (is_held, go_on):
            behind = [asyncio.create_task(ranks.save(2, ranks=[1]))]
            assert await asyncio.to_thread(is_held.wait, SOON)
            behind.append(asyncio.create_task(ranks.save(3, ranks=[1])))
            await polled(lambda: len(turns._due) == 2)
            for step in (2, 3, 4):
                await ranks.save(step, ranks=[0, 2])
            await ranks.failed(step=4)
            go_on.set()
        await asyncio.gather(*behind)
        ranks.let_wait(SOON)
        (missed,) = await ranks.save(4, ranks=[1])
        assert missed.skipped
        await works(ranks, 5)
