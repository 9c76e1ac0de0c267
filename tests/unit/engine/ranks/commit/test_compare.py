"""Ranks compare what they should have alike at each save: whose bytes differ is named, and nobody else."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.cohort import Cohort, cohort
from support.insight import slab_of
from support.limits import limit
from support.scenes import SOON, folder

from tieredckpt.engine.ranks import ranked
from tieredckpt.engine.ranks.commit import compare
from tieredckpt.errors import Corrupt, RanksUnavailable
from tieredckpt.events import CommitFailed, ReplicasDiffer, StepCommitted, StepSaved
from tieredckpt.format.manifest import StepId

DECLARED = ("**",)


@asynccontextmanager
async def ranks_of(size: int, shared_memory: Path, tmp_path: Path, **settings: Any) -> AsyncIterator[Cohort]:
    async with cohort(size, shared_memory, tmp_path / "disk", chunk_size=64 << 10, **settings) as ranks:
        yield ranks


def replica(seed: int) -> dict[str, Any]:
    """Large leaves, a transposed one, small ones and scalars, which all ranks have alike."""
    random = np.random.default_rng(seed)
    return {
        "layers": [random.standard_normal((180, 128)).astype(np.float32) for _ in range(3)],
        "turned": random.standard_normal((96, 200)).T,
        "bias": random.standard_normal(8),
        "step": seed,
    }


def flip(array: np.ndarray[Any, Any], at: int = -1) -> None:
    """One bit."""
    array.reshape(-1).view(np.uint8)[at] ^= 4


async def save(ranks: Cohort, step: int, trees: list[dict[str, Any]], replicated: tuple[str, ...]) -> list[Any]:
    return await ranks.all(lambda store, rank: store.save(step, trees[rank], replicated=replicated))


async def named(ranks: Cohort, step: int) -> ReplicasDiffer:
    """What every rank heard of the replicas of a step, which is the same on all."""
    heard = [await each.first(ReplicasDiffer, lambda event: event.step == step) for each in ranks.heard]
    assert len(set(heard)) == 1
    return heard[0]


@pytest.mark.parametrize("nodes", [["a"] * 4, ["a", "a", "b", "b"]], ids=["one node", "two nodes"])
@pytest.mark.parametrize("rank", [0, 3])
@pytest.mark.parametrize("at", [0, -1])
async def test_a_flipped_bit_of_one_replica_is_named_with_its_rank_and_key(
    shared_memory: Path, tmp_path: Path, nodes: list[str], rank: int, at: int
) -> None:
    async with ranks_of(4, shared_memory, tmp_path, nodes=nodes) as ranks:
        trees = [replica(1) for _ in range(4)]
        await ranks.reached(await save(ranks, 1, trees, DECLARED), "ram")
        flip(trees[rank]["layers"][1], at)
        await save(ranks, 2, trees, DECLARED)
        found = await named(ranks, 2)
        assert (found.key, found.ranks, found.more) == ("layers/1", (rank,), 0)
        assert not any(event.step == 1 for heard in ranks.heard for event in heard.of(ReplicasDiffer))


@pytest.mark.parametrize("key", ["turned", "bias"])
async def test_leaves_of_any_layout_and_size_are_compared_declared_or_not(
    shared_memory: Path, tmp_path: Path, key: str
) -> None:
    async with ranks_of(3, shared_memory, tmp_path) as ranks:
        for step, replicated in ((1, DECLARED), (2, ())):
            trees = [replica(step) for _ in range(3)]
            trees[1][key] = trees[1][key] + 1
            await save(ranks, step, trees, replicated)
            found = await named(ranks, step)
            assert (found.key, found.ranks) == (key, (1,))


async def test_of_two_replicas_that_differ_both_are_named(shared_memory: Path, tmp_path: Path) -> None:
    async with ranks_of(2, shared_memory, tmp_path) as ranks:
        for step, replicated in ((1, DECLARED), (2, ())):
            trees = [replica(1), replica(1)]
            flip(trees[1]["layers"][0])
            flip(trees[1]["layers"][2])
            await save(ranks, step, trees, replicated)
            found = await named(ranks, step)
            assert (found.key, found.ranks, found.more) == ("layers/0", (0, 1), 1)


async def test_a_step_of_shares_is_committed_unless_it_is_to_be_refused(shared_memory: Path, tmp_path: Path) -> None:
    for choice in ("report", "refuse"):
        place = tmp_path / choice
        async with ranks_of(3, shared_memory / choice, place, when_replicas_differ=choice) as ranks:
            trees = [replica(1) for _ in range(3)]
            flip(trees[2]["layers"][0])
            checkpoints = await save(ranks, 1, trees, DECLARED)
            if choice == "report":
                await ranks.reached(checkpoints, "disk")
                assert not any(heard.of(CommitFailed) for heard in ranks.heard)
            else:
                for checkpoint in checkpoints:
                    with pytest.raises(RanksUnavailable, match="'layers/0' is not the same on rank 2 as on most"):
                        await checkpoint.reached("ram")
                assert [event.ranks for event in await ranks.failed()] == [(2,)] * 3
            assert (await named(ranks, 1)).ranks == (2,)
            flip(trees[2]["layers"][0])
            await ranks.reached(await save(ranks, 2, trees, DECLARED), "disk")
            assert [len(heard.of(ReplicasDiffer)) for heard in ranks.heard] == [1] * 3


async def test_a_difference_is_logged_once_while_the_same_ranks_differ(
    shared_memory: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with ranks_of(3, shared_memory, tmp_path) as ranks:
        for step, wrong in enumerate((1, 1, 2, None, 2)):
            trees = [replica(step) for _ in range(3)]
            if wrong is not None:
                flip(trees[wrong]["layers"][step % 3])
            await ranks.reached(await save(ranks, step, trees, DECLARED), "ram")
        assert [len(heard.of(ReplicasDiffer)) for heard in ranks.heard] == [4] * 3
    records: list[Any] = caplog.records
    logged = [record.args[0] for record in records if "is not the same on" in record.getMessage()]
    assert [found.step for found in logged] == [0, 2, 4]


async def test_a_share_that_differs_on_the_nodes_that_store_it_makes_no_step(
    shared_memory: Path, tmp_path: Path
) -> None:
    async with ranks_of(4, shared_memory, tmp_path, nodes=["a", "a", "b", "b"]) as ranks:
        for step, rank in ((1, 1), (2, 0)):  # ranks 0 and 2 store the first bytes
            trees = [replica(step) for _ in range(4)]
            flip(trees[rank]["layers"][0], 0)
            checkpoints = await save(ranks, step, trees, DECLARED)
            assert (await named(ranks, step)).ranks == (rank,)
            if rank == 1:
                await ranks.reached(checkpoints, "disk")
            else:
                assert [event.ranks for event in await ranks.failed(step=step)] == [(0,)] * 4


async def test_undeclared_leaves_that_differ_make_no_step(shared_memory: Path, tmp_path: Path) -> None:
    async with ranks_of(3, shared_memory, tmp_path) as ranks:
        trees = [replica(1) for _ in range(3)]
        flip(trees[1]["layers"][0])
        await save(ranks, 1, trees, ())
        for event in await ranks.failed():
            assert event.ranks == (1,)
            assert "'layers/0' is not the same on rank 1 as on most of the 3 ranks" in event.reason


async def test_what_is_ignored_is_not_read(
    shared_memory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compare, "_digests", None)
    async with ranks_of(2, shared_memory, tmp_path, when_replicas_differ="ignore") as ranks:
        trees = [replica(1), replica(2) | {"bias": replica(1)["bias"], "step": 1}]
        await ranks.reached(await save(ranks, 1, trees, DECLARED), "disk")
        assert not any(heard.of(ReplicasDiffer) for heard in ranks.heard)


async def test_only_ranks_that_differ_are_asked_for_more_than_one_digest(
    shared_memory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    answer = compare.Comparison.answer

    def noted(self: compare.Comparison, message: Any) -> Any:
        asked.append(message.attempt)
        return answer(self, message)

    monkeypatch.setattr(compare.Comparison, "answer", noted)
    async with ranks_of(3, shared_memory, tmp_path) as ranks:
        trees = [replica(1) for _ in range(3)]
        await ranks.reached(await save(ranks, 1, trees, DECLARED), "ram")
        assert not asked
        flip(trees[1]["layers"][0])
        await save(ranks, 2, trees, DECLARED)
        await named(ranks, 2)
        assert asked == ["0.2.0"] * 3


@pytest.mark.parametrize("choice", ["report", "refuse"])
async def test_a_rank_that_is_silent_when_it_is_asked_keeps_a_step_only_where_it_is_to_be_refused(
    shared_memory: Path, tmp_path: Path, choice: str
) -> None:
    async with ranks_of(4, shared_memory, tmp_path, when_replicas_differ=choice) as ranks:
        trees = [replica(1) for _ in range(4)]
        flip(trees[1]["layers"][0])
        held = ranks.world.hold(2, "send", topic="log/2")  # the first is its vote
        ranks.let_wait(1.0)
        await save(ranks, 1, trees, DECLARED)
        if choice == "refuse":
            for event in await ranks.failed([0, 1], step=1):
                assert event.ranks == (2,)
        else:
            assert (await named(ranks, 1)).ranks == (1,)
            assert not any(heard.of(CommitFailed) for heard in ranks.heard)
        held.release()


async def test_the_comparison_and_the_vote_have_one_deadline(
    shared_memory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two, the second would end when the other ranks have given up."""
    limit(monkeypatch, wait_longer=6.0)
    async with ranks_of(3, shared_memory, tmp_path) as ranks:
        trees = [replica(1) for _ in range(3)]
        flip(trees[1]["layers"][0])
        ranks.let_wait(12.0)
        votes, answers = (ranks.world.hold(2, "send", topic=topic) for topic in ("log/1", "log/2"))
        checkpoints = await save(ranks, 1, trees, DECLARED)
        await asyncio.sleep(8.0)  # of the twelve seconds
        votes.release()
        await ranks.reached(checkpoints[:2], "ram")
        answers.release()
        assert not any(heard.of(CommitFailed) for heard in ranks.heard[:2])


async def test_a_rank_that_drops_its_part_while_replicas_are_compared_is_named(
    shared_memory: Path, tmp_path: Path
) -> None:
    async with ranks_of(3, shared_memory, tmp_path) as ranks:
        trees = [replica(1) for _ in range(3)]
        flip(trees[1]["layers"][0])
        held = ranks.world.hold(2, "send", topic="log/2")  # what it has: the first is its vote
        await save(ranks, 1, trees, DECLARED)
        await held.reached()
        life, coordinator = ranks[0]._life, ranks[0]._life.engine.mode.ranked.votes.coordinator
        await life.loop.call(coordinator.part_dropped(1, StepId(1, 1)))
        held.release()
        for event in await ranks.failed(step=1):
            assert event.ranks == (1,)
            assert "it dropped its part to make room" in event.reason


async def test_a_leaf_that_only_some_ranks_have_is_named_and_no_rank_is_suspected(
    shared_memory: Path, tmp_path: Path
) -> None:
    async with ranks_of(3, shared_memory, tmp_path) as ranks:
        trees = [replica(1) for _ in range(3)]
        trees[2]["own"] = np.ones((150, 128), np.float32)
        await save(ranks, 1, trees, DECLARED)
        for event in await ranks.failed(step=1):
            assert "leaf 'own' is one that ranks have alike, and ranks 0, 1 did not save it" in event.reason
        assert not any(heard.of(ReplicasDiffer) for heard in ranks.heard)


async def test_a_rank_that_differs_in_copies_on_two_nodes_is_the_only_one_named(
    shared_memory: Path, tmp_path: Path
) -> None:
    async with ranks_of(4, shared_memory, tmp_path, nodes=["a", "a", "b", "b"]) as ranks:
        trees = [replica(1) for _ in range(4)]
        for layer, at in ((0, 0), (1, 0), (2, -1)):
            flip(trees[0]["layers"][layer], at)
        await save(ranks, 1, trees, DECLARED)
        found = await named(ranks, 1)
        assert (found.key, found.ranks, found.more) == ("layers/0", (0,), 2)
        for event in await ranks.failed(step=1):
            assert event.ranks == (0,)
            assert "not the same on rank 0 as on most of the 4 ranks" in event.reason
        assert [len(heard.of(ReplicasDiffer)) for heard in ranks.heard] == [1] * 4


@pytest.mark.parametrize("kind", ["a small slab", "no RAM tier"])
async def test_streamed_replicas_are_compared_too(shared_memory: Path, tmp_path: Path, kind: str) -> None:
    small = {"ram_settings": {"capacity": "64 KiB"}}
    settings = small if kind == "a small slab" else {"tiers": {"disk": folder(tmp_path / "disk")}}
    async with ranks_of(3, shared_memory, tmp_path, **settings) as ranks:
        trees = [replica(1) for _ in range(3)]
        flip(trees[1]["layers"][1])
        await ranks.reached(await save(ranks, 1, trees, DECLARED), "disk")
        found = await named(ranks, 1)
        assert (found.key, found.ranks) == ("layers/1", (1,))


class Held:
    """A first piece that is digested when the test says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.began, self.end = threading.Event(), threading.Event()
        self._cells = compare._cells
        monkeypatch.setattr(compare, "_cells", self.cells)

    def cells(self, *arguments: Any) -> Iterator[tuple[str, Any]]:
        for key, cell in self._cells(*arguments):
            yield key, cell if self.began.is_set() else partial(self.digest, cell)

    def digest(self, cell: Any) -> bytes:
        self.began.set()
        assert self.end.wait(SOON)
        return bytes(cell())


async def test_a_cancelled_save_ends_when_no_thread_reads_the_replicas_and_leaves_no_part(
    shared_memory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with ranks_of(2, shared_memory, tmp_path, crashing=True) as ranks:
        held = Held(monkeypatch)
        saving = asyncio.ensure_future(ranks[1].save(1, replica(1), replicated=DECLARED))
        assert await asyncio.to_thread(held.began.wait, SOON)
        saving.cancel()
        assert not (await asyncio.wait([saving], timeout=0.3))[0]
        held.end.set()
        with pytest.raises(asyncio.CancelledError):
            await saving
        await ranks[0].save(1, replica(1), replicated=DECLARED)
        await ranks.failed(step=1)
        assert slab_of(ranks[1]).used == 0
    async with ranks_of(2, shared_memory, tmp_path) as ranks:
        assert await ranks.all(lambda store, _: store.all_steps()) == [()] * 2


async def test_a_save_that_fails_after_its_copy_leaves_no_part(
    shared_memory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with ranks_of(2, shared_memory, tmp_path, crashing=True) as ranks:
        load = ranked.step_index.load

        async def fail(*_: Any) -> Any:
            monkeypatch.setattr(ranked.step_index, "load", load)
            raise Corrupt("the index is damaged")

        for store in ranks.stores:
            monkeypatch.setattr(ranked.step_index, "load", fail)
            with pytest.raises(Corrupt):
                await store.save(1, replica(1), replicated=DECLARED)
        await ranks.failed(step=1)
        assert [slab_of(store).used for store in ranks.stores] == [0, 0]
        await ranks.reached(await save(ranks, 2, [replica(2)] * 2, DECLARED), "ram")
    async with ranks_of(2, shared_memory, tmp_path) as ranks:
        assert await ranks.all(lambda store, _: store.all_steps()) == [(2,)] * 2


async def test_no_save_takes_the_room_of_one_that_is_compared(
    shared_memory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"ram_settings": {"capacity": "3MiB"}, "when_full": "replace"}  # a share takes 2 MiB
    async with ranks_of(2, shared_memory, tmp_path, **settings) as ranks:
        held = Held(monkeypatch)
        trees = {step: {"a": np.random.default_rng(step).standard_normal((1024, 512))} for step in (1, 2)}
        first = asyncio.ensure_future(ranks[1].save(1, trees[1], replicated=DECLARED))
        assert await asyncio.to_thread(held.began.wait, SOON)
        second = asyncio.ensure_future(ranks[1].save(2, trees[2], replicated=DECLARED))
        await asyncio.wait([second], timeout=0.3)
        held.end.set()
        assert "full of steps that must stay" in (await second).saved.skipped
        await ranks.reached([await first, await ranks[0].save(1, trees[1], replicated=DECLARED)], "disk")
        for restored in await ranks.restored(1):
            assert restored is not None
            np.testing.assert_array_equal(restored.tree["a"], trees[1]["a"])


async def test_the_trainers_wait_for_the_comparison_is_counted(
    shared_memory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with ranks_of(2, shared_memory, tmp_path) as ranks:
        held = Held(monkeypatch)
        saving = asyncio.ensure_future(save(ranks, 1, [replica(1)] * 2, DECLARED))
        assert await asyncio.to_thread(held.began.wait, SOON)
        await asyncio.sleep(0.5)
        held.end.set()
        await saving
        assert max(heard.of(StepSaved)[0].seconds for heard in ranks.heard) >= 0.4
        assert max(store.observed().stalled_seconds for store in ranks.stores) >= 0.4


@pytest.mark.slow
async def test_a_hundred_saves_of_equal_replicas_raise_no_alarm(shared_memory: Path, tmp_path: Path) -> None:
    async with ranks_of(4, shared_memory, tmp_path, nodes=["a", "a", "b", "b"]) as ranks:
        for step in range(100):
            trees = [replica(step) for _ in range(4)]
            replicated = (DECLARED, (), ("layers/*",))[step % 3]
            await ranks.reached(await save(ranks, step, trees, replicated), "ram")
        assert [len(heard.of(StepCommitted)) for heard in ranks.heard] == [100] * 4
        assert not any(heard.of(ReplicasDiffer) for heard in ranks.heard)
