"""`CheckpointStore.delete` takes a step from every tier for good, and refuses what a restart needs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from reliability.tiers import FaultyTiers
from support.agents import end_agent
from support.cohort import RanksPlace, cohort
from support.insight import tier_of
from support.limits import limit
from support.scenes import SOON, Heard, assert_restored, config, folder, pack_bytes, ram, save_steps, tree

from tieredckpt import CheckpointStore, Conflict, Corrupt, Invalid, NotFound, TierUnavailable
from tieredckpt.events import StepEvicted, TierFailed, TierRecovered


class Place:
    """A store over RAM and two folders, of which the second gets what it is asked to take."""

    def __init__(self, shared_memory: Path, disk: Path, mode: str) -> None:
        self.ram = shared_memory / "of-test" / "ram"
        self.disk = disk / "disk"
        tiers = {
            "ram": ram(shared_memory, on_close="keep"),
            "disk": folder(self.disk, retain="all"),
            "archive": folder(disk / "archive", promote="never", retain="all"),
        }
        self.config = config(tiers, promote_in=mode)

    @asynccontextmanager
    async def opened(self, *steps: int) -> AsyncIterator[CheckpointStore]:
        """The store, with those steps on RAM and disk."""
        async with CheckpointStore.open(self.config) as store:
            await save_steps(store, *steps, to="disk")
            yield store


@pytest.fixture(params=["trainer", "agent"])
def place(request: pytest.FixtureRequest, shared_memory: Path, tmp_path: Path) -> Iterator[Place]:
    place = Place(shared_memory, tmp_path, request.param)
    yield place
    end_agent(place.ram)


async def test_a_deleted_step_is_on_no_tier_and_does_not_come_back(place: Place) -> None:
    async with place.opened(1, 2, 3) as store:
        heard = Heard(store)
        await store.promote(2, "archive")
        before = pack_bytes(place.disk)
        await store.delete(2)
        assert [info.step for info in await store.steps()] == [1, 3]
        assert {event.tier for event in heard.of(StepEvicted)} == {"ram", "disk", "archive"}
        assert pack_bytes(place.disk) < before  # its space is back
        with pytest.raises(NotFound):
            await store.delete(2)
        await save_steps(store, 4)
        assert await store.all_steps() == (1, 3, 4)
    async with place.opened() as store:
        assert await store.all_steps() == (1, 3, 4)
        assert_restored(await store.restore(), tree(4))


async def test_the_newest_and_the_last_step_are_deleted_by_force_alone(place: Place) -> None:
    async with place.opened(1, 2) as store:
        with pytest.raises(Conflict, match=r"step 2.* the newest step of the branch.*force=True"):
            await store.delete(2)
        assert await store.where(2) == ("ram", "disk")
        await store.delete(2, force=True)
        assert await store.latest_step() == 1
        with pytest.raises(Conflict):
            await store.delete(1)
        await store.delete(1, force=True)
        assert await store.all_steps() == ()
        assert await store.latest_step() is None
        assert await store.restore() is None
        await (await store.save(1, tree(7))).reached("disk")  # the number is free again
        assert await store.latest_step() == 1


async def test_a_step_that_cannot_be_read_is_not_deleted_without_force_while_it_is_the_last(tmp_path: Path) -> None:
    """It may have been misread."""
    settings = config({"disk": folder(tmp_path / "disk")})
    async with CheckpointStore.open(settings) as store:
        await store.save(1, tree(1))
    (manifest,) = (tmp_path / "disk").glob("steps/*/manifest.ocdbt")
    intact = manifest.read_bytes()
    manifest.write_bytes(b"")
    async with CheckpointStore.open(settings) as store:
        with pytest.raises(Corrupt):
            await store.restore()
        with pytest.raises(Conflict, match=r"step 1.* the last step there is.*force=True"):
            await store.delete(1)
        manifest.write_bytes(intact)
        await store.verify(1)
        assert_restored(await store.restore(), tree(1))


async def test_a_step_stays_while_nothing_newer_is_as_safe(shared_memory: Path, tmp_path: Path) -> None:
    tiers = {"ram": ram(shared_memory), "disk": folder(tmp_path / "disk", promote="never", retain="all")}
    async with CheckpointStore.open(config(tiers)) as store:
        await store.save(1, tree(1))
        await store.promote(1, "disk")
        await store.save(2, tree(2))
        with pytest.raises(Conflict, match=r"no newer step of the branch is on a tier that survives as much as 'disk'"):
            await store.delete(1)
        assert await store.where(1) == ("ram", "disk")
        await store.promote(2, "disk")
        await store.delete(1)
        assert await store.all_steps() == (2,)


async def test_a_number_is_deleted_with_every_save_of_it_on_the_branch(place: Place) -> None:
    async with place.opened(1, 2, 3) as store:
        await store.restore(1, resume=True)
        await (await store.save(2, tree(20))).reached("disk")  # on another branch than the first 2
        await (await store.save(4, tree(40))).reached("disk")
        assert await store.all_steps() == (1, 2, 4)
        await store.delete(2)
        assert [(info.step, info.off_branch) for info in await store.steps()] == [
            (1, False),
            (2, True),
            (3, True),
            (4, False),
        ]
        await store.delete(2)
        await store.save(1, tree(10), overwrite=True)
        await (await store.save(5, tree(50))).reached("disk")
        assert await store.all_steps() == (4, 1, 5)
        await store.delete(1)
        assert [info.step for info in await store.steps()] == [3, 4, 5]


async def test_a_step_that_is_being_read_is_neither_deleted_nor_evicted(place: Place) -> None:
    async with place.opened(1, 2) as store:
        readers = tier_of(store, "ram").steps.readers
        readers[store._life.engine.state.find(1)] = 1
        with pytest.raises(Conflict, match="is being read from tier 'ram'"):
            await store.delete(1, force=True)
        with pytest.raises(Conflict, match=r"is being read from tier 'ram'; try again when that has ended$"):
            await store.evict(1, "ram")
        assert await store.where(1) == ("ram", "disk")
        readers.clear()
        await store.delete(1)


async def test_where_a_tier_is_silent_nothing_is_deleted_but_by_force(
    shared_memory: Path, tmp_path: Path, faults: FaultyTiers
) -> None:
    async with Place(shared_memory, tmp_path, "trainer").opened(1, 2) as store:
        heard = Heard(store)
        faults.kill("disk")
        await store.save(3, tree(3))  # which finds out that it is dead
        await heard.first(TierFailed)
        with pytest.raises(TierUnavailable, match="'disk' does not answer and may hold it"):
            await store.delete(1)
        assert await store.where(1) == ("ram", "disk")
        await store.delete(1, force=True)
        assert await store.where(1) == ("disk",)
        faults.revive("disk")
        await heard.first(TierRecovered)
        await store.flush()
        await store.delete(1)
        assert await store.all_steps() == (2, 3)


async def test_by_force_a_step_is_deleted_without_a_word_from_a_tier_that_has_just_failed(
    shared_memory: Path, tmp_path: Path, faults: FaultyTiers, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit(monkeypatch, first_retry=SOON)
    async with Place(shared_memory, tmp_path, "trainer").opened(1, 2) as store:
        faults.kill("disk")
        with pytest.raises(TierUnavailable):
            await (await store.save(3, tree(3))).reached("disk")
        tier_of(store, "disk").steps.indexes.forget(store._life.engine.state.find(2))  # of many, not all are remembered
        await store.delete(1, force=True)
        assert await store.where(1) == ("disk",)


async def test_a_step_that_a_tier_may_hold_which_never_answered_is_not_said_to_be_gone(
    shared_memory: Path, tmp_path: Path, faults: FaultyTiers
) -> None:
    settings = config({"ram": ram(shared_memory), "disk": folder(tmp_path / "disk", retain="all")})
    async with CheckpointStore.open(settings) as store:
        await (await store.save(1, tree(1))).reached("disk")
    faults.kill("disk")
    async with CheckpointStore.open(settings) as store:
        for force in (False, True):
            with pytest.raises(TierUnavailable, match=r"no tier holds step 1 .*not reachable at present: disk"):
                await store.delete(1, force=force)
    faults.revive("disk")
    async with CheckpointStore.open(settings) as store:
        assert await store.where(1) == ("disk",)
        with pytest.raises(NotFound):
            await store.delete(2)


async def test_a_step_is_not_promoted_while_it_is_deleted(
    shared_memory: Path, tmp_path: Path, faults: FaultyTiers
) -> None:
    far = folder(tmp_path / "far", promote={"kind": "on_signal", "signal": "now"}, retain="all")
    tiers = {"ram": ram(shared_memory), "disk": folder(tmp_path / "disk", retain="all"), "far": far}
    async with CheckpointStore.open(config(tiers)) as store:
        await save_steps(store, 1, 2, to="disk")
        disk = faults["disk"].hold("delete", key="steps/*")
        deleting = asyncio.create_task(store.delete(2, force=True))
        await disk.reached()
        store.signal("now")
        await store.flush()
        assert await store.where(2) == ("disk",)
        disk.release()
        await deleting
        assert await store.all_steps() == (1,)


async def test_of_several_ranks_rank_0_deletes_for_all(shared_memory: Path, tmp_path: Path) -> None:
    async with cohort(3, shared_memory, tmp_path / "disk") as ranks:
        for step in (1, 2, 3):
            await ranks.reached(await ranks.save(step), "disk")
        with pytest.raises(Invalid, match="rank 0 does that for all ranks"):
            await ranks[1].delete(1)
        await ranks[0].delete(1)
        await ranks[0].delete(3, force=True)

        async def gone(store: CheckpointStore, rank: int) -> None:
            state = store._life.engine.state
            await store._life.loop.call(state.changed.until(lambda: [step.step for step in state.records()] == [2]))

        await ranks.all(gone)
        newest = [store._life.engine.state.branch.newest for store in ranks.stores]
        assert [step and step.step for step in newest] == [2, 2, 2]  # what the next save continues
        assert await ranks.all(lambda store, rank: store.latest_step()) == [2, 2, 2]
        await ranks.reached(await ranks.save(3, seed=30), "disk")  # the number is free on every rank
        assert await ranks.all(lambda store, rank: store.all_steps()) == [(2, 3)] * 3


async def test_copies_in_the_ram_of_other_nodes_do_not_bring_a_deleted_step_back(
    shared_memory: Path, tmp_path: Path
) -> None:
    settings = {"nodes": "ab", "ram_settings": {"replicas": 2}, "disk_settings": {"promote": "never"}}
    both = RanksPlace(shared_memory, tmp_path / "disk", 2, settings)
    async with both.open(crashing=True) as ranks:
        await ranks.save(1)
        await ranks.replicated(1)
        await ranks[0].delete(1, force=True)

        def is_gone(store: CheckpointStore) -> bool:
            ranked = store._life.engine.mode.ranked
            assert ranked is not None
            assert ranked.replicas is not None
            return not any(tier.steps.parts for tier in ranked.replicas.kept.values())

        for store in ranks.stores:
            changed = store._life.engine.state.changed
            await store._life.loop.call(changed.until(partial(is_gone, store)))
    async with both.open() as ranks:
        assert await ranks.all(lambda store, rank: store.all_steps()) == [(), ()]


async def test_a_tree_of_one_array_is_enough_to_see_the_order_of_saves(place: Place) -> None:
    async with CheckpointStore.open(place.config) as store:
        for step in (3, 1, 2):
            await store.save(step, {"w": np.full(10, step)})
        assert await store.all_steps() == (3, 1, 2)
        assert await store.latest_step() == 2
        await store.save(3, {"w": np.zeros(10)}, overwrite=True)
        assert await store.all_steps() == (1, 2, 3)


async def test_a_step_that_is_deleted_while_it_is_copied_is_not_committed(
    shared_memory: Path, tmp_path: Path, faults: FaultyTiers
) -> None:
    """As beside an agent, or among ranks: the process that deletes does not see the copy that is being read."""
    settings = config({"ram": ram(shared_memory), "disk": folder(tmp_path / "disk")})
    async with CheckpointStore.open(settings) as store:
        hold = faults["disk"].hold("put", key="packs/*")
        saved = await store.save(1, tree(1))
        await hold.reached()
        tier_of(store, "disk").steps.tombstones.add(saved.saved.step)
        hold.release()
        await (await store.save(2, tree(2))).reached("disk")
        assert await store.where(1) == ("ram",)


async def test_while_a_step_is_deleted_its_copies_let_no_other_go_and_nobody_reads_them(
    shared_memory: Path, tmp_path: Path
) -> None:
    async with Place(shared_memory, tmp_path, "trainer").opened(1, 2) as store:
        state = store._life.engine.state
        with state.being_deleted([state.find(2)]):
            with pytest.raises(Conflict, match="last good copy"):
                await store.evict(1, "disk")
            with pytest.raises(NotFound, match="is being deleted"):
                await store.restore(2)


async def test_a_deletion_waits_for_an_eviction_under_way_and_goes_on_where_that_fails(
    shared_memory: Path, tmp_path: Path, faults: FaultyTiers
) -> None:
    async with Place(shared_memory, tmp_path, "trainer").opened(1, 2) as store:
        hold = faults["disk"].hold("delete", key="steps/*")
        evicting = asyncio.create_task(store.evict(1, "disk"))
        await hold.reached()
        deleting = asyncio.create_task(store.delete(1))
        await asyncio.sleep(0.1)
        evicting.cancel()
        await asyncio.gather(evicting, return_exceptions=True)
        await deleting
        await store.flush()
        assert await store.all_steps() == (2,)
    async with CheckpointStore.open(Place(shared_memory, tmp_path, "trainer").config) as store:
        assert await store.all_steps() == (2,)


async def test_of_two_deletions_one_that_is_cancelled_leaves_the_other_whole(
    shared_memory: Path, tmp_path: Path, faults: FaultyTiers
) -> None:
    far = folder(tmp_path / "far", promote={"kind": "on_signal", "signal": "now"}, retain="all")
    archive = folder(tmp_path / "archive", promote="never", retain="all")
    disk = folder(tmp_path / "disk", retain="all")
    tiers = {"ram": ram(shared_memory), "disk": disk, "archive": archive, "far": far}
    async with CheckpointStore.open(config(tiers)) as store:
        for step in (1, 2):
            await save_steps(store, step, to="disk")
            await store.promote(step, "archive")
        await store.evict(1, "disk")
        first, second = (faults["disk"].hold("delete", key="steps/*-000002/*", nth=n) for n in (1, 2))
        cancelled = asyncio.create_task(store.delete(2, force=True))
        await first.reached()
        deleting = asyncio.create_task(store.delete(2, force=True))
        await asyncio.sleep(0.1)
        cancelled.cancel()
        await asyncio.gather(cancelled, return_exceptions=True)
        async with asyncio.timeout(SOON):
            await second.reached()
        with pytest.raises(Conflict, match="last good copy"):
            await store.evict(1, "archive")  # 2 is not deleted there yet
        store.signal("now")
        await store.flush()
        second.release()
        await deleting
        assert await store.all_steps() == (1,)
