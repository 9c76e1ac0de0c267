"""Any number of ranks restores what any other number saved, from RAM and from the shared tier, bit for bit."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.cohort import COLUMNS, DEADLINE, ROWS, RanksPlace, assert_whole, blank, common, part, whole
from support.insight import flip, mapped_below, tier_of
from support.scenes import SOON, config, folder, steps_on

from tieredckpt import CheckpointStore, Shard, Sharded
from tieredckpt.blobs.wrap import Deadline
from tieredckpt.engine.keeping.retention import evict_until
from tieredckpt.engine.tier import step_index
from tieredckpt.engine.tier.tier import Tier
from tieredckpt.errors import Corrupt, Invalid, NotFound, RanksUnavailable, TieredCkptError, TierUnavailable
from tieredckpt.events import StepEvicted
from tieredckpt.format.manifest import StepId


class Place(RanksPlace):
    def rams(self) -> list[str]:
        """Folders of ranks in shared memory."""
        return sorted(path.parent.name for path in self.shared_memory.glob("*/of-test/ram/*/rank-*/slab.json"))


@pytest.fixture
def place(shared_memory: Path, tmp_path: Path) -> Place:
    return Place(shared_memory, tmp_path / "disk")


@pytest.mark.parametrize("capacity", ["16 MiB", "64 KiB"])
async def test_a_restore_right_after_a_save_gives_what_was_saved(place: Place, capacity: str) -> None:
    """Also where the step does not fit into RAM."""
    async with place.open(2, ram_settings={"capacity": capacity}) as ranks:
        for step in (1, 2):
            await ranks.save(step)
            for restored in await ranks.restored():
                assert_whole(restored, step)


async def test_pieces_of_a_rank_that_share_memory_are_refused_on_all_ranks(place: Place) -> None:
    async with place.open(2) as ranks:
        await ranks.reached(await ranks.save(1), "disk")
        trees = [blank(rank, ranks.size) for rank in range(ranks.size)]
        own = trees[1]["w"]
        other = Shard(own.array, own.shape, (0,) * len(own.shape))
        trees[1] = {"w": Sharded([own, other])}
        outcomes = await asyncio.gather(
            *(store.restore(into=tree) for store, tree in zip(ranks.stores, trees, strict=True)), return_exceptions=True
        )
        assert all(isinstance(outcome, Exception) for outcome in outcomes)
        assert "share memory" in str(outcomes[1])
        assert not own.array.any()


@pytest.mark.parametrize(("before", "after"), [(8, 3), (3, 8), (4, 1), (2, 6)])
@pytest.mark.parametrize("source", ["ram", "disk"])
async def test_another_number_of_ranks_restores_the_step(place: Place, before: int, after: int, source: str) -> None:
    promote = "always" if source == "disk" else "never"
    async with place.open(before, crashing=True, disk_settings={"promote": promote}) as ranks:
        await ranks.reached(await ranks.save(1), source)
    if source == "disk":
        place.lose_ram()
    elif after == 1:
        return  # a store of one process looks for no RAM of ranks
    async with place.open(after, disk_settings={"promote": promote}) as ranks:
        for sources in await ranks.restore_into(1):
            assert (sources.get("disk", 0) > 0) == ((source == "disk" and "peers" not in sources) or "disk" in sources)
            if source == "ram":
                assert set(sources) == {"ram"}
        for restored in await ranks.restored():
            assert_whole(restored, 1)
        await ranks.reached(await ranks.save(2), "ram")


async def test_a_step_that_is_only_in_the_ram_of_former_ranks_still_gets_to_the_shared_tier(place: Place) -> None:
    async with place.open(5 + 1, crashing=True, disk_settings={"promote": "never"}) as ranks:
        await ranks.reached(await ranks.save(1), "ram")
    async with place.open(2) as ranks:
        await ranks.flush()
        assert [await store.where(1) for store in ranks.stores] == [("ram", "disk")] * 2
    place.lose_ram()
    async with CheckpointStore.open(config({"disk": folder(place.disk)}), ranks=None) as store:
        assert_whole(await store.restore(), 1)


async def test_the_memory_of_former_ranks_is_given_back_once_it_is_not_needed(place: Place) -> None:
    async with place.open(4, crashing=True) as ranks:
        await ranks.reached(await ranks.save(1), "disk")
    assert len(place.rams()) == 4
    async with place.open(2) as ranks:
        assert len(place.rams()) == 2 + 2
        await ranks.reached(await ranks.save(2), "disk")
        await asyncio.gather(*(heard.first(StepEvicted) for heard in ranks.heard))
        await ranks.flush()
        async with asyncio.timeout(10):
            while len(place.rams()) > 2:  # folders make no events
                await asyncio.sleep(0.01)
        for restored in await ranks.restored():
            assert_whole(restored, 2)


async def test_commits_at_a_time_give_back_the_memory_of_former_ranks_together(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with place.open(4, crashing=True) as ranks:
        for step in (1, 2):
            await ranks.reached(await ranks.save(step), "disk")
    async with place.open(2) as ranks:
        engine = ranks[0]._life.engine
        ranked, evictor = engine.mode.ranked, engine.collector.evictor
        evict = evictor.evict

        async def evict_late(step: StepId, tier: Tier) -> None:
            """Those of two later commits come first: one gives all back, the next one forgets it."""
            monkeypatch.setattr(evictor, "evict", evict)
            await ranked._let_former_steps_go()
            await ranked._let_former_steps_go()
            await evict(step, tier)

        monkeypatch.setattr(evictor, "evict", evict_late)
        await ranks[0]._life.loop.call(ranked._let_former_steps_go())
        assert not ranked.commits.homes
        assert await ranks[0].where(2) == ("disk",)


async def test_a_store_that_was_closed_keeps_nothing_of_the_memory_of_former_ranks_mapped(place: Place) -> None:
    async with place.open(4, crashing=True, disk_settings={"promote": "never"}) as ranks:
        await ranks.reached(await ranks.save(1), "ram")
    assert not mapped_below(place.shared_memory)
    async with place.open(2, disk_settings={"promote": "never"}):
        mapped = "".join(mapped_below(place.shared_memory))
        assert all(f"rank-{former}/" in mapped for former in range(4))
    assert not mapped_below(place.shared_memory)


async def test_a_part_that_is_gone_makes_the_step_one_of_the_shared_tier_alone(place: Place) -> None:
    async with place.open(3, nodes=["a", "a", "b"], crashing=True) as ranks:
        await ranks.reached(await ranks.save(1), "disk")
    place.lose_ram("b")
    async with place.open(3, nodes=["a", "a", "b"]) as ranks:
        assert [await store.where() for store in ranks.stores] == [("disk",)] * 3
        sources = await ranks.restore_into(1)
        assert "ram" in sources[0]  # what is there is used all the same


async def test_parts_that_can_never_be_whole_are_let_go_at_once(place: Place) -> None:
    async with place.open(3, nodes=["a", "a", "b"], crashing=True, disk_settings={"promote": "never"}) as ranks:
        await ranks.reached(await ranks.save(1), "ram")
    place.lose_ram("b")
    async with place.open(3, nodes=["a", "a", "b"]) as ranks:
        assert await ranks.restored() == [None] * 3
        for store in ranks.stores:
            ram = store._life.engine.state.tiers[0].ram
            assert ram is not None
            assert ram.slab.used == 0
        await ranks.reached(await ranks.save(1), "disk")  # the number is free


async def test_the_newest_step_that_is_whole_is_taken_and_not_a_newer_one_in_parts(place: Place) -> None:
    async with place.open(2, crashing=True) as ranks:
        await ranks.reached(await ranks.save(1), "disk")
        ranks.let_wait(DEADLINE)
        ranks.world.kill(1, "send", topic="log/*")
        await ranks.save(2, ranks=[0])
        await ranks.failed([0], step=2)
    async with place.open(2) as ranks:
        for restored in await ranks.restored():
            assert_whole(restored, 1)


async def test_an_index_that_comes_late_is_asked_for_again(place: Place) -> None:
    async with place.open(2) as ranks:
        await ranks.reached(await ranks.save(1), "disk")
    place.lose_ram()
    async with place.open(2, disk_settings={"retries": 2}) as ranks:
        slow = ranks.faulty(0)
        tier_of(ranks[0], "disk").blobs = Deadline(slow, "disk", base=1.0)
        slow.hold("get", key="steps/*", times=2)
        for restored in await ranks.restored():
            assert_whole(restored, 1)


async def test_an_index_that_never_comes_fails_on_all_ranks_for_its_tier_and_not_for_rank_0(place: Place) -> None:
    """Rank 0 stops asking in time: the others would blame it."""
    async with place.open(2) as ranks:
        await ranks.reached(await ranks.save(1), "disk")
    place.lose_ram()
    async with place.open(2, disk_settings={"retries": 100}, rank_deadline=DEADLINE) as ranks:
        slow = ranks.faulty(0)
        tier_of(ranks[0], "disk").blobs = Deadline(slow, "disk", base=0.2)
        slow.hold("get", key="steps/*", times=None)
        for error in await asyncio.gather(*(store.restore() for store in ranks.stores), return_exceptions=True):
            assert isinstance(error, TierUnavailable)
        slow.clear()


async def test_a_part_that_was_repaired_is_one_of_a_step_that_counts(place: Place) -> None:
    """Promise 6: it counted as a part that no step needs, and went when a save needed its room."""
    async with place.open(2, disk_settings={"promote": "never"}) as ranks:
        await ranks.reached(await ranks.save(1), "ram")
        first, collector = tier_of(ranks[0], "ram"), ranks[0]._life.engine.collector
        flip(next(Path(first.store.location).glob("steps/*1-*/manifest.ocdbt")), 30)
        (verified,) = await ranks[0].verify(1, "ram", repair=True)
        assert verified.repaired
        await ranks[0]._life.loop.call(evict_until(ranks[0]._life.engine.state, collector, first, lambda: False))
        for restored in await ranks.restored():
            assert_whole(restored, 1)


async def test_ranks_that_died_between_their_saves_and_their_agreement_have_the_step(place: Place) -> None:
    """Every part is there: that they never heard so is no reason to lose it."""
    async with place.open(2, crashing=True) as ranks:
        held = ranks.world.hold(1, "send", topic="log/*")
        await ranks.save(1)
        await held.reached()
    async with place.open(2) as ranks:
        for restored in await ranks.restored():
            assert_whole(restored, 1)


async def test_all_ranks_restore_one_step_or_none(place: Place) -> None:
    async with place.open(2) as ranks:
        for step in (1, 2):
            await ranks.reached(await ranks.save(step), "disk")
        outcomes = await asyncio.gather(ranks[0].restore(1), ranks[1].restore(2), return_exceptions=True)
        assert all(isinstance(outcome, Invalid) for outcome in outcomes)
        outcomes = await asyncio.gather(ranks[0].restore(9), ranks[1].restore(9), return_exceptions=True)
        assert all(isinstance(outcome, NotFound) for outcome in outcomes)
        misfit = {"w": np.zeros(3, np.float32)}
        outcomes = await asyncio.gather(ranks[0].restore(), ranks[1].restore(like=misfit), return_exceptions=True)
        assert all(isinstance(outcome, TieredCkptError) for outcome in outcomes)
        assert "rank 1" in str(outcomes[0])
        for restored in await ranks.restored():
            assert_whole(restored, 2)


async def test_a_rank_that_does_not_restore_is_not_waited_for_without_end(place: Place) -> None:
    async with place.open(3) as ranks:
        await ranks.reached(await ranks.save(1), "ram")
        ranks.let_wait(DEADLINE)
        outcomes = await asyncio.gather(ranks[0].restore(), ranks[1].restore(), return_exceptions=True)
        assert all(isinstance(outcome, RanksUnavailable) for outcome in outcomes)
        assert all(2 in outcome.ranks for outcome in outcomes if isinstance(outcome, RanksUnavailable))


async def test_a_rollback_abandons_what_was_saved_after_on_every_rank(place: Place) -> None:
    async with place.open(2) as ranks:
        for step in (1, 2, 3):
            await ranks.reached(await ranks.save(step), "disk")
        await ranks.restored(1)
        await ranks.reached(await ranks.save(2, seed=20), "disk")
        for store in ranks.stores:
            assert [info.step for info in await store.steps() if not info.off_branch] == [1, 2]
    async with place.open(2) as ranks:
        for restored in await ranks.restored():
            assert_whole(restored, 20) if restored is None else None
            assert restored is not None
            assert restored.step == 2
            np.testing.assert_array_equal(restored.tree["w"], whole(20))


async def test_damage_in_ram_is_read_around_and_repaired(place: Place) -> None:
    async with place.open(2) as ranks:
        await ranks.reached(await ranks.save(1), "disk")
        ram = ranks[1]._life.engine.state.tiers[0].ram
        assert ram is not None
        index = await ranks[1]._life.loop.call(
            step_index.load(ranks[1]._life.engine.state.tiers[0], ranks[1]._life.engine.state.newest())
        )
        extent = next(chunk.where for array in index.arrays.values() for chunk in array.chunks)
        ram.slab.array[extent.offset : extent.offset + 100] ^= 1
        for restored in await ranks.restored():
            assert_whole(restored, 1)
        await ranks.flush()
        assert all(found.intact for found in await ranks[1].verify(1, "ram"))


async def test_a_part_of_the_tree_is_enough_for_a_rank_that_needs_no_more(place: Place) -> None:
    async with place.open(2) as ranks:
        await ranks.reached(await ranks.save(1), "disk")
        found = await asyncio.gather(ranks[0].restore(keys=["common"]), ranks[1].restore(keys=["own/rank0"]))
        assert found[0] is not None
        assert found[1] is not None
        np.testing.assert_array_equal(found[0].tree["common"], common(1))
        np.testing.assert_array_equal(found[1].tree["own"]["rank0"], np.arange(5))


@pytest.mark.parametrize("looks", [0, 1])
async def test_a_rank_that_reads_no_array_keeps_the_others_from_none(place: Place, looks: int) -> None:
    """They waited for its part in the exchange of chunks as for a rank that has died; for rank 0, until all failed."""
    async with place.open(3, nodes=["a", "b", "c"]) as ranks:
        await ranks.reached(await ranks.save(1), "disk")

        async def restore(store: CheckpointStore, rank: int) -> Any:
            return await store.restore(1, as_="specs" if rank == looks else None)

        async with asyncio.timeout(SOON / 4):
            restored = await ranks.all(restore)
        for rank, each in enumerate(restored):
            if rank != looks:
                assert_whole(each, 1)
        assert restored[looks].tree["w"].shape == (ROWS, COLUMNS)


async def test_views_of_ram_are_given_of_what_lies_there(place: Place) -> None:
    async with place.open(2) as ranks:
        await ranks.reached(await ranks.save(1), "ram")
        for restored in await ranks.restored(copy=False):
            assert_whole(restored, 1)
            assert restored is not None
            await restored.verified()


async def test_a_step_that_is_lost_in_ram_is_not_offered(place: Place) -> None:
    """A rank whose slab is full lets an old step go: for all ranks RAM does not have it any more."""
    async with place.open(2, ram_settings={"capacity": "2 MiB"}) as ranks:
        for step in (1, 2, 3, 4):
            await ranks.reached(await ranks.save(step), "disk")
        await ranks.flush()
        for store in ranks.stores:
            held = await steps_on(store, "ram")
            assert 1 not in held
            assert 4 in held
        for restored in await ranks.restored(1):
            assert_whole(restored, 1)


async def test_what_one_rank_lets_go_for_room_is_in_the_ram_of_none(place: Place) -> None:
    """Rank 1 has more to save than the others, and its slab is full long before theirs."""
    async with place.open(3, ram_settings={"capacity": "4 MiB"}) as ranks:
        for step in (1, 2, 3):
            trees = [part(step, rank, 3) for rank in range(3)]
            trees[1]["large"] = np.random.default_rng(step).standard_normal(200_000)
            saves = await asyncio.gather(
                *(store.save(step, own) for store, own in zip(ranks.stores, trees, strict=True))
            )
            await ranks.reached(saves, "disk")
        await ranks.reached(await ranks.save(4), "disk")  # with which rank 1 has said what has left
        await asyncio.gather(*(heard.first(StepEvicted, lambda event: event.step == 1) for heard in ranks.heard))
        for store in ranks.stores:
            assert (await steps_on(store, "ram"))[-1] == 4
            assert "ram" not in await store.where(1)
        for rank in (0, 2):
            tier = ranks[rank]._life.engine.state.tiers[0]
            assert not any(
                tier.steps.has_own(step) for step in ranks[rank]._life.engine.state.records() if step.step == 1
            )


async def test_a_process_that_looks_on_sees_and_reads_what_only_the_ranks_ram_has(place: Place) -> None:
    async with place.open(3, disk_settings={"promote": "never"}) as ranks:
        await ranks.reached(await ranks.save(1), "ram")
        async with CheckpointStore.open(ranks[0].config, read_only=True) as onlooker:
            assert [(info.step, info.ranks, info.tiers) for info in await onlooker.steps()] == [(1, 3, ("ram",))]
            assert_whole(await onlooker.restore(), 1)
        await ranks.save(2, ranks=[0, 1])
        async with CheckpointStore.open(ranks[0].config, read_only=True) as onlooker:
            assert [info.step for info in await onlooker.steps()] == [1]
        await ranks.save(2, ranks=[2])


async def test_nothing_is_restored_silently_wrong(place: Place) -> None:
    async with place.open(2) as ranks:
        await ranks.reached(await ranks.save(1), "disk")
    place.lose_ram()
    pack = next(place.disk.glob("packs/*/*.pack"))
    data = bytearray(pack.read_bytes())
    data[100] ^= 1
    pack.chmod(0o600)
    pack.write_bytes(data)
    async with place.open(2) as ranks:
        outcomes = await asyncio.gather(*(store.restore() for store in ranks.stores), return_exceptions=True)
        assert all(isinstance(outcome, Corrupt) for outcome in outcomes)
