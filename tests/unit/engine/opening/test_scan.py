"""What a tier holds stays known while the tier is scanned again, as when it comes back after a failure."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from reliability.tiers import FaultyTiers
from support.insight import flip_chunk, tier_of
from support.rescan import scan_again, scanned_again
from support.scenes import Heard, assert_restored, config, folder, polled, ram, tree

from tieredckpt import CheckpointStore
from tieredckpt.blobs.ram.store import RamStore
from tieredckpt.engine.promoting.promoter import Promoter
from tieredckpt.engine.tier import step_index
from tieredckpt.engine.tier.tier import Tier
from tieredckpt.errors import Conflict, TierUnavailable
from tieredckpt.events import TierFailed, TierRecovered


@pytest.fixture
async def store(tmp_path: Path, faults: FaultyTiers) -> AsyncIterator[CheckpointStore]:
    """Step 1 on two tiers, and step 2 on the slower one alone."""
    tiers = {name: folder(tmp_path / name, retain="all") for name in ("disk", "far")}
    async with CheckpointStore.open(config(tiers)) as store:
        for step in (1, 2):
            await store.save(step, tree(step))
        await store.flush()
        await store.evict(2, "disk")
        yield store


@pytest.fixture
def far(store: CheckpointStore) -> Tier:
    return tier_of(store, "far")


async def test_the_newest_step_is_found_and_restored_while_its_tier_is_scanned_again(
    store: CheckpointStore, far: Tier, faults: FaultyTiers
) -> None:
    before = await store.steps()
    async with scanned_again(store, far, faults["far"]):
        assert await store.latest_step() == 2
        assert await store.steps() == before
        assert_restored(await store.restore(), tree(2))
    assert await store.steps() == before
    assert_restored(await store.restore(), tree(2))


async def test_a_scan_that_fails_leaves_what_was_known(store: CheckpointStore, far: Tier, faults: FaultyTiers) -> None:
    before = await store.steps()
    faults["far"].fail("get", TierUnavailable("no answer"), key="steps/*")
    faults["far"].fail("get", TierUnavailable("no answer"), key="tieredckpt.json")
    with pytest.raises(TierUnavailable, match="no answer"):
        await scan_again(store, far)
    assert await store.steps() == before
    assert not far.steps.scanning


async def test_a_scan_finds_what_came_and_what_left_and_tells_who_listens(
    store: CheckpointStore, far: Tier, tmp_path: Path
) -> None:
    assert {step.step for step in far.steps.held.news("a listener")} == {1, 2}
    (place,) = (tmp_path / "far").glob("steps/*2-*")
    shutil.move(place, tmp_path / "aside")
    await scan_again(store, far)
    assert [info.step for info in await store.steps()] == [1]
    assert 2 in {step.step for step in far.steps.held.news("a listener")}
    shutil.move(tmp_path / "aside", place)
    await scan_again(store, far)
    assert [info.step for info in await store.steps()] == [1, 2]
    assert 2 in {step.step for step in far.steps.held.news("a listener")}


async def test_what_is_known_to_be_damaged_stays_so_over_a_scan(
    store: CheckpointStore, far: Tier, faults: FaultyTiers
) -> None:
    await store.evict(1, "disk")
    await flip_chunk(store, "far", 2, "params/w0")
    (found,) = await store.verify(2, "far", repair=True)
    assert found.lost == ("params/w0",)
    faults["far"].fail("list", TierUnavailable("no answer"), key="steps/*")
    with pytest.raises(TierUnavailable):
        await scan_again(store, far)
    assert [step.step for step in far.steps.impaired] == [2]
    await scan_again(store, far)
    assert [step.step for step in far.steps.impaired] == [2]
    with pytest.raises(Conflict, match="last good copy"):
        await store.evict(1, "far")
    await store.save(3, tree(2))  # which refers to no damaged bytes
    await store.flush()
    assert (await store.verify(3, "far"))[0].intact


async def test_a_damaged_step_that_left_unseen_is_forgotten_by_a_scan(
    store: CheckpointStore, far: Tier, tmp_path: Path
) -> None:
    await flip_chunk(store, "far", 2, "params/w0")
    await store.verify(2, "far", repair=True)
    (place,) = (tmp_path / "far").glob("steps/*2-*")
    shutil.rmtree(place)
    await scan_again(store, far)
    assert not far.steps.to_mend()


async def test_nothing_is_changed_on_a_tier_that_another_writer_may_have_changed_before_it_is_read_again(
    store: CheckpointStore, far: Tier, faults: FaultyTiers
) -> None:
    await store.promote(2, "disk")
    await store.evict(1, "far")
    faults["far"].fail("list", TierUnavailable("no answer"), key="steps/*", times=None)
    with pytest.raises(TierUnavailable, match="no answer"):
        await scan_again(store, far)
    with pytest.raises(Conflict, match="last good copy"):
        await store.evict(2, "disk")
    await flip_chunk(store, "far", 2, "params/w0")
    assert not (await store.verify(2, "far", repair=True))[0].repaired
    with pytest.raises(TierUnavailable):
        await store.promote(1, "far")
    faults["far"].clear()
    await scan_again(store, far)
    await store.promote(1, "far")
    await store.verify(2, "far", repair=True)  # unless its promoter has repaired it
    assert (await store.verify(2, "far"))[0].intact


async def test_who_waits_for_a_step_waits_for_a_scan_that_may_not_find_it_any_more(
    store: CheckpointStore, far: Tier, faults: FaultyTiers, tmp_path: Path
) -> None:
    saved = await store.save(3, tree(3))
    await saved.reached("far")
    async with scanned_again(store, far, faults["far"]):
        (place,) = (tmp_path / "far").glob("steps/*3-*")
        shutil.rmtree(place)  # another writer has evicted it
        reached = asyncio.create_task(saved.reached("far"))
        await store.steps()
        assert not reached.done()
    await reached
    assert place.is_dir()


async def test_who_waits_for_a_step_is_told_that_its_tier_could_not_be_read_again(
    store: CheckpointStore, far: Tier, faults: FaultyTiers, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def is_another(self: Promoter) -> bool:  # as when its file system was mounted anew
        return False

    monkeypatch.setattr(Promoter, "_is_itself", is_another)
    heard, state = Heard(store), store._life.engine.state
    saved = await store.save(3, tree(3))
    await saved.reached("far")
    faults["far"].fail("list", TierUnavailable("no answer"), key="steps/*", times=None)
    store._life.loop.soon(lambda: state.report(far, TierUnavailable("stale handle")))
    await polled(lambda: far.marker is None)
    with pytest.raises(TierUnavailable):
        await saved.reached("far")
    with pytest.raises(TierUnavailable):
        await store.flush()
    faults["far"].clear()
    await heard.first(TierRecovered)
    await saved.reached("far")
    await store.flush()


@pytest.mark.parametrize("dead", ["ram", "far"])
async def test_a_flush_needs_no_tier_that_was_silent_at_the_opening_and_on_which_nothing_is_due(
    dead: str, shared_memory: Path, tmp_path: Path, faults: FaultyTiers, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_memory(*arguments: Any, **options: Any) -> RamStore:
        raise TierUnavailable("no shared memory")

    far = folder(tmp_path / "far", promote="never")
    tiers = {"ram": ram(shared_memory), "disk": folder(tmp_path / "disk"), "far": far}
    if dead == "ram":
        monkeypatch.setattr(RamStore, "open", no_memory)
    else:
        faults.refuse(dead)
    async with CheckpointStore.open(config(tiers)) as store:
        saved = await store.save(1, tree(1))
        await store.flush()
        assert await store.where(1) == (("disk",) if dead == "ram" else ("ram", "disk"))
        if dead == "far":
            with pytest.raises(TierUnavailable):
                await saved.reached("far")


async def test_a_promotion_by_hand_waits_for_a_tier_that_just_comes_back(
    store: CheckpointStore, far: Tier, faults: FaultyTiers, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def is_another(self: Promoter) -> bool:
        return False

    await store.evict(1, "far")
    monkeypatch.setattr(Promoter, "_is_itself", is_another)
    reading, state = faults["far"].hold("get", key="tieredckpt.json"), store._life.engine.state
    store._life.loop.soon(lambda: state.report(far, TierUnavailable("stale handle")))
    await reading.reached()
    assert far.outdated
    promoting = asyncio.create_task(store.promote(1, "far"))
    await store.steps()
    assert not promoting.done()
    reading.release()
    await promoting
    assert await store.where(1) == ("disk", "far")


async def test_what_came_back_is_lacking_no_more(store: CheckpointStore, far: Tier, tmp_path: Path) -> None:
    step = max(far.steps.held)
    (pack,) = await store._life.loop.call(step_index.packs(far, step))
    shutil.move(tmp_path / "far" / pack, tmp_path / "aside")
    await store.collect()
    assert far.steps.lacking(step) == {pack}
    far.steps.impair(step, (step.manifest_key,))  # as of a commit that was misread
    shutil.move(tmp_path / "aside", tmp_path / "far" / pack)
    await scan_again(store, far)
    assert far.steps.has_good(step)


async def test_nothing_is_promoted_to_a_tier_that_was_never_read_for_another_writer_holds_it(
    tmp_path: Path, faults: FaultyTiers
) -> None:
    alone = {"far": folder(tmp_path / "far", retain="all")}
    async with CheckpointStore.open(config(alone)) as other:
        await other.save(1, tree(1))
        await other.flush()
        faults.refuse("far")
        async with CheckpointStore.open(config({"disk": folder(tmp_path / "disk"), **alone})) as store:
            heard = Heard(store)
            await store.save(5, tree(5))
            faults.allow("far")
            await heard.first(TierFailed, lambda event: isinstance(event.error, Conflict))
            with pytest.raises(TierUnavailable, match="is not changed before it is read again"):
                await store.promote(5, "far")
        assert [info.step for info in await other.steps()] == [1]
        assert len([*(tmp_path / "far").glob("steps/*")]) == 1


async def test_a_step_that_is_evicted_after_a_scan_has_read_it_is_not_held_afterwards(
    store: CheckpointStore, far: Tier, faults: FaultyTiers
) -> None:
    leaving = faults["far"].hold("delete", key="steps/*1-*/manifest*")
    evicting = asyncio.create_task(store.evict(1, "far"))
    await leaving.reached()
    reading = faults["far"].hold("get_into", key="packs/*")  # these are read after the steps
    scanning = asyncio.create_task(scan_again(store, far))
    try:
        await reading.reached()
        leaving.release()
        await polled(lambda: not far.steps.leaving)
    finally:
        reading.release()
    assert await scanning == [2]
    await evicting
    assert await store.where(1) == ("disk",)
