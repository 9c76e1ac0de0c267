"""A collection beside commits that cannot be read, come late, or have lost a file takes no pack that a step needs."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path
from typing import Any

import pytest
from reliability.tiers import FaultyTiers
from support.collecting import GRACE, Place, assert_restores, changed, opened, state, two_steps_apart
from support.insight import tier_of
from support.limits import limit
from support.scenes import Heard, assert_restored, config, folder, ram

from tieredckpt import CheckpointStore
from tieredckpt.engine.keeping.used_packs import packs_by_step
from tieredckpt.engine.opening.scan import look_again
from tieredckpt.engine.tier import step_index
from tieredckpt.engine.tier.tier import Tier
from tieredckpt.errors import Corrupt, TierUnavailable
from tieredckpt.events import StepEvicted, TierRecovered
from tieredckpt.format import layout
from tieredckpt.format.manifest import StepId
from tieredckpt.testing.faulty import Faulty


async def test_the_packs_of_a_step_stay_whose_commit_could_not_be_read_once(
    tmp_path: Path, faults: FaultyTiers
) -> None:
    disk = tmp_path / "disk"
    settings = config({"disk": folder(disk, retain="all")}, grace=GRACE)
    async with CheckpointStore.open(settings) as store:
        for step in (1, 2, 3):
            await store.save(step, changed(step))
    for path in disk.glob("packs/*/*"):
        os.utime(path, (time.time() - 2 * GRACE,) * 2)

    def lying_twice(tier: str, faulty: Faulty) -> None:
        faulty.flip("get", 100, key="steps/0000000002-*/manifest.ocdbt", times=2)

    with faults.from_opening(lying_twice):
        async with CheckpointStore.open(settings) as store:
            assert [info.step for info in await store.steps()] == [1, 3]
            await store.collect()
            assert_restored(await store.restore(2, resume=False), changed(2))


@pytest.mark.parametrize(("owner", "call"), [(step_index, "load"), (Tier, "now")], ids=["indexes", "time"])
async def test_the_packs_of_a_step_stay_that_is_read_well_beside_the_collection(
    place: Place,
    disk: dict[str, Any],
    faults: FaultyTiers,
    monkeypatch: pytest.MonkeyPatch,
    owner: Any,
    call: str,
) -> None:
    """A medium fails now and then: for hours, and not when a verification asks while the collection waits for it."""
    really = getattr(owner, call)

    async def after_a_verification(tier: Tier, *more: Any) -> Any:
        if StepId(1, 1) in tier.steps.damaged:
            faults["disk"].clear()
            await look_again(tier, StepId(1, 1))
        return await really(tier, *more)

    async with opened(place, disk) as store:
        await two_steps_apart(store)
        tier = tier_of(store, "disk")
        tier.quarantine(StepId(1, 1), Corrupt("no commit"))
        stray = place.disk / layout.btree_key(7, 7)
        stray.parent.mkdir()
        stray.touch()  # whose age is looked up
        place.let_the_grace_pass()
        faults["disk"].flip("get", 100, key="steps/0000000001-*/manifest.ocdbt", times=None)
        tier.steps.indexes.forget(StepId(2, 2))  # which is looked up, too
        monkeypatch.setattr(owner, call, after_a_verification)
        await store._life.loop.call(store._life.engine.collector.collect(tier))
        assert StepId(1, 1) in tier.steps.held
        assert all(found.intact for found in await store.verify(1, "disk"))


async def test_a_damaged_step_that_is_evicted_while_another_is_read_again_ends_no_collection(
    place: Place, disk: dict[str, Any], faults: FaultyTiers
) -> None:
    async with opened(place, disk) as store:
        await two_steps_apart(store)
        tier = tier_of(store, "disk")
        for step in (StepId(1, 1), StepId(2, 2)):
            tier.quarantine(step, Corrupt("no commit"))
        reading = faults["disk"].hold("get", key="steps/0000000001-*/manifest.ocdbt")
        collecting = asyncio.create_task(store._life.loop.call(store._life.engine.collector.collect(tier)))
        await reading.reached()
        heard = Heard(store)
        evicting = asyncio.create_task(store.evict(2, "disk"))  # ends when the packs may be collected
        await heard.first(StepEvicted)
        reading.release()
        await asyncio.gather(collecting, evicting)
        assert await store.where(1) == ("ram", "disk")


async def test_a_step_that_is_read_well_while_others_are_looked_up_counts_with_its_packs(
    place: Place, disk: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the lookup itself had found it damaged."""
    really = step_index.load

    async def load(tier: Tier, step: StepId) -> Any:
        if step == StepId(1, 1) and step not in seen:
            seen.add(step)
            raise Corrupt("bytes that came wrong just once")
        if StepId(1, 1) in tier.steps.damaged:
            await look_again(tier, StepId(1, 1))
        return await really(tier, step)

    async with opened(place, disk) as store:
        await two_steps_apart(store)
        tier, seen = tier_of(store, "disk"), set[StepId]()
        for step in tuple(tier.steps.held):
            tier.steps.indexes.forget(step)
        monkeypatch.setattr(step_index, "load", load)
        used = await store._life.loop.call(packs_by_step(tier))
        assert used.keys() == tier.steps.held.keys() == {StepId(1, 1), StepId(2, 2)}


async def a_late_commit(place: Place, disk: dict[str, Any], step: int) -> tuple[Path, bytes]:
    """A step whose writer is taken for dead before its manifest arrives: the file, and what is to come there."""
    async with opened(place, disk) as store:
        await (await store.save(step, changed(step, keeps=3))).reached("disk")
    (manifest,) = place.disk.glob(f"steps/{step:010d}-*/manifest.ocdbt")
    content = manifest.read_bytes()
    manifest.unlink()
    return manifest, content


@pytest.mark.parametrize("readable", [True, False], ids=["whole", "torn"])
async def test_a_step_that_another_writer_commits_late_is_no_leftover(
    place: Place, disk: dict[str, Any], readable: bool
) -> None:
    async with opened(place, disk) as store:
        await (await store.save(1, state())).reached("disk")
    manifest, content = await a_late_commit(place, disk, 7)
    async with opened(place, disk) as store:
        heard = Heard(store)
        await (await store.save(2, changed(2))).reached("disk")
        manifest.write_bytes(content if readable else content[:-1])
        place.let_the_grace_pass()
        with pytest.raises(TierUnavailable, match="another writer has committed step 7"):
            await store.collect()
        await heard.first(TierRecovered)
        for _ in range(2):  # where a store tells no times, what is unknown ages from when it was first seen
            place.let_the_grace_pass()
            await store.collect()
        assert manifest.exists()
        assert await store.where(2) == ("ram", "disk")
        if readable:
            assert await store.where(7) == ("disk",)
            await assert_restores(store, 7, changed(7, keeps=3))
            assert all(found.intact for found in await store.verify(7))
            await store.save(8, changed(8))
            assert len({info.serial for info in await store.steps() if info.step in (7, 8)}) == 2


async def test_a_commit_of_a_step_that_was_evicted_here_is_collected_when_it_comes_late(
    place: Place, disk: dict[str, Any]
) -> None:
    """A put that was repeated may be carried out once more after the step has left."""
    async with opened(place, disk) as store:
        for step in (1, 2):
            await (await store.save(step, changed(step))).reached("disk")
        (manifest,) = place.disk.glob("steps/0000000001-*/manifest.ocdbt")
        content = manifest.read_bytes()
        await store.evict(1, "disk")
        manifest.parent.mkdir(exist_ok=True)
        manifest.write_bytes(content)
        for _ in range(2):
            place.let_the_grace_pass()
            await store.collect()
        assert not manifest.exists()
        assert await store.where(1) == ("ram",)


@pytest.mark.parametrize("lost", ["btree", "*"], ids=["index", "index and manifest"])
async def test_a_full_tier_takes_newer_steps_though_files_of_an_older_one_were_deleted(
    shared_memory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lost: str
) -> None:
    limit(monkeypatch, unreadable_commit=0.0)
    disk = folder(tmp_path / "disk", capacity="780 KiB", retain="all")
    settings = config({"ram": ram(shared_memory), "disk": disk})
    async with CheckpointStore.open(settings) as store:
        for step in (1, 2, 3):
            await store.save(step, changed(step))
            await store.flush()
    async with CheckpointStore.open(settings) as store:
        for file in (tmp_path / "disk/steps").glob(f"*1-*/{lost}"):
            file.unlink()
        for step in (4, 5):
            await store.save(step, changed(step))
            await store.flush()
            assert "disk" in await store.where(step)


async def test_a_tier_without_its_marker_is_no_tier_that_has_lost_a_step(shared_memory: Path, tmp_path: Path) -> None:
    settings = config({"ram": ram(shared_memory), "disk": folder(tmp_path / "disk")})
    async with CheckpointStore.open(settings) as store:
        for step in (1, 2):
            await store.save(step, changed(step))
            await store.flush()
    async with CheckpointStore.open(settings) as store:
        lost = [tmp_path / "disk" / layout.MARKER, *(tmp_path / "disk/steps").glob("*1-*/btree")]
        for file in lost:
            file.rename(tmp_path / file.name)
        with pytest.raises(TierUnavailable, match=r"tier 'disk' has lost its marker and step 1 .*; is it mounted"):
            await packs_by_step(tier_of(store, "disk"))
        for file in lost:
            (tmp_path / file.name).rename(file)
        assert await store.where(1) == ("disk",)
