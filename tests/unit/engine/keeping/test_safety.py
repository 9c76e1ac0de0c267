"""Promise 6: the last good copy is never deleted, whatever a policy says and whatever else happens."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from reliability.tiers import FaultyTiers
from support.commit_scene import opened_scene
from support.scenes import assert_restored, config, folder, ram, save_steps, steps_on, tree

from tieredckpt import CheckpointStore
from tieredckpt.blobs.base import Survives, Traits
from tieredckpt.engine.keeping.safety import why_kept
from tieredckpt.engine.opening.connect import make_tiers
from tieredckpt.engine.state.membership import Role
from tieredckpt.engine.state.state import State
from tieredckpt.engine.tier.held import Held
from tieredckpt.errors import Conflict, Corrupt, NoSpace, TierUnavailable
from tieredckpt.events import Events
from tieredckpt.format.manifest import StepId


async def test_by_hand_as_well_the_last_good_copy_stays(shared_memory: Path, tmp_path: Path) -> None:
    settings = config({"ram": ram(shared_memory), "disk": folder(tmp_path, promote="never")})
    async with CheckpointStore.open(settings) as store:
        await store.save(1, tree(1))
        with pytest.raises(Conflict, match=r"step 1 .* on tier 'ram' is the last good copy"):
            await store.evict(1, "ram")
        await store.promote(1, "disk")
        await store.save(2, tree(2))
        with pytest.raises(Conflict, match="on tier 'disk' is the last good copy"):
            await store.evict(1, "disk")  # a newer one in RAM survives less
        await store.evict(1, "ram")
        await store.promote(2, "disk")
        await store.evict(1, "disk")
        assert [info.step for info in await store.steps()] == [2]


async def test_of_two_copies_evicted_at_once_one_stays(tmp_path: Path, faults: FaultyTiers) -> None:
    settings = config({"near": folder(tmp_path / "near"), "far": folder(tmp_path / "far")})
    async with CheckpointStore.open(settings) as store:
        await (await store.save(1, tree(1))).reached("far")
        held = faults["near"].hold("delete")
        near = asyncio.create_task(store.evict(1, "near"))
        await held.reached()
        with pytest.raises(Conflict, match="last good copy"):
            await store.evict(1, "far")
        held.release()
        await near
        assert await store.where(1) == ("far",)


async def test_a_step_that_may_not_go_any_more_when_its_turn_comes_stays(shared_memory: Path, tmp_path: Path) -> None:
    async with opened_scene(shared_memory, tmp_path) as scene:
        evictor, steps = scene.store._life.engine.collector.evictor, scene.tier.steps

        async def overtaken() -> bool:
            async with steps.turn(scene.step):
                evicting = asyncio.create_task(evictor.try_evict(scene.step, scene.tier))
                while scene.step not in steps.leaving:
                    await asyncio.sleep(0)
                steps.begin_read(scene.step)
            try:
                return await evicting
            finally:
                steps.end_read(scene.step)

        assert not await scene.store._life.loop.call(overtaken())
        assert await scene.is_held()


async def test_a_copy_on_a_tier_that_does_not_answer_counts_for_nothing(
    shared_memory: Path, tmp_path: Path, faults: FaultyTiers
) -> None:
    settings = config({"ram": ram(shared_memory), "disk": folder(tmp_path)})
    async with CheckpointStore.open(settings) as store:
        await (await store.save(1, tree(1))).reached("disk")
        faults.kill("disk")
        with pytest.raises(TierUnavailable):
            await (await store.save(2, tree(2))).reached("disk")
        with pytest.raises(Conflict, match="last good copy"):
            await store.evict(2, "ram")
        await store.evict(1, "ram")  # a newer one is as safe


async def test_an_eviction_tells_that_its_tier_does_not_answer_where_no_last_copy_is_at_stake(
    shared_memory: Path, tmp_path: Path, faults: FaultyTiers
) -> None:
    settings = config({"ram": ram(shared_memory), "disk": folder(tmp_path, retain="all")})
    async with CheckpointStore.open(settings) as store:
        await save_steps(store, 1, 2, to="disk")
        faults.kill("disk")
        with pytest.raises(TierUnavailable):
            await (await store.save(3, tree(3))).reached("disk")
        with pytest.raises(TierUnavailable):
            await store.evict(1, "disk")


async def test_an_eviction_that_failed_half_way_is_no_copy_to_rely_on(tmp_path: Path, faults: FaultyTiers) -> None:
    settings = config({"near": folder(tmp_path / "near"), "far": folder(tmp_path / "far")})
    async with CheckpointStore.open(settings) as store:
        await (await store.save(1, tree(1))).reached("far")
        faults["near"].fail("delete", TierUnavailable("the answer was lost"), after=True)
        with pytest.raises(TierUnavailable):
            await store.evict(1, "near")
        with pytest.raises(Conflict, match="last good copy"):
            await store.evict(1, "far")
        assert_restored(await store.restore(), tree(1))


# -- the rule itself, over all small stores ---------------------------------------------------------------


class _Store:
    """A blob store of which only the traits are asked for."""

    def __init__(self, survives: Survives) -> None:
        self.traits = Traits(survives, True, True, True, True, False, 1)


def _state(draw: st.DrawFn, *, with_ram: bool = False) -> State:
    nearest = {"ram": {"kind": "ram"}} if with_ram else {}
    settings = config(nearest | {name: folder(Path(f"/nowhere/{name}")) for name in "abc"[: draw(st.integers(1, 3))]})
    events = Events()
    tiers, _ = make_tiers(settings, read_only=False, events=events)
    # Nothing here runs: no thread, no memory, no loop.
    state = State(config=settings, tiers=tiers, events=events, pool=None, scratch=None, read_only=False)
    for tier in tiers:
        survives = [Survives.NOTHING, Survives.PROCESS] if tier.config.kind == "ram" else [*Survives]
        blobs: Any = _Store(draw(st.sampled_from(survives)))
        tier.blobs = blobs
        tier.health.error = draw(st.sampled_from([None, None, TierUnavailable("silent")]))
        for serial in draw(st.sets(st.integers(1, 5))):
            tier.steps.held[StepId(serial, serial)] = Held(None, "")
    cut = draw(st.integers(0, 5))
    state.branch.line = ((1, cut), (5, 5)) if draw(st.booleans()) else ((1, cut),) if cut else ()
    return state


def _best(state: State, survives: Survives) -> StepId | None:
    """What a restore takes after a failure that only tiers of ``survives`` outlive."""
    left = [
        step
        for tier in state.tiers
        if tier.answers and tier.survives >= survives
        for step in tier.steps.held
        if state.on_line(step.serial)
    ]
    return max(left, default=None)


@given(st.data())
def test_nothing_that_may_go_makes_any_failure_cost_more(data: st.DataObject) -> None:
    """Whatever is let go one after the other, in any order: after every kind of failure the same step is restored."""
    state = _state(data.draw)
    before = {survives: _best(state, survives) for survives in Survives}
    holding = [(step, tier) for tier in state.tiers for step in tier.steps.held if tier.answers]
    for step, tier in data.draw(st.permutations(holding)):
        if not why_kept(state, step, tier):
            del tier.steps.held[step]
        assert {survives: _best(state, survives) for survives in Survives} == before


# -- two processes, each of which decides on tiers of its own ----------------------------------------------


@given(st.data())
def test_a_trainer_and_its_agent_never_rely_on_what_the_other_lets_go(data: st.DataObject) -> None:
    """Each lets steps go by what it knew at first: after every kind of failure the same step is restored."""
    state = _state(data.draw, with_ram=True)
    before = {survives: _best(state, survives) for survives in Survives}
    known = {tier.name: dict(tier.steps.held) for tier in state.tiers}
    left: dict[str, Any] = {}
    for state.membership.role in (Role.TRAINER, Role.AGENT):
        mine = [tier for tier in state.tiers if state.manages(tier)]
        holding = [(step, tier) for tier in mine for step in tier.steps.held if tier.answers]
        for step, tier in data.draw(st.permutations(holding)):
            if not why_kept(state, step, tier):
                del tier.steps.held[step]
        left |= {tier.name: dict(tier.steps.held) for tier in mine}
        for tier in mine:
            tier.steps.held.update(known[tier.name])
    for tier in state.tiers:
        tier.steps.held = left[tier.name]
    assert {survives: _best(state, survives) for survives in Survives} == before


def delete_packs(place: Path) -> None:
    """What a purge of old files does."""
    for pack in [*(place / "packs").glob("*/*.pack")]:
        pack.unlink()


async def test_a_copy_whose_packs_are_known_to_be_gone_is_no_good_copy(
    shared_memory: Path, tmp_path: Path, faults: FaultyTiers
) -> None:
    async with CheckpointStore.open(config({"ram": ram(shared_memory), "disk": folder(tmp_path / "disk")})) as store:
        await save_steps(store, 1)
        delete_packs(tmp_path / "disk")
        faults["disk"].fail("put", NoSpace("the device is full"), key="packs/*", times=None)
        await store.collect()
        with pytest.raises(Conflict, match=r"last good copy|is being read"):
            await store.evict(1, "ram")
        assert_restored(await store.restore(), tree(1))


@pytest.mark.parametrize(("nearest", "lacking"), [("ram", "disk"), ("near", "near"), ("near", "disk")])
async def test_a_copy_whose_packs_are_gone_is_made_good_from_another_tier(
    shared_memory: Path, tmp_path: Path, nearest: str, lacking: str
) -> None:
    first = ram(shared_memory) if nearest == "ram" else folder(tmp_path / nearest)
    async with CheckpointStore.open(config({nearest: first, "disk": folder(tmp_path / "disk")})) as store:
        await store.save(1, tree(1))
        await store.save(2, tree(2))
        await store.flush()
        delete_packs(tmp_path / lacking)
        await store.collect()
        await store.flush()
        for step in (1, 2):
            assert all(not each.problem for each in await store.verify(step))
        await store.evict(1, "disk" if lacking == nearest else nearest)


async def test_a_pack_that_many_steps_use_is_asked_for_no_more_often_when_it_is_gone(
    tmp_path: Path, faults: FaultyTiers
) -> None:
    async with CheckpointStore.open(config({"disk": folder(tmp_path / "disk", retain="all")})) as store:
        for step in range(20):
            await store.save(step, tree(1))
        delete_packs(tmp_path / "disk")
        before = len(faults["disk"].calls)
        await store.collect()
        assert [call.verb for call in faults["disk"].calls[before:]].count("stat") < 20


async def test_a_copy_that_is_found_whole_again_is_a_good_copy(shared_memory: Path, tmp_path: Path) -> None:
    where = config({"ram": ram(shared_memory), "disk": folder(tmp_path / "disk", retain="all")})
    async with CheckpointStore.open(where) as store:
        for step in (1, 2):
            await save_steps(store, step)
            await store.evict(step, "ram")
        (tmp_path / "disk/packs").rename(tmp_path / "disk/away")
        await store.collect()
        (tmp_path / "disk/away").rename(tmp_path / "disk/packs")
        with pytest.raises(Conflict, match="last good copy"):
            await store.evict(1, "disk")
        await store.verify(2)
        await store.evict(1, "disk")


async def two_on_disk_alone(store: CheckpointStore, place: Path) -> set[Path]:
    """Save two steps that the disk alone holds; returns the packs of the second."""
    await save_steps(store, 1)
    before = {*place.glob("packs/*/*.pack")}
    await save_steps(store, 2)
    for step in (1, 2):
        await store.evict(step, "ram")
    return {*place.glob("packs/*/*.pack")} - before


async def test_the_step_before_one_that_lacks_packs_on_all_tiers_is_not_deleted(
    shared_memory: Path, tmp_path: Path
) -> None:
    where = config({"ram": ram(shared_memory), "disk": folder(tmp_path / "disk", retain="all")})
    async with CheckpointStore.open(where) as store:
        for pack in await two_on_disk_alone(store, tmp_path / "disk"):
            pack.unlink()
        with pytest.raises(Corrupt):
            await store.restore(2)
        await store.verify(2, repair=True)
        with pytest.raises(Conflict, match="last good copy"):
            await store.evict(1, "disk")
        await save_steps(store, 3)
        await store.evict(1, "disk")


async def test_a_step_that_lacks_packs_on_all_tiers_makes_room_for_a_newer_one(
    shared_memory: Path, tmp_path: Path
) -> None:
    """Else a tier full of it and of the last good step would never hold another."""
    nbytes = sum(array.nbytes for array in tree()["params"].values())
    disk = folder(tmp_path / "disk", retain="all", capacity=3 * nbytes)
    async with CheckpointStore.open(config({"ram": ram(shared_memory), "disk": disk})) as store:
        for pack in await two_on_disk_alone(store, tmp_path / "disk"):
            pack.write_bytes(bytes(pack.stat().st_size))
        await store.verify(2, repair=True)
        await (await store.save(3, tree(3))).reached("disk")
        assert await steps_on(store, "disk") == [1, 3]
