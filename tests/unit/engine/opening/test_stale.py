"""A node that comes back with old memory does not bring back what the training has left behind."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from reliability.tiers import FaultyTiers, tried_again_soon
from support.agents import end_agent
from support.cohort import assert_whole, cohort
from support.limits import limit
from support.scenes import CHUNK, SOON, Heard, assert_restored, config, crash, folder, ram

from tieredckpt import CheckpointStore
from tieredckpt.config import StoreConfig
from tieredckpt.engine.opening import stale
from tieredckpt.engine.tier import commit_file, step_index
from tieredckpt.engine.tier.tier import Tier
from tieredckpt.errors import Corrupt, NotFound, TierUnavailable
from tieredckpt.events import StepPromoted, TierFailed, TierRecovered
from tieredckpt.format.manifest import StepId, StepIndex


def state(value: int) -> dict[str, Any]:
    return {"w": np.full(3 * CHUNK, value, np.uint8)}


@pytest.fixture
def place(shared_memory: Path) -> Path:
    return shared_memory


def on(node: str, place: Path) -> StoreConfig:
    nearest = ram(place, path=place / node / "ram", on_close="keep")
    return config({"ram": nearest, "disk": folder(place / "disk", retain="all")}, name="run")


async def left_behind(place: Path, faults: FaultyTiers) -> None:
    """Step 1 is everywhere; steps 2 and 3 are in the memory of node a alone; node b saved another step 2, and a 3."""
    async with CheckpointStore.open(on("a", place)) as store:
        await store.save(1, state(1))
    async with dying(on("a", place), faults) as store:
        await store.save(2, state(20))
        await store.save(3, state(30))


async def test_what_a_node_kept_in_memory_does_not_replace_what_was_saved_after_it(
    place: Path, faults: FaultyTiers
) -> None:
    await left_behind(place, faults)
    async with CheckpointStore.open(on("b", place)) as store:
        await store.restore()
        await store.save(2, state(2))
    async with CheckpointStore.open(on("a", place), read_only=True) as reader:
        assert [(info.step, info.tiers) for info in await reader.steps()] == [(1, ("ram", "disk")), (2, ("disk",))]
    async with CheckpointStore.open(on("a", place)) as store:
        assert [(info.step, info.tiers) for info in await store.steps()] == [(1, ("ram", "disk")), (2, ("disk",))]
        assert_restored(await store.restore(), state(2))
        await store.save(3, state(3))
        await store.flush()
    async with CheckpointStore.open(on("a", place)) as store:
        assert_restored(await store.restore(), state(3))
        for info in await store.steps():
            assert all(each.intact for each in await store.verify(info.step))


async def test_what_only_memory_has_is_still_the_newest_where_nobody_went_on(place: Path, faults: FaultyTiers) -> None:
    await left_behind(place, faults)
    async with CheckpointStore.open(on("b", place)) as store:
        await store.restore()
    async with CheckpointStore.open(on("a", place)) as store:
        assert_restored(await store.restore(), state(30))


async def test_what_followed_since_both_have_the_same_again_is_kept(place: Path, faults: FaultyTiers) -> None:
    await left_behind(place, faults)
    async with CheckpointStore.open(on("b", place)) as store:
        await store.restore()
        await store.save(2, state(2))
    faults.refuse("disk")
    store = await CheckpointStore.open(on("a", place))  # which cannot know what b has saved
    heard = Heard(store)
    await store.restore()
    await store.save(4, state(4))
    faults.allow("disk")
    await heard.first(StepPromoted, lambda event: event.step == 4)
    held = faults["disk"].hold("put", key="packs/*", times=None)
    await store.save(5, state(5))
    await crash(store)
    held.release()
    async with CheckpointStore.open(on("a", place)) as store:
        assert_restored(await store.restore(), state(5))


@asynccontextmanager
async def dying(settings: StoreConfig, faults: FaultyTiers) -> AsyncIterator[CheckpointStore]:
    """A store whose process dies before anything that it saves comes to the disk of all nodes."""
    store = await CheckpointStore.open(settings)
    held = faults["disk"].hold("put", key="packs/*", times=None)
    yield store
    await crash(store)
    held.release()


def with_disk(
    node: str, place: Path, *, retain: Any = "all", promote: Any = "always", promote_to_all: Any = "always"
) -> StoreConfig:
    """The same with a disk of the node besides; ``promote_to_all`` is of the disk that all nodes see."""
    tiers = {
        "ram": ram(place, path=place / node / "ram", on_close="keep"),
        "own": folder(place / node / "disk", retain=retain, promote=promote),
        "disk": folder(place / "disk", retain="all", promote=promote_to_all),
    }
    return config(tiers, name="run")


async def left_on_a_disk(place: Path, faults: FaultyTiers, *, since: Sequence[int] = ()) -> None:
    """Step 1 is everywhere; steps 2 and 3 are on node a alone, on its disk too; node b saved the steps ``since``."""
    async with CheckpointStore.open(with_disk("a", place)) as store:
        await store.save(1, state(1))
    async with dying(with_disk("a", place), faults) as store:
        for step in (2, 3):
            await (await store.save(step, state(10 * step))).reached("own")
    if since:
        await go_on_at_b(place, *since)


async def go_on_at_b(place: Path, *steps: int) -> None:
    async with CheckpointStore.open(with_disk("b", place)) as store:
        await store.restore()
        for step in steps:
            await (await store.save(step, state(step))).reached("disk")


@pytest.mark.parametrize("read_only", [False, True])
async def test_a_step_on_a_nodes_own_disk_is_not_taken_for_the_one_that_was_saved_elsewhere_since(
    place: Path, faults: FaultyTiers, read_only: bool
) -> None:
    await left_on_a_disk(place, faults, since=(2, 3))
    async with CheckpointStore.open(with_disk("a", place), read_only=read_only) as store:
        for _ in range(2):  # a reader lists at every call
            for step in (2, 3, None):
                assert_restored(await store.restore(step, resume=False), state(step or 3))


async def test_what_the_same_run_saved_after_it_is_set_apart_and_leaves_when_room_is_made(
    place: Path, faults: FaultyTiers
) -> None:
    await left_on_a_disk(place, faults, since=(2,))
    last_two = {"kind": "last_n", "n": 2}
    async with CheckpointStore.open(with_disk("a", place, retain=last_two)) as store:
        assert_restored(await store.restore(), state(2))
        for step in (3, 4):
            await store.save(step, state(step))
        await store.flush()
        assert [(info.step, info.tiers) for info in await store.steps() if "own" in info.tiers] == [
            (3, ("ram", "own", "disk")),
            (4, ("ram", "own", "disk")),
        ]
    assert len([*(place / "a/disk/packs").glob("*/*")]) == 2
    assert len([*(place / "a/disk/steps").glob("*/manifest.ocdbt")]) == 2


async def test_what_the_same_run_saved_after_it_stays_away_when_that_step_is_there_anew(
    place: Path, faults: FaultyTiers
) -> None:
    await left_on_a_disk(place, faults, since=(2,))
    for _ in range(2):
        async with CheckpointStore.open(with_disk("a", place)) as store:
            assert_restored(await store.restore(), state(2))
            await store.flush()
            assert [(info.step, info.tiers) for info in await store.steps()][1:] == [(2, ("own", "disk"))]


async def test_a_stale_step_is_not_told_as_damage(place: Path, faults: FaultyTiers) -> None:
    await left_on_a_disk(place, faults, since=(2,))
    async with CheckpointStore.open(with_disk("a", place), read_only=True) as reader:
        assert all(not each.problem for each in await reader.scrub())
        assert all(not each.damaged for each in await reader.steps())
        assert all(not each.damaged for each in await reader.tier_infos())
        with pytest.raises(NotFound):
            await reader.restore(3)


RARELY = {"kind": "every_n_steps", "n": 100}
"""So that no other step takes the place of a stale one."""


async def tells_no_damage(store: CheckpointStore) -> None:
    assert [(each.step, each.tiers) for each in await store.steps()] == [(1, ("ram", "own", "disk")), (2, ("disk",))]
    assert all(not each.damaged for each in await store.steps())
    assert all(not each.damaged for each in await store.tier_infos())


async def test_a_trainer_beside_an_agent_is_told_of_no_damage_either(place: Path, faults: FaultyTiers) -> None:
    await left_on_a_disk(place, faults, since=(2,))
    settings = with_disk("a", place, promote=RARELY).model_copy(update={"promote_in": "agent"})
    try:
        async with CheckpointStore.open(settings) as store:
            await tells_no_damage(store)
            with pytest.raises(NotFound):
                await store.restore(3)
    finally:
        end_agent(place / "a/ram")


async def test_ranks_are_told_of_no_damage_either(place: Path, faults: FaultyTiers) -> None:
    def on_node(node: str, promote: Any = "always") -> dict[str, Any]:
        return {
            "ram": ram(place, path=place / node / "ram", on_close="keep"),
            "own": folder(place / node / "disk", promote=promote),
            "disk": folder(place / "disk", retain="all"),
        }

    async with cohort(2, place, place, tiers=on_node("a")) as ranks:
        await ranks.reached(await ranks.save(1), "disk")
    async with cohort(2, place, place, tiers=on_node("a"), crashing=True) as ranks:
        faults.kill("disk")
        for step in (2, 3):
            await ranks.reached(await ranks.save(step, seed=10 * step), "own")
    faults.revive("disk")
    async with cohort(2, place, place, tiers=on_node("b")) as ranks:
        await ranks.restored()
        await ranks.reached(await ranks.save(2), "disk")
    async with cohort(2, place, place, tiers=on_node("a", RARELY)) as ranks:
        for store in ranks.stores:
            await tells_no_damage(store)
        with pytest.raises(NotFound):
            await ranks.restored(3)


async def test_later_steps_than_the_others_have_are_set_apart_where_none_before_them_is_left(
    place: Path, faults: FaultyTiers
) -> None:
    await left_on_a_disk(place, faults)
    shutil.rmtree(place / "a/disk/steps/0000000002-000002")  # not retained
    shutil.rmtree(place / "a/ram")  # rebooted
    await go_on_at_b(place, 2)
    async with CheckpointStore.open(with_disk("a", place)) as store:
        assert_restored(await store.restore(), state(2))


async def test_a_save_in_memory_that_is_newer_than_all_others_is_stale_where_its_run_was_overtaken(
    place: Path, faults: FaultyTiers
) -> None:
    async with CheckpointStore.open(on("a", place)) as store:
        await store.save(1, state(1))
    store = await CheckpointStore.open(on("a", place))
    heard = Heard(store)
    faults.kill("disk")
    for step in (2, 3):
        await store.save(step, state(10 * step))
        await heard.first(TierFailed)
    await store.evict(2, "ram")
    await crash(store)
    faults.revive("disk")
    async with CheckpointStore.open(on("b", place)) as store:
        await store.restore()
        await store.save(2, state(2))
    async with CheckpointStore.open(on("a", place)) as store:
        assert_restored(await store.restore(), state(2))


@pytest.mark.parametrize("back_to", [1, 2])
async def test_what_an_overtaken_run_saved_after_it_went_back_is_stale_too(
    place: Path, faults: FaultyTiers, back_to: int
) -> None:
    """Its last save has a higher serial than any that the other run gave."""
    async with CheckpointStore.open(on("a", place)) as store:
        await store.save(1, state(1))
    async with dying(on("a", place), faults) as store:
        for step in (2, 3, 4):
            await store.save(step, state(10 * step))
        await store.restore(back_to, resume=True)
        await store.save(3, state(31))
    async with CheckpointStore.open(on("b", place)) as store:
        await store.restore()
        for step in (2, 3, 4):
            await store.save(step, state(step))
        await store.flush()
    async with CheckpointStore.open(on("a", place)) as store:
        assert_restored(await store.restore(), state(4))
        assert [info.step for info in await store.steps()] == [1, 2, 3, 4]


@pytest.mark.parametrize("rebooted", [False, True])
async def test_what_lies_between_two_saves_of_a_slower_tier_is_stale_where_another_run_saved_the_later_one(
    place: Path, rebooted: bool
) -> None:
    """The slower tier takes every third step; two nodes saved steps 4 and 5 after step 3 each, one went on to 6."""
    third = {"kind": "every_n_steps", "n": 3}
    for node, steps in (("a", (3, 4, 5)), ("b", (4, 5, 6))):
        store = await CheckpointStore.open(with_disk(node, place, promote_to_all=third))
        await store.restore()
        for step in steps:
            await (await store.save(step, state(step if node == "b" else 10 * step))).reached("own")
        await store.flush()
        await crash(store)
    if rebooted:
        shutil.rmtree(place / "a/ram")
    for _ in range(2):
        async with CheckpointStore.open(with_disk("a", place, promote_to_all=third)) as store:
            assert_restored(await store.restore(resume=False), state(6))
            assert [info.step for info in await store.steps()] == [3, 6]
            for step in (4, 5):
                with pytest.raises(NotFound):
                    await store.restore(step)


async def test_what_was_saved_since_is_the_newest_also_where_nothing_was_restored(
    place: Path, faults: FaultyTiers
) -> None:
    await left_on_a_disk(place, faults, since=(5,))
    async with dying(with_disk("a", place), faults) as store:
        await (await store.save(6, state(6))).reached("own")
    shutil.rmtree(place / "a/ram")
    async with CheckpointStore.open(with_disk("a", place)) as store:
        assert_restored(await store.restore(), state(6))


async def test_what_was_saved_since_the_node_came_back_is_the_newest(place: Path, faults: FaultyTiers) -> None:
    await left_on_a_disk(place, faults, since=(2, 3))
    async with dying(with_disk("a", place), faults) as store:
        await store.restore()
        await (await store.save(4, state(4))).reached("own")
    async with CheckpointStore.open(with_disk("a", place)) as store:
        assert_restored(await store.restore(), state(4))
        await store.flush()
        for info in await store.steps():
            assert all(not each.problem for each in await store.verify(info.step))


def refuse_indexes(monkeypatch: pytest.MonkeyPatch, error: type[Exception]) -> None:
    """No index of a stale step can be read on the node's own disk."""
    load = step_index.load

    async def fails(tier: Tier, step: StepId) -> StepIndex:
        if tier.name == "own":
            raise error("by script")
        return await load(tier, step)

    monkeypatch.setattr(stale.step_index, "load", fails)


async def test_a_disk_that_fails_while_its_steps_are_compared_does_not_stop_the_training(
    place: Path, faults: FaultyTiers, monkeypatch: pytest.MonkeyPatch
) -> None:
    await left_on_a_disk(place, faults, since=(2,))
    refuse_indexes(monkeypatch, TierUnavailable)
    with tried_again_soon():
        async with CheckpointStore.open(with_disk("a", place)) as store:
            heard = Heard(store)
            monkeypatch.undo()
            assert_restored(await store.restore(2, resume=False), state(2))
            await heard.first(TierRecovered)
            assert_restored(await store.restore(2, resume=False), state(2))
            await store.flush()  # what was on the disk is found again, and does not come a second time
            assert [event.step for event in heard.of(StepPromoted) if event.tier == "own"] == [2]


async def test_a_disk_that_fails_while_its_steps_are_compared_keeps_those_that_are_not_stale(
    place: Path, faults: FaultyTiers, monkeypatch: pytest.MonkeyPatch
) -> None:
    await left_on_a_disk(place, faults, since=(2,))
    refuse_indexes(monkeypatch, TierUnavailable)
    limit(monkeypatch, first_retry=SOON, last_retry=SOON)
    async with CheckpointStore.open(with_disk("a", place)) as store:
        monkeypatch.undo()
        limit(monkeypatch, first_retry=SOON, last_retry=SOON)
        for _ in range(2):
            assert [info.step for info in await store.steps() if "own" in info.tiers] == [1]
            assert not (await store.verify(2, "own"))[0].intact


@pytest.mark.parametrize("error", [Corrupt, NotFound])
async def test_a_stale_step_whose_index_is_lost_neither_stops_the_opening_nor_comes_back(
    place: Path, faults: FaultyTiers, monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    await left_on_a_disk(place, faults, since=(2,))
    refuse_indexes(monkeypatch, error)
    async with CheckpointStore.open(with_disk("a", place)) as store:
        monkeypatch.undo()
        assert_restored(await store.restore(2, resume=False), state(2))
        assert_restored(await store.restore(), state(2))


async def test_a_stale_step_that_leaves_while_its_packs_are_looked_up_does_not_stop_the_opening(
    place: Path, faults: FaultyTiers, monkeypatch: pytest.MonkeyPatch
) -> None:
    find_packs = step_index.packs

    async def leave(tier: Tier, step: StepId) -> frozenset[str]:
        found = await find_packs(tier, step)
        await commit_file.retract(tier, step)
        return found

    await left_on_a_disk(place, faults, since=(2,))
    monkeypatch.setattr(step_index, "packs", leave)
    async with CheckpointStore.open(with_disk("a", place)) as store:
        monkeypatch.undo()
        assert_restored(await store.restore(), state(2))
        await store.flush()
        assert [info.step for info in await store.steps()] == [1, 2]


@pytest.mark.parametrize("mounted_late", [False, True])
async def test_a_disk_that_is_opened_again_brings_nothing_back_either(
    place: Path, faults: FaultyTiers, mounted_late: bool
) -> None:
    await left_on_a_disk(place, faults, since=(2,))
    if mounted_late:
        faults.refuse("own")
    with tried_again_soon():
        async with CheckpointStore.open(with_disk("a", place)) as store:
            heard = Heard(store)
            if not mounted_late:
                faults.kill("own")
                await store.save(4, state(4))
                await heard.first(TierFailed)
            faults.revive("own") if not mounted_late else faults.allow("own")
            await heard.first(TierRecovered)
            assert_restored(await store.restore(2, resume=False), state(2))
            with pytest.raises(NotFound):
                await store.restore(3, resume=False)


async def test_of_several_ranks_too_what_was_left_behind_is_dropped(shared_memory: Path, faults: FaultyTiers) -> None:
    disk = shared_memory / "disk"
    async with cohort(2, shared_memory, disk, nodes=["a", "b"]) as ranks:
        await ranks.reached(await ranks.save(1), "disk")
    async with cohort(2, shared_memory, disk, nodes=["a", "b"], crashing=True) as ranks:
        faults.kill("disk")
        await ranks.save(2, seed=20)
        await ranks.all(lambda store, rank: store._life.loop.call(agreed(store, 2)))
    faults.revive("disk")
    async with cohort(2, shared_memory, disk, nodes=["c", "d"]) as ranks:
        await ranks.restored()
        await ranks.reached(await ranks.save(2, seed=2), "disk")
    async with cohort(2, shared_memory, disk, nodes=["a", "b"]) as ranks:
        assert [(info.step, info.tiers) for info in await ranks[0].steps()] == [(1, ("ram", "disk")), (2, ("disk",))]
        for restored in await ranks.restored():
            assert_whole(restored, 2)


async def agreed(store: CheckpointStore, step: int) -> None:
    state = store._life.engine.state
    await state.changed.until(lambda: any(held.step == step for held in state.tiers[0].steps.held))
