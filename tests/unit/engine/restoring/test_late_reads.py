"""Reads that are not answered in time: another tier is asked at once, and the same one again where there is none."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from reliability.tiers import FaultyTiers
from support.insight import tier_of
from support.limits import limit
from support.overdue import only_held_calls_are_late
from support.scenes import CHUNK, assert_restored, config, folder, tree

from tieredckpt import CheckpointStore
from tieredckpt.config import StoreConfig
from tieredckpt.engine.opening.upkeep import catalogue
from tieredckpt.errors import Corrupt, TierUnavailable

NEVER = 100
"""Retries that a test would not outlive, of reads that take their deadline each."""


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls that a test holds miss their deadline."""
    only_held_calls_are_late(monkeypatch)


def settings(path: Path, *names: str, **more: Any) -> StoreConfig:
    return config({name: folder(path / name, **more) for name in names})


def reads(faults: FaultyTiers, tier: str, verb: str = "get_into") -> int:
    """How many reads of a step a tier was asked for."""
    return sum(call.verb == verb and call.key.startswith(("packs/", "steps/")) for call in faults[tier].calls)


@pytest.mark.usefixtures("late")
@pytest.mark.parametrize("codec", ["none", "fast"])
async def test_the_next_tier_is_asked_when_reads_have_missed_their_deadline_once(
    tmp_path: Path, faults: FaultyTiers, monkeypatch: pytest.MonkeyPatch, codec: str
) -> None:
    limit(monkeypatch, read_run=CHUNK)  # so that there are more reads than are under way at a time
    saved = tree(1, arrays=16)
    async with CheckpointStore.open(settings(tmp_path, "near", "far", retries=NEVER, codec=codec)) as store:
        await (await store.save(1, saved)).reached("far")
        before = reads(faults, "near")
        faults["near"].hold("get_into", times=None)
        restored = await store.restore()
        assert_restored(restored, saved)
        assert 0 < reads(faults, "near") - before <= 16  # those that were under way
        assert restored.sources.keys() <= {"near", "far"}
        assert "far" in restored.sources
        faults["near"].clear()


@pytest.mark.usefixtures("late")
async def test_the_next_tier_is_asked_for_an_index_that_does_not_come(tmp_path: Path, faults: FaultyTiers) -> None:
    saved = tree(1)
    async with CheckpointStore.open(settings(tmp_path, "near", "far", retries=NEVER)) as store:
        await (await store.save(1, saved)).reached("far")
        for name in ("near", "far"):
            tier_of(store, name).steps.indexes.clear()
        before = reads(faults, "near", "get")
        faults["near"].hold("get", key="steps/*", times=None)
        restored = await store.restore()
        assert_restored(restored, saved)
        assert "far" in restored.sources
        assert reads(faults, "near", "get") == before + 1
        faults["near"].clear()


@pytest.mark.usefixtures("late")
@pytest.mark.parametrize("verb", ["get", "get_into"])
async def test_what_one_tier_alone_has_is_asked_for_again(tmp_path: Path, faults: FaultyTiers, verb: str) -> None:
    saved = tree(1)
    async with CheckpointStore.open(settings(tmp_path, "disk", retries=2)) as store:
        await store.save(1, saved)
        tier_of(store, "disk").steps.indexes.clear()
        faults["disk"].hold(verb, key="[ps]*/*", times=2)
        assert_restored(await store.restore(), saved)


@pytest.mark.usefixtures("late")
async def test_a_record_that_was_known_from_a_catalog_alone_is_asked_for_again(
    tmp_path: Path, faults: FaultyTiers, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit(monkeypatch, catalog_entries=1)
    saved, chosen = tree(1), settings(tmp_path, "disk", retries=2)
    async with CheckpointStore.open(chosen) as store:
        await store.save(1, saved)
        await store.save(2, tree(2))
        await store._life.loop.call(catalogue(tier_of(store, "disk")))
    async with CheckpointStore.open(chosen) as store:
        assert [held.whole for step, held in tier_of(store, "disk").steps.held.items() if step.step == 1] == [False]
        faults["disk"].hold("get", key="steps/*", times=2)
        assert_restored(await store.restore(1), saved)


@pytest.mark.usefixtures("late")
async def test_a_record_that_came_late_and_is_damaged_is_told_as_that(
    tmp_path: Path, faults: FaultyTiers, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit(monkeypatch, catalog_entries=1)
    chosen = settings(tmp_path, "disk", retries=2)
    async with CheckpointStore.open(chosen) as store:
        await store.save(1, tree(1))
        await store.save(2, tree(2))
        await store._life.loop.call(catalogue(tier_of(store, "disk")))
    async with CheckpointStore.open(chosen) as store:
        next(tmp_path.glob("disk/steps/*1-*/btree*")).unlink()
        faults["disk"].hold("get", key="steps/*", times=1)
        with pytest.raises(Corrupt, match="step 1"):
            await store.restore(1)


async def test_a_step_that_leaves_while_its_record_is_read_does_not_come_back(
    tmp_path: Path, faults: FaultyTiers, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit(monkeypatch, catalog_entries=1)
    saved, chosen = tree(1), settings(tmp_path, "near", "far")
    async with CheckpointStore.open(chosen) as store:
        for step in (1, 2):
            await (await store.save(step, saved)).reached("far")
        await store._life.loop.call(catalogue(tier_of(store, "near")))
    async with CheckpointStore.open(chosen) as store:
        near = tier_of(store, "near")
        assert [held.whole for step, held in near.steps.held.items() if step.step == 1] == [False]
        held = faults["near"].hold("get", key="steps/*1-*/btree*", after=True)
        restoring = asyncio.create_task(store.restore(1, resume=False))
        await held.reached()
        await store.evict(1, "near")
        held.release()
        assert_restored(await restoring, saved)
        assert await store.where(1) == ("far",)


@pytest.mark.usefixtures("late")
@pytest.mark.parametrize(("verb", "times"), [("get", 3), ("get_into", 4)])
async def test_it_is_asked_for_so_often_as_the_tier_says(
    tmp_path: Path, faults: FaultyTiers, verb: str, times: int
) -> None:
    """Of chunks that were read together, the first one decides."""
    async with CheckpointStore.open(settings(tmp_path, "disk", retries=2)) as store:
        await store.save(1, {"w": tree(1)["params"]["w0"]})
        tier_of(store, "disk").steps.indexes.clear()
        before = reads(faults, "disk", verb)
        faults["disk"].hold(verb, key="[ps]*/*", times=None)
        with pytest.raises(TierUnavailable, match=r"does not answer|is intact on no tier that answers"):
            await store.restore()
        assert reads(faults, "disk", verb) - before <= times
        faults["disk"].clear()


@pytest.mark.parametrize("verb", ["get", "get_into"])
async def test_the_next_tier_is_asked_when_one_is_opened_anew_under_a_restore(
    tmp_path: Path, faults: FaultyTiers, verb: str
) -> None:
    """Promise 4: the restore was told that the store is closed."""
    saved = tree(1)
    async with CheckpointStore.open(settings(tmp_path, "near", "far")) as store:
        await (await store.save(1, saved)).reached("far")
        await store.flush()
        near = tier_of(store, "near")
        near.steps.indexes.clear()
        held = faults["near"].hold(verb, key="[ps]*/*")
        restoring = asyncio.create_task(store.restore())
        await held.reached()
        await store._life.call(lambda engine: near.disconnect())
        held.release()
        restored = await restoring
        assert_restored(restored, saved)
        assert "far" in restored.sources
