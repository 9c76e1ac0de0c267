"""After each save the ranks agree on it, or no rank has it: whoever dies, lags, fails or contradicts."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.cohort import DEADLINE, Cohort, assert_whole, part
from support.cohort import RanksPlace as Place
from support.limits import limit
from support.scenes import SOON, folder, ram
from support.votes import SIZE, failing, held_up, votes_kept, works

from tieredckpt import Shard
from tieredckpt.checkpoint import Checkpoint
from tieredckpt.engine.ranks.commit import vote
from tieredckpt.errors import Invalid, NoSpace, NotFound, RanksUnavailable
from tieredckpt.events import CommitFailed, SaveSkipped, StepCommitted, StepEvicted
from tieredckpt.format.manifest import StepIndex
from tieredckpt.testing.faulty import Hold


@pytest.fixture
def place(shared_memory: Path, tmp_path: Path) -> Place:
    return Place(shared_memory, tmp_path / "disk")


async def test_a_step_counts_when_every_rank_has_its_part_of_it(place: Place) -> None:
    async with place.open() as ranks:
        first = await ranks.save(1, ranks=[0, 1])
        for store in ranks.stores:
            with pytest.raises(NotFound):
                await store.where(1)
        assert not any(heard.of(StepCommitted) for heard in ranks.heard)
        last = await ranks.save(1, ranks=[2])
        await ranks.reached([*first, *last], "ram")
        agreed = [heard.of(StepCommitted) for heard in ranks.heard]
        assert agreed[0] == agreed[1] == agreed[2]
        assert agreed[0][0].nbytes == sum(array.nbytes for array in arrays(part(1, 0, 1))) + (SIZE - 1) * 40


def arrays(tree: dict[str, Any]) -> list[np.ndarray[Any, Any]]:
    return [tree["w"].array, tree["common"], *tree["own"].values()]


async def test_a_save_waits_for_no_other_rank(place: Place) -> None:
    """Those that are in time save on and on, while one has not saved anything yet."""
    async with place.open() as ranks:
        early = [await ranks.save(step, ranks=[0, 2]) for step in (1, 2, 3)]
        late = [await ranks.save(step, ranks=[1]) for step in (1, 2, 3)]
        for checkpoints in zip(early, late, strict=True):
            await ranks.reached([*checkpoints[0], *checkpoints[1]], "ram")
        assert not any(heard.of(CommitFailed) for heard in ranks.heard)


@pytest.mark.parametrize("late", [0, 1])
async def test_a_rank_that_lags_past_the_deadline_costs_that_step_alone(place: Place, late: int) -> None:
    async with place.open() as ranks:
        ranks.let_wait(DEADLINE)
        others = [rank for rank in range(SIZE) if rank != late]
        checkpoints = await ranks.save(1, ranks=others)
        for event in await ranks.failed(others):
            assert event.ranks == (late,)
            assert str(late) in event.reason
        for checkpoint in checkpoints:
            with pytest.raises(RanksUnavailable, match="step 1"):
                await checkpoint.reached("ram")
        ranks.let_wait(SOON)
        if late != 0:
            await ranks.failed([late])
            (skipped,) = await ranks.save(1, ranks=[late])  # at last
            assert "not saved" in skipped.skipped
            assert ranks.heard[late].of(SaveSkipped)
            await works(ranks, 2)
        else:
            (leader,) = await ranks.save(1, ranks=[0])  # which finds that the others have it
            await leader.reached("ram")
            await asyncio.gather(
                *(heard.first(StepCommitted) for heard in ranks.heard)
            )  # till then they have given it up
            await ranks.reached(checkpoints, "ram")
            await works(ranks, 2)


async def test_a_rank_that_skips_a_save_does_not_fall_out_of_step(place: Place) -> None:
    async with place.open() as ranks:
        ranks.let_wait(DEADLINE)
        await ranks.save(1, ranks=[0, 1])
        await ranks.failed(step=1)
        ranks.let_wait(SOON)
        await works(ranks, 2)
        assert len({store._life.engine.state.branch.last_serial for store in ranks.stores}) == 1


async def test_a_save_that_is_waited_for_is_not_the_newest_once_later_ones_are_steps(place: Place) -> None:
    """Else each later step would continue the one that may be none, and those between would be off the branch."""
    async with place.open() as ranks:
        await ranks.save(1, ranks=[0, 1])  # rank 2 may come yet
        await ranks.save(2)
        await ranks.failed(step=2)  # rank 2 counts from now on as the others do
        for step in (3, 4, 5):
            await ranks.reached(await ranks.save(step), "disk")
        assert [await store.all_steps() for store in ranks.stores] == [(3, 4, 5)] * SIZE
        await ranks.save(1, ranks=[2])
        await ranks.failed(step=1)  # the serials were different ones
        await works(ranks, 6)
        assert [await store.all_steps() for store in ranks.stores] == [(3, 4, 5, 6)] * SIZE


async def test_a_save_that_only_the_leader_skips_is_given_up_with_the_next(place: Place) -> None:
    async with place.open() as ranks:
        await ranks.save(1, ranks=[1, 2])
        await ranks.save(2)
        for event in await ranks.failed([1, 2], step=1):
            assert event.ranks == (0,)
        await ranks.failed(step=2)  # the serials were different ones
        await works(ranks, 3)


async def test_votes_that_nobody_asked_for_are_not_kept(place: Place) -> None:
    async with place.open() as ranks:
        for step in (1, 2, 3):
            await ranks.save(step, ranks=[1, 2])
        await ranks.save(4)
        await ranks.failed(step=4)
        for step in (5, 6):
            await works(ranks, step)
        assert not votes_kept(ranks)


async def test_a_rank_that_dies_while_the_others_wait_fails_the_step_and_locks_nobody_up(place: Place) -> None:
    async with place.open(crashing=True) as ranks:
        ranks.let_wait(DEADLINE)
        ranks.world.kill(2, "send", topic="log/*")
        await ranks.save(1)
        await ranks.world.died(2)
        for event in await ranks.failed([0, 1]):
            assert event.ranks == (2,)
        await asyncio.gather(*(ranks[rank].flush() for rank in (0, 1)))


async def test_a_leader_that_dies_leaves_the_others_with_a_clear_event(place: Place) -> None:
    async with place.open(crashing=True) as ranks:
        ranks.let_wait(DEADLINE)
        ranks.world.kill(0, "send", topic="log/*")  # its decision
        await ranks.save(1)
        for event in await ranks.failed([1, 2]):
            assert event.ranks == (0,)


async def test_what_could_not_be_told_for_a_moment_is_told_after_all(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit(monkeypatch, send_again=0.02)
    async with place.open() as ranks:
        communicator = ranks[0]._life.engine.mode.ranked.group.communicator
        send, failures = communicator.send, iter([1, 2])

        async def fails_at_first(to: Collection[int], topic: str, data: bytes) -> None:
            if topic.startswith("log/") and next(failures, None) is not None:
                raise RanksUnavailable("by script")
            await send(to, topic, data)

        monkeypatch.setattr(communicator, "send", fails_at_first)
        await works(ranks, 1)
        await works(ranks, 2)


async def test_a_rank_that_hangs_before_it_hears_what_was_decided_catches_up(place: Place) -> None:
    async with place.open() as ranks:
        held: Hold = ranks.world.hold(1, "recv", topic="log/*")
        await ranks.reached(await ranks.save(1), "ram")
        await held.reached()
        checkpoints = await ranks.save(2)
        await ranks.reached([checkpoints[0], checkpoints[2]], "ram")
        assert [event.step for event in ranks.heard[1].of(StepCommitted)] == [1]
        held.release()
        await ranks.reached(checkpoints, "disk")


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda tree: tree | {"epoch": 99}, "epoch"),
        (lambda tree: tree | {"common": tree["common"].astype(np.float32)}, "common"),
        (lambda tree: tree | {"common": tree["common"] + 1}, "common"),
        (lambda tree: tree | {"common": tree["common"][:3]}, "common"),
        (lambda tree: tree | {"common": [tree["common"]]}, "common"),
        (lambda tree: tree | {"w": Shard(tree["w"].array, shape=tree["w"].shape, offset=(0, 0))}, "'w'"),
        (lambda tree: tree | {"w": Shard(tree["w"].array[1:], shape=tree["w"].shape, offset=tree["w"].offset)}, "'w'"),
        (lambda tree: {key: value for key, value in tree.items() if key != "w"}, "'w'"),
    ],
    ids=["scalar", "dtype", "value", "shape", "structure", "overlap", "gap", "missing"],
)
async def test_ranks_that_contradict_each_other_make_no_step(
    place: Place, change: Callable[[dict[str, Any]], dict[str, Any]], told: str
) -> None:
    async with place.open() as ranks:
        trees = [part(1, rank, SIZE) for rank in range(SIZE)]
        trees[1] = change(trees[1])
        checkpoints = await ranks.all(lambda store, rank: store.save(1, trees[rank]))
        for event in await ranks.failed():
            assert told in event.reason
        for checkpoint in checkpoints:
            with pytest.raises(RanksUnavailable, match="not committed"):
                await checkpoint.reached("ram")
        await works(ranks, 2)
        assert [step.step for step in await ranks[1].steps()] == [2]


async def test_different_steps_at_one_time_are_not_taken_for_one(place: Place) -> None:
    async with place.open() as ranks:
        ranks.let_wait(DEADLINE)
        await asyncio.gather(ranks.save(1, ranks=[0, 1]), ranks.save(7, ranks=[2]))
        await ranks.failed(step=1)
        await ranks.save(2)
        await ranks.failed(step=7, ranks=[2])
        ranks.let_wait(SOON)
        await ranks.save(3)
        await works(ranks, 4)


async def test_a_save_that_fails_on_one_rank_fails_on_all_with_its_words(place: Place) -> None:
    async with place.open() as ranks:
        trees = [part(2, rank, SIZE) for rank in range(SIZE)]
        with failing(ranks[1], OSError("the device is gone")):
            results = await asyncio.gather(
                *(store.save(2, trees[rank]) for rank, store in enumerate(ranks.stores)), return_exceptions=True
            )
        assert isinstance(results[1], OSError)
        for event in await ranks.failed(step=2):
            assert event.ranks == (1,)
            assert "the device is gone" in event.reason
        await works(ranks, 3)


@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize("hurt", [0, 1])
async def test_a_save_that_fails_on_one_rank_costs_none_that_is_made_before_all_know(
    place: Place, hurt: int, early: bool
) -> None:
    """Promise 5: whoever fails counts the save as the others do, who have made it."""
    async with place.open() as ranks:
        with failing(ranks[hurt], OSError("by script"), early=early), pytest.raises(OSError, match="by script"):
            await ranks.save(1, ranks=[hurt])
        first, last = (rank for rank in range(SIZE) if rank != hurt)
        await ranks.save(1, ranks=[first])
        checkpoints = await ranks.save(2, ranks=[hurt, first])
        await ranks.save(1, ranks=[last])
        checkpoints += await ranks.save(2, ranks=[last])
        await ranks.failed(step=1)
        await ranks.reached(checkpoints, "disk")
        await works(ranks, 3)


@pytest.mark.parametrize("hurt", [0, 1])
@pytest.mark.parametrize(
    ("change", "capture", "told"),
    [
        ({"own": {"bad": object()}}, "copy", "own/bad"),
        ({"own": {"bad": object()}}, "lazy", "own/bad"),
        ({}, "reference", "needs immutable arrays"),
        ({}, "copy", "CancelledError"),
    ],
    ids=["leaf", "leaf of a lazy save", "mutable", "cancelled"],
)
async def test_a_save_that_one_rank_cannot_begin_fails_on_the_others_at_once(
    place: Place, change: dict[str, Any], capture: Any, told: str, hurt: int
) -> None:
    """Promise 5: they waited for its vote as long as for a rank that has died, and lost the next save too."""
    async with place.open() as ranks:
        others = [rank for rank in range(SIZE) if rank != hurt]
        checkpoints = await ranks.save(1, ranks=others)
        busy = threading.Event()
        ranks[hurt]._life.loop.soon(lambda: busy.wait(SOON))
        saving = asyncio.create_task(ranks[hurt].save(1, part(1, hurt, SIZE) | change, capture=capture))
        await asyncio.sleep(0.05)
        if told == "CancelledError":
            saving.cancel()
            await asyncio.sleep(0.05)  # or the save could begin before it hears of that
        busy.set()
        with pytest.raises((Invalid, asyncio.CancelledError)):
            await saving
        begin = time.monotonic()
        for event in await ranks.failed(others, step=1):
            assert event.ranks == (hurt,)
            assert f"rank {hurt}: " in event.reason
            assert told in event.reason
        for checkpoint in checkpoints:
            with pytest.raises(RanksUnavailable, match=f"rank {hurt} has not saved it"):
                await checkpoint.reached("disk")
        assert time.monotonic() - begin < SOON / 4
        await ranks.failed([hurt], step=1)
        await works(ranks, 2)


async def test_what_is_given_up_leaves_its_memory(place: Place) -> None:
    async with place.open() as ranks:
        ranks.let_wait(DEADLINE)
        await ranks.save(1, ranks=[0, 1])
        await ranks.failed(step=1)
        for store in (ranks[0], ranks[1]):
            await store.flush()
            ram = store._life.engine.state.tiers[0].ram
            assert ram is not None
            async with asyncio.timeout(20):
                while ram.slab.used:  # the part goes just after the failure was told
                    await asyncio.sleep(0.01)


@pytest.mark.parametrize("decided", [False, True], ids=["before the decision", "while it is on the way"])
async def test_a_step_of_which_a_rank_has_dropped_its_part_replaces_no_good_copy(place: Place, decided: bool) -> None:
    """Promises 3 and 6: rank 1 makes room with what it voted for and what rank 0 had not decided on for too long."""
    tiers = {"ram": ram(place.shared_memory, capacity=1_200_000, on_close="keep")}  # for two steps
    async with place.open(2, tiers=tiers, crashing=True) as ranks:
        await ranks.reached(await ranks.save(1), "ram")
        ranks.let_wait(DEADLINE)
        await ranks.save(2, ranks=[1])
        await ranks.failed([1], step=2)
        held: Hold | None = ranks.world.hold(1, "send", topic="log/*") if decided else None
        await ranks.save(3, ranks=[1])
        ranks.let_wait(SOON)
        (late,) = await ranks.save(2, ranks=[0])
        if held is not None:
            await late.reached("ram")
            held.release()
            await ranks.heard[0].first(StepEvicted, lambda event: event.step == 2)
        else:
            with pytest.raises(RanksUnavailable, match="rank 1: it dropped its part"):
                await late.reached("ram")
        assert [step.step for step in await ranks[0].steps()] == [1]
    async with place.open(2, tiers=tiers) as ranks:
        for restored in await ranks.restored():
            assert_whole(restored, 1)


@pytest.mark.parametrize("how", ["too late", "two too late"])
async def test_of_a_part_that_left_with_a_vote_that_rank_0_did_not_count_all_ranks_know(
    shared_memory: Path, tmp_path: Path, how: str
) -> None:
    """Rank 0 dropped that vote unread: a restore of the step found it lost, and it counted as a good copy."""
    tiers = {
        "ram": ram(shared_memory, capacity=2_000_000, on_close="keep", retain={"kind": "last_n", "n": 9}),
        "disk": folder(tmp_path / "disk", promote="never"),
    }

    async def saved(ranks: Cohort, step: int) -> list[Checkpoint]:
        more = {"more": np.random.default_rng(step).integers(0, 255, 300_000, np.uint8)}  # rank 1 has RAM for two steps
        trees = [part(step, 0, 2), part(step, 1, 2) | {"own": more}]
        return await ranks.all(lambda store, rank: store.save(step, trees[rank]))

    async with Place(shared_memory, tmp_path / "disk", 2).open(tiers=tiers, crashing=True) as ranks:
        for step in (1, 2):
            await ranks.reached(await saved(ranks, step), "ram")
        ranks.let_wait(DEADLINE)
        held = ranks.world.hold(1, "send", topic="log/*")
        for step in (3, 4) if how == "two too late" else (3,):
            await saved(ranks, step)
            await ranks.failed(step=step)
        held.release()
        ranks.let_wait(SOON)
        await ranks.reached(await saved(ranks, 5), "ram")
        assert [[info.step for info in await store.steps()] for store in ranks.stores] == [[2, 5], [2, 5]]
        with pytest.raises(NotFound):
            await ranks.restored(1)


async def test_a_vote_for_a_save_that_was_aborted_while_it_was_encoded_leaves_its_memory(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    encode_own, is_held, go_on = vote.encode_own, threading.Event(), threading.Event()

    def late(index: StepIndex) -> bytes:
        if index.record.id.step == 2 and not is_held.is_set():
            is_held.set()
            assert go_on.wait(SOON)
        return encode_own(index)

    async with place.open() as ranks:
        await works(ranks, 1)
        ranks.let_wait(DEADLINE)
        monkeypatch.setattr(vote, "encode_own", late)
        await ranks.save(2, ranks=[1])
        assert await asyncio.to_thread(is_held.wait, SOON)
        await ranks.save(2, ranks=[rank for rank in range(SIZE) if rank != 1])
        await ranks.failed(step=2)
        go_on.set()
        ranks.let_wait(SOON)
        for step in (3, 4):
            await works(ranks, step)
        assert not votes_kept(ranks)


async def test_a_save_that_was_aborted_while_it_is_copied_is_told_so_after_a_restore(place: Place) -> None:
    """Its rank voted on it, and waited for a decision that had been made."""
    async with place.open() as ranks:
        await works(ranks, 1)
        ranks.let_wait(DEADLINE)
        with held_up(ranks[1]) as (is_held, go_on):
            saving = asyncio.create_task(ranks.save(2, ranks=[1]))
            assert await asyncio.to_thread(is_held.wait, SOON)
            await ranks.save(2, ranks=[0, 2])
            await ranks.failed(step=2)
            ranks.let_wait(SOON)
            await ranks.restored()
            go_on.set()
        (checkpoint,) = await saving
        with pytest.raises(RanksUnavailable, match="rank 1 has not saved it within"):
            await checkpoint.reached("disk")


@pytest.mark.parametrize("restores", [False, True])
async def test_a_vote_against_a_save_that_rank_0_never_makes_leaves_its_memory(place: Place, restores: bool) -> None:
    async with place.open() as ranks:
        await works(ranks, 1)
        with failing(ranks[1], NoSpace("by script")), pytest.raises(NoSpace):
            await ranks.save(2, ranks=[1])
        if restores:
            await ranks.restored()
        await ranks.save(3)
        await ranks.failed(step=3)  # the others have skipped a save before
        for step in (4, 5):
            await works(ranks, step)
        assert not votes_kept(ranks)


@pytest.mark.parametrize("when", ["before it is sent", "while it is on the way"])
async def test_a_vote_against_a_save_that_was_decided_leaves_its_memory(place: Place, when: str) -> None:
    async with place.open() as ranks:
        ranks.let_wait(DEADLINE)
        others = [rank for rank in range(SIZE) if rank != 1]
        held = ranks.world.hold(1, "send", topic="log/*")
        with failing(ranks[1], NoSpace("by script")), held_up(ranks[1], early=True) as (is_held, go_on):
            if when == "while it is on the way":
                go_on.set()
            saving = asyncio.create_task(ranks.save(1, ranks=[1]))
            assert await asyncio.to_thread(is_held.wait, SOON)
            await ranks.save(1, ranks=others)
            await ranks.failed(step=1)
            go_on.set()
            await asyncio.gather(saving, return_exceptions=True)
        held.release()
        ranks.let_wait(SOON)
        await works(ranks, 2)
        assert not votes_kept(ranks)


async def test_votes_that_come_after_the_decision_leave_their_memory_whatever_was_decided(place: Place) -> None:
    """Where all that came in time were against the save, no serial tells that the others are late."""
    async with place.open(2) as ranks:
        await works(ranks, 1)
        ranks.let_wait(DEADLINE)
        for step in (2, 3):
            held = ranks.world.hold(1, "send", topic="log/*")
            with failing(ranks[0], NoSpace("by script")), pytest.raises(NoSpace):
                await ranks.save(step)
            await ranks.failed(step=step)
            held.release()
        ranks[1].signal("all heard")  # it comes after the votes
        observation = ranks[0]._life.engine.state.observation
        async with asyncio.timeout(SOON):
            while "all heard" not in observation.signals:
                await asyncio.sleep(0.01)
        assert not votes_kept(ranks)


async def test_a_vote_counts_though_what_left_with_it_cannot_be_evicted(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(steps: object) -> None:
        raise OSError("by script")

    async with place.open() as ranks:
        monkeypatch.setattr(ranks[0]._life.engine.mode.ranked._departed, "forget", fail)
        await ranks.reached(await ranks.save(1), "ram")
