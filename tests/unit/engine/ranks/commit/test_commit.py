"""A step of many ranks comes to a shared tier whole, once and with every byte once, or not at all."""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorstore as ts
from support.cohort import DEADLINE, RanksPlace, assert_whole, common, part, whole
from support.insight import flip_chunk, index_of, tier_of
from support.limits import limit
from support.rank_insight import none, remembered
from support.scenes import SOON, config, files_under, folder, pack_bytes, ram, steps_on

from tieredckpt import CheckpointStore
from tieredckpt.engine.tier import commit_file
from tieredckpt.engine.tier.ram import Ram
from tieredckpt.engine.tier.tier import Tier
from tieredckpt.errors import (
    Conflict,
    Corrupt,
    Invalid,
    NoSpace,
    NotFound,
    RanksUnavailable,
    TieredCkptError,
    TierUnavailable,
)
from tieredckpt.events import CommitFailed, StepEvicted, StepPromoted, TierFailed, TierRecovered
from tieredckpt.format.manifest import StepId

SIZE = 4


class Place(RanksPlace):
    def steps(self) -> list[str]:
        """Steps with a commit on the shared tier."""
        return sorted(path.parent.name for path in self.disk.glob("steps/*/manifest.ocdbt"))

    def parts(self) -> list[Path]:
        return list(self.disk.glob("steps/*/parts/*"))


@pytest.fixture
def place(shared_memory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    limit(monkeypatch, source_retry=0.05)
    return Place(shared_memory, tmp_path / "disk", SIZE)


def same(rank: int, seed: int = 0) -> dict[str, Any]:
    """A state that all ranks have alike, of 4 MiB in 64 chunks."""
    rng = np.random.default_rng(seed)
    return {f"layer{i}": rng.standard_normal((128, 1024)) for i in range(4)}


# -- bytes ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("declared", [True, False], ids=["declared", "found by digest"])
async def test_replicas_are_written_once_and_by_all_alike(place: Place, declared: bool) -> None:
    async with place.open(chunk_size=64 << 10) as ranks:
        patterns = ("**",) if declared else ()
        saves = await ranks.all(lambda store, rank: store.save(1, same(rank), replicated=patterns))
        await ranks.reached(saves, "disk")
        total = sum(array.nbytes for array in same(0).values())
        written = [heard.of(StepPromoted)[0].written for heard in ranks.heard]
        assert sum(written) == pack_bytes(place.disk)
        assert total <= sum(written) <= 1.1 * total  # with a page for each checksum
        assert all(0.2 * total <= each <= 0.3 * total for each in written)
        for restored in await ranks.restored():
            assert restored is not None
            for key, array in same(0).items():
                np.testing.assert_array_equal(restored.tree[key], array)


async def test_declared_replicas_are_in_ram_once_as_well(place: Place) -> None:
    async with place.open(chunk_size=64 << 10, replicated=("layer*",)) as ranks:
        saves = await ranks.all(lambda store, rank: store.save(1, same(rank)))
        total = sum(array.nbytes for array in same(0).values())
        for checkpoint in saves:
            assert checkpoint.saved is not None
            assert 0.2 * total <= checkpoint.saved.new_bytes <= 0.3 * total


async def test_what_a_later_step_has_alike_is_not_written_again(place: Place) -> None:
    async with place.open() as ranks:
        await ranks.reached(await ranks.save(1), "disk")
        before = pack_bytes(place.disk)
        await ranks.reached(await ranks.save(2, seed=1), "disk")
        assert pack_bytes(place.disk) == before
        assert [event.written for event in ranks.heard[3].of(StepPromoted)][1] == 0


async def test_a_chunk_that_left_with_the_step_that_made_room_is_written_again(place: Place) -> None:
    settings = {"capacity": "1700 KiB", "retain": {"kind": "last_n", "n": 1}}
    async with place.open(2, disk_settings=settings) as ranks:
        for step in (1, 2):
            await ranks.reached(await ranks.save(step), "disk")
        saves = await ranks.all(lambda store, rank: store.save(3, part(3, rank, 2) | {"common": common(1)}))
        await ranks.reached(saves, "disk")
        assert [event.step for event in ranks.heard[0].of(StepEvicted) if event.tier == "disk"] == [1]
        assert all(each.intact for each in await ranks[0].verify(3, tier="disk"))


async def test_a_step_whose_packs_are_gone_is_written_again_from_the_memory_of_all_ranks(place: Place) -> None:
    async with place.open(2) as ranks:
        await ranks.reached(await ranks.save(1), "disk")
        for pack in place.disk.glob("packs/*/*.pack"):
            pack.unlink()
        await ranks[0].collect()
        await ranks.flush()
        (found,) = await ranks[0].verify(1, tier="disk")
        assert not found.problem
    async with place.open(2, nodes=["c", "d"]) as ranks:
        for restored in await ranks.restored():
            assert_whole(restored, 1)


async def test_no_rank_waits_for_memory_to_get_a_chunk_that_could_not_be_repaired_there(place: Place) -> None:
    async with place.open(2) as ranks:
        await ranks.reached(await ranks.save(1), "disk")
        disk = ranks.faulty(1)
        disk.kill(TierUnavailable("by script"))
        await flip_chunk(ranks[1], "ram", 1, next(iter(await index_of(ranks[1], "ram", 1))))
        (found,) = await ranks[1].verify(1, "ram", repair=True)
        assert not found.intact
        disk.revive()
        ranks.let_wait(DEADLINE)
        await ranks[1].flush()


async def test_stock_tensorstore_reads_what_many_ranks_committed(place: Place) -> None:
    async with place.open() as ranks:
        await ranks.reached(await ranks.save(1), "disk")
        for rank in (0, 2):
            for key, expected in (("w", whole(1)), ("common", common(1)), ("own/rank3", np.arange(5) + 3)):
                array = await ts.open(await ranks[rank].spec(1, key, "disk"), read=True)
                np.testing.assert_array_equal(await array.read(), expected)


async def test_every_rank_can_describe_the_whole_step(place: Place) -> None:
    async with place.open() as ranks:
        await ranks.reached(await ranks.save(1), "disk")
        described = [await store.describe(1) for store in ranks.stores]
        assert all(each.arrays == described[0].arrays for each in described)
        sizes = {array.key: array.nbytes for array in described[3].arrays}
        assert sizes["w"] == whole(1).nbytes
        assert described[3].info.ranks == SIZE


# -- faults -----------------------------------------------------------------------------------------------


async def finds(place: Place, step: int) -> None:
    """A store of one process opens the shared tier and finds the step, or none at all."""
    alone = config({"disk": folder(place.disk)}, lease_ttl=0.05)
    async with CheckpointStore.open(alone, ranks=None) as store:
        restored = await store.restore()
        assert (restored.step if restored is not None else 0) == step
        if restored is not None:
            assert_whole(restored, step)


@pytest.mark.parametrize(
    ("verb", "topic"), [("recv", "todo/*"), ("send", "done/*")], ids=["before it writes", "before it answers"]
)
async def test_a_rank_that_dies_while_it_writes_its_part_leaves_no_commit(place: Place, verb: str, topic: str) -> None:
    async with place.open(crashing=True) as ranks:
        ranks.let_wait(DEADLINE)
        ranks.world.kill(2, verb, topic=topic)
        await ranks.reached(await ranks.save(1), "ram")
        for event in await ranks.failed([0, 1, 3], tier="disk"):
            assert event.ranks == (2,)
        assert place.steps() == []
    ranks.world.restart()
    async with place.open() as again:  # what every rank has in RAM is whole, and goes on
        await again.flush()
        assert [await store.where(1) for store in again.stores] == [("ram", "disk")] * SIZE
    await finds(place, 1)


@pytest.mark.parametrize("fault", ["put of a pack", "put of a part", "get of a part"])
@pytest.mark.parametrize("error", [TierUnavailable, NoSpace])
async def test_a_tier_that_fails_one_rank_is_tried_again(
    place: Place, fault: str, error: type[TieredCkptError], monkeypatch: pytest.MonkeyPatch
) -> None:
    limit(monkeypatch, first_retry=0.02)
    async with place.open() as ranks:
        if fault == "get of a part":
            ranks.faulty(0).fail("get", error("by script"), key="steps/*/parts/1")
        else:
            key = "packs/*" if fault == "put of a pack" else "steps/*/parts/*"
            ranks.faulty(1).fail("put", error("by script"), key=key)
        checkpoints = await ranks.save(1)
        for event in await ranks.failed(tier="disk"):
            assert "by script" in event.reason
        await asyncio.gather(*(heard.first(TierFailed) for heard in ranks.heard))
        await asyncio.gather(*(heard.first(TierRecovered) for heard in ranks.heard))
        async with asyncio.timeout(SOON):
            while place.steps() == []:
                await asyncio.gather(*(heard.first(StepPromoted) for heard in ranks.heard))
        await ranks.reached(checkpoints, "disk")
        assert place.parts() == []
    await finds(place, 1)


async def test_what_ranks_wrote_of_a_step_that_never_came_is_forgotten_with_the_step(place: Place) -> None:
    async with place.open() as ranks:
        ranks.faulty(1).fail("put", NoSpace("by script"), key="packs/*")
        await ranks.save(1)
        await ranks.failed(tier="disk")
        await ranks[0].delete(1, force=True)
        await none(ranks.stores, remembered)


async def test_what_a_slow_rank_wrote_of_a_step_that_is_gone_by_then_is_forgotten(place: Place) -> None:
    tiers = {"ram": ram(place.shared_memory), "disk": folder(place.disk, promote="never")}
    async with place.open(tiers=tiers) as ranks:
        await ranks.reached(await ranks.save(1), "ram")
        held = ranks.faulty(1).hold("put", key="packs/*")
        ranks.let_wait(DEADLINE)
        with pytest.raises(RanksUnavailable):
            await ranks[0].promote(1, "disk")
        ranks.let_wait(SOON)
        await held.reached()
        await ranks[0].delete(1, force=True)
        held.release()
        await none(ranks.stores[1:], remembered)


async def test_a_rank_that_hangs_while_it_writes_stalls_no_training(place: Place) -> None:
    async with place.open() as ranks:
        held = ranks.faulty(2).hold("put", key="packs/*")
        await ranks.save(1)
        await held.reached()
        for step in (2, 3):
            await ranks.reached(await ranks.save(step), "ram")
        assert place.steps() == []
        held.release()
        await ranks.flush()
        assert place.steps()[-1].startswith("0000000003")


async def test_closing_waits_once_for_a_dead_rank_however_many_steps_are_due(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit(monkeypatch, last_words=0.5)
    tiers = {"ram": ram(place.shared_memory), "disk": folder(place.disk), "far": folder(tmp_path / "far")}
    async with place.open(3, tiers=tiers, crashing=True) as ranks:
        held = [ranks.faulty(0, tier).hold("delete", key="steps/*/parts/*") for tier in ("disk", "far")]
        for step in range(1, 9):
            await ranks.reached(await ranks.save(step), "ram")
        await asyncio.gather(*(each.reached() for each in held))  # with the first step, and the others wait
        ranks.let_wait(DEADLINE)
        ranks.world.kill_now(2)
        for each in held:
            each.release()
        begin = time.monotonic()
        async with asyncio.timeout(SOON):
            with pytest.raises(RanksUnavailable, match="rank 2 did not write"):
                await ranks[0].flush()
            await asyncio.gather(*(ranks[rank].close() for rank in (0, 1)))
        assert time.monotonic() - begin < 5 * DEADLINE  # and not 7 for each tier


async def test_a_flush_brings_all_steps_as_soon_as_the_rank_that_they_lacked_answers_again(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit(monkeypatch, source_retry=SOON)
    async with place.open(3) as ranks:
        ranks.let_wait(DEADLINE)
        held = ranks.faulty(2).hold("put", key="packs/*")
        await ranks.save(1)
        await held.reached()
        await ranks.failed(tier="disk")
        with pytest.raises(RanksUnavailable, match="rank 2"):
            await ranks[0].flush()
        ranks.let_wait(SOON)
        held.release()
        await ranks.save(2)
        await ranks.flush()
        assert [name[:10] for name in place.steps()] == ["0000000001", "0000000002"]


async def test_a_rank_writes_a_step_to_two_tiers_at_one_time(place: Place, tmp_path: Path) -> None:
    tiers = {"ram": ram(place.shared_memory), "disk": folder(place.disk), "far": folder(tmp_path / "far")}
    async with place.open(2, tiers=tiers) as ranks:
        held = ranks.faulty(1).hold("put", key="packs/*")
        checkpoints = await ranks.save(1)
        await held.reached()
        await ranks.reached(checkpoints, "far")
        held.release()
        await ranks.reached(checkpoints, "disk")
        assert [event for heard in ranks.heard for event in heard.of(CommitFailed)] == []


async def test_a_step_of_which_a_part_has_left_ram_goes_on_from_the_next_tier(place: Place, tmp_path: Path) -> None:
    tiers = {"ram": ram(place.shared_memory), "disk": folder(place.disk), "far": folder(tmp_path / "far")}
    async with place.open(2, tiers=tiers) as ranks:
        held = ranks.faulty(0, "far").hold("put", key="steps/*/parts/*")
        await ranks.reached(await ranks.save(1), "disk")
        await held.reached()
        checkpoints = await ranks.save(2)
        await ranks.reached(checkpoints, "disk")
        await ranks[1].evict(2, "ram")  # which rank 0 hears of with the next save
        held.release()
        await ranks.reached(checkpoints, "far")
    async with CheckpointStore.open(config({"far": folder(tmp_path / "far")}), ranks=None) as store:
        assert_whole(await store.restore(), 2)


async def test_a_damaged_step_that_is_evicted_while_ranks_commit_it_anew_is_not_brought_from_another_tier(
    place: Place, tmp_path: Path
) -> None:
    tiers = {"ram": ram(place.shared_memory), "disk": folder(place.disk), "far": folder(tmp_path / "far")}
    async with place.open(2, tiers=tiers) as ranks:
        checkpoints = await ranks.save(1)
        await ranks.reached(checkpoints, "disk")
        await ranks.reached(checkpoints, "far")
        state, disk = ranks[0]._life.engine.state, tier_of(ranks[0], "disk")
        held = ranks.faulty(0).hold("put", key="steps/*/parts/*")

        async def misread() -> None:
            disk.quarantine(state.find(1), Corrupt("misread"))
            state.changed.notify()

        await ranks[0]._life.loop.call(misread())
        await held.reached()
        evicting = asyncio.create_task(ranks[0].evict(1, "disk"))
        await ranks.heard[0].first(StepEvicted)
        held.release()
        await evicting
        await ranks[0].flush()
        assert "disk" not in await ranks[0].where(1)
        assert place.steps() == []


async def test_a_step_that_is_evicted_by_a_rank_and_by_all_at_a_time_is_told_once(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    retract = commit_file.retract_from_ram
    begun, may_go = threading.Event(), threading.Event()

    async def slow(tier: Tier, memory: Ram, step: StepId) -> None:
        if tier is tier_of(ranks[1], "ram"):
            begun.set()
            await asyncio.to_thread(may_go.wait, SOON)
        await retract(tier, memory, step)

    async with place.open(2) as ranks:
        for step in (1, 2):
            await ranks.reached(await ranks.save(step), "disk")
        monkeypatch.setattr(commit_file, "retract_from_ram", slow)
        evicting = asyncio.create_task(ranks[1].evict(1, "ram"))
        await asyncio.to_thread(begun.wait, SOON)
        await ranks[0].evict(1, "ram")
        await asyncio.sleep(0.3)  # until rank 1 has heard of it
        may_go.set()
        await evicting
        await ranks.reached(await ranks.save(3), "disk")
        told = [event for event in ranks.heard[1].of(StepEvicted) if (event.step, event.tier) == (1, "ram")]
        assert len(told) == 1


async def test_a_step_that_lacks_a_pack_is_a_good_copy_once_ranks_have_committed_it_anew(place: Place) -> None:
    async with place.open(2) as ranks:
        await ranks.reached(await ranks.save(1), "disk")
        disk = tier_of(ranks[0], "disk")
        place.disk.joinpath(lost := next(iter(disk.packs.sizes))).unlink()
        await ranks[0].collect()
        await ranks[0].flush()
        (step,) = disk.steps.held
        assert disk.steps.has_good(step)
        assert lost not in disk.packs.sizes
        assert all(found.intact for found in await ranks[0].verify(1, "disk"))


async def test_who_waits_for_a_tier_hears_of_a_leader_that_died(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    limit(monkeypatch, wait_longer=0.1)
    async with place.open(2, crashing=True) as ranks:
        ranks.let_wait(DEADLINE)
        ranks.world.kill(0, "send", topic="todo/*")
        checkpoints = await ranks.save(1)
        await checkpoints[1].reached("ram")
        async with asyncio.timeout(SOON):
            with pytest.raises(RanksUnavailable, match="rank 0 is silent"):
                await checkpoints[1].reached("disk")


async def test_an_order_that_was_given_up_does_not_spoil_the_next(place: Place) -> None:
    """The rank that was too late writes its part of the first order when that of the second is due."""
    async with place.open() as ranks:
        ranks.let_wait(DEADLINE)
        held = ranks.faulty(2).hold("put", key="steps/*/parts/*")
        checkpoints = await ranks.save(1)
        await held.reached()
        await ranks.failed(tier="disk")
        ranks.let_wait(SOON)
        held.release()
        await asyncio.gather(*(heard.first(StepPromoted) for heard in ranks.heard))
        await ranks.reached(checkpoints, "disk")
    await finds(place, 1)


async def test_a_crash_of_the_leader_between_any_two_writes_leaves_a_whole_step_or_none(
    shared_memory: Path, tmp_path: Path
) -> None:
    """At its n-th write to the shared tier rank 0 dies, for every n there is."""
    for nth in range(1, 20):
        place = Place(shared_memory / str(nth), tmp_path / str(nth))
        async with place.open(2, crashing=True) as ranks:
            faults = ranks.faulty(0)
            held = faults.hold("put", nth=nth)
            removed = faults.hold("delete", key="steps/*/parts/*")
            await ranks.save(1)
            reached = [asyncio.ensure_future(each.reached()) for each in (held, removed)]
            await asyncio.wait(reached, return_when=asyncio.FIRST_COMPLETED, timeout=SOON)
            assert any(each.done() for each in reached)
            last = reached[1].done()
            for each in reached:
                each.cancel()
        assert len(place.steps()) == (1 if last else 0)
        await finds(place, 1 if last else 0)
        async with place.open(2) as again:
            await again.flush()
            for restored in await again.restored():
                assert_whole(restored, 1)
        if last:
            return
    pytest.fail("rank 0 has no end of writes")


@pytest.mark.parametrize("fault", ["damaged", "not to be seen"])
async def test_a_part_that_is_not_what_its_rank_wrote_is_never_committed_and_written_anew(
    place: Place, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit(monkeypatch, first_retry=0.02)
    async with place.open() as ranks:
        if fault == "damaged":
            ranks.faulty(0).flip("get", key="steps/*/parts/1", bit=999)
        else:
            ranks.faulty(0).fail("get", NotFound("by script"), key="steps/*/parts/1")
        await ranks.save(1)
        for event in await ranks.failed(tier="disk"):
            assert "parts/1" in event.reason
        await asyncio.gather(*(heard.first(StepPromoted) for heard in ranks.heard))
    await finds(place, 1)


# -- life on the shared tier ------------------------------------------------------------------------------


async def test_all_ranks_know_what_the_shared_tier_retains(place: Place) -> None:
    async with place.open(disk_settings={"retain": {"kind": "last_n", "n": 2}}) as ranks:
        for step in (1, 2, 3, 4):
            await ranks.reached(await ranks.save(step), "disk")
        await asyncio.gather(
            *(heard.first(StepEvicted, lambda event: event.step == 2 and event.tier == "disk") for heard in ranks.heard)
        )
        for store in ranks.stores:
            assert await steps_on(store, "disk") == [3, 4]
        assert [name[:10] for name in place.steps()] == ["0000000003", "0000000004"]


async def test_what_people_order_is_ordered_on_rank_0(place: Place) -> None:
    async with place.open(disk_settings={"promote": "never"}) as ranks:
        await ranks.reached(await ranks.save(1), "ram")
        with pytest.raises(Invalid, match="rank 0"):
            await ranks[1].promote(1, "disk")
        assert await ranks[0].promote(1, "disk") == pack_bytes(place.disk)
        await asyncio.gather(*(heard.first(StepPromoted) for heard in ranks.heard))
        await ranks.reached(await ranks.save(2), "ram")
        await ranks[0].promote(2, "disk")
        with pytest.raises(Invalid, match="rank 0"):
            await ranks[1].evict(1, "disk")
        await ranks[0].evict(1, "disk")
        await asyncio.gather(*(heard.first(StepEvicted) for heard in ranks.heard))
        assert [await store.where(2) for store in ranks.stores] == [("ram", "disk")] * SIZE


async def test_collection_never_takes_what_ranks_have_just_written(place: Place) -> None:
    async with place.open(grace=0.1, lease_ttl=0.05) as ranks:
        held = ranks.faulty(0).hold("put", key="steps/*/btree")
        checkpoints = await ranks.save(1)
        await held.reached()
        collecting = asyncio.create_task(ranks[0].collect())
        await ranks[2].collect()
        held.release()
        await collecting
        await ranks.reached(checkpoints, "disk")
    await finds(place, 1)


async def test_a_tier_that_is_not_shared_is_refused(tmp_path: Path) -> None:
    from reliability.ranks import World

    world = World(2, nodes=["a", "a"])
    stores = [
        CheckpointStore.open(
            config({"disk": folder(tmp_path / f"disk{rank}")}, rank_deadline=SOON), ranks=world.communicator(rank)
        )
        for rank in range(2)
    ]
    for outcome in await asyncio.gather(*stores, return_exceptions=True):
        assert isinstance(outcome, Conflict)
        assert "shared by all ranks" in str(outcome)


async def test_nothing_but_the_step_is_left_on_the_tier(place: Place) -> None:
    async with place.open() as ranks:
        await ranks.reached(await ranks.save(1), "disk")
    names = [name for name in files_under(place.disk) if not name.startswith("packs/")]
    folder_of_step = "steps/0000000001-000001"
    assert sorted(names) == [f"{folder_of_step}/btree", f"{folder_of_step}/manifest.ocdbt", "tieredckpt.json"]


async def test_no_event_of_failure_comes_with_success(place: Place) -> None:
    async with place.open() as ranks:
        for step in range(1, 6):
            await ranks.save(step)
        await ranks.flush()
        assert not any(heard.of(CommitFailed) for heard in ranks.heard)
        assert_whole((await ranks.restored())[1], 5)
        assert part(5, 0, SIZE)["epoch"] == 5
