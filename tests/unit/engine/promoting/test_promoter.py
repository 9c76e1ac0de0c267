"""What goes to a tier first, and how a tier that failed is taken up again."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from typing import Any

import pytest
from reliability.tiers import FaultyTiers
from support.insight import tier_of
from support.limits import limit
from support.scenes import SOON, Heard, assert_restored, config, folder, ram, taken_over, tree

from tieredckpt import CheckpointStore
from tieredckpt.blobs.base import Outgrown
from tieredckpt.config import StoreConfig
from tieredckpt.engine.keeping.collector import Collector
from tieredckpt.engine.mode import alone
from tieredckpt.engine.promoting import copy_step
from tieredckpt.engine.restoring.source import SilentSource
from tieredckpt.engine.saving import copy_to_slab
from tieredckpt.engine.saving.snapshot import Snapshot
from tieredckpt.engine.state.state import State
from tieredckpt.engine.tier import lease as lease_module
from tieredckpt.engine.tier.slab_index import SlabIndex
from tieredckpt.engine.tier.tier import Tier
from tieredckpt.errors import Conflict, Corrupt, NotFound, TieredCkptError, TierUnavailable
from tieredckpt.events import StepPromoted, TierFailed, TierRecovered
from tieredckpt.format.manifest import StepId


@pytest.fixture
def two_tiers(shared_memory: Path, disk: Path) -> StoreConfig:
    return config({"ram": ram(shared_memory), "disk": folder(disk)})


def step_of(store: CheckpointStore, number: int) -> StepId:
    (found,) = [step for step in store._life.engine.state.records() if step.step == number]
    return found


async def on_disk(store: CheckpointStore, *numbers: int) -> None:
    """Return when the disk has these steps."""
    steps = tier_of(store, "disk").steps
    async with asyncio.timeout(SOON):
        await store._life.loop.call(
            store._life.engine.state.changed.until(lambda: {*numbers} <= {held.step for held in steps.held})
        )


async def test_a_tier_that_comes_back_gets_the_newest_step_first(two_tiers: StoreConfig, faults: FaultyTiers) -> None:
    """A restart would take it."""
    async with CheckpointStore.open(two_tiers) as store:
        heard = Heard(store)
        faults.kill("disk")
        for step in (1, 2, 3):
            await store.save(step, tree(step))
        await heard.first(TierFailed)
        faults.revive("disk")
        await on_disk(store, 1, 2, 3)
    assert [event.step for event in heard.of(StepPromoted)] == [3, 2, 1]


async def test_the_last_step_before_a_preemption_waits_for_no_older_one_and_that_comes_later(
    two_tiers: StoreConfig, faults: FaultyTiers
) -> None:
    async with CheckpointStore.open(two_tiers) as store:
        older = faults["disk"].hold("put", key="packs/*")
        await store.save(1, tree(1))
        await older.reached()
        await store.save(2, tree(2))
        engine = store._life.engine
        async with asyncio.timeout(SOON):
            await store._life.loop.call(engine.promote_at_once(step_of(store, 2), tier_of(store, "disk")))
        assert not older.is_released
        await on_disk(store, 1, 2)


async def test_a_step_that_is_asked_for_interrupts_no_newer_one(
    shared_memory: Path, disk: Path, faults: FaultyTiers
) -> None:
    each_second = {"promote": {"kind": "every_n_steps", "n": 2}}
    async with CheckpointStore.open(config({"ram": ram(shared_memory), "disk": folder(disk, **each_second)})) as store:
        await store.save(1, tree(1))
        newer = faults["disk"].hold("put", key="packs/*")
        await store.save(2, tree(2))
        await newer.reached()
        await store._life.loop.call(store._life.engine.give_way(step_of(store, 1), "disk"))
        newer.release()
        await on_disk(store, 2)
        assert sum(call.verb == "put" and call.key.startswith("packs/") for call in faults["disk"].calls) == 1


async def test_a_tier_whose_objects_lie_elsewhere_since_its_servers_changed_is_opened_anew_and_filled(
    two_tiers: StoreConfig, disk: Path, faults: FaultyTiers
) -> None:
    async with CheckpointStore.open(two_tiers) as store:
        await (await store.save(1, tree(1))).reached("disk")
        shutil.move(disk, disk.with_name("elsewhere"))
        faults["disk"].kill(Outgrown("there is another server, by script"))
        await store.save(2, tree(2))
        await on_disk(store, 1, 2)
    async with CheckpointStore.open(config({"disk": folder(disk)}), read_only=True) as reader:
        for step in (1, 2):
            assert_restored(await reader.restore(step), tree(step))


async def test_a_tier_that_fails_again_while_it_is_scanned_is_opened_anew(
    two_tiers: StoreConfig, faults: FaultyTiers
) -> None:
    """As where it is mounted anew meanwhile: what was open is of the old mount."""
    async with CheckpointStore.open(two_tiers) as store:
        await (await store.save(1, tree(1))).reached("disk")
        faults["disk"].fail("list", TierUnavailable("of an old mount, by script"), key="steps/*", times=None)
        faults["disk"].fail("get", NotFound("not there just now, by script"), key="tieredckpt.json")
        faults["disk"].fail("put", TierUnavailable("by script"), key="packs/*")
        await store.save(2, tree(2))
        await on_disk(store, 1, 2)


async def test_a_tier_that_fails_again_while_it_is_scanned_is_scanned_before_it_is_used(
    shared_memory: Path, disk: Path, faults: FaultyTiers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another writer has been there: a step would refer to packs that it has collected."""

    writing = {"lease_ttl": 1000, "grace": 2000}
    settings = config({"ram": ram(shared_memory), "disk": folder(disk, retain={"kind": "last_n", "n": 3})}, **writing)
    async with CheckpointStore.open(settings) as paused:
        await (await paused.save(1, tree(1))).reached("disk")
        own = faults["disk"]
        await taken_over(disk, **writing)
        now = lease_module._now
        monkeypatch.setattr(lease_module, "_now", lambda: now() + 1001)
        own.fail("list", TierUnavailable("by script"), key="steps/*")
        await paused.save(3, tree(1))  # of the values of step 1
        await on_disk(paused, 2, 3)
    async with CheckpointStore.open(config({"disk": folder(disk)}), read_only=True) as reader:
        assert_restored(await reader.restore(3), tree(1))


async def test_a_tier_that_failed_is_left_alone_until_its_time(
    two_tiers: StoreConfig, faults: FaultyTiers, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit(monkeypatch, first_retry=SOON, last_retry=SOON)
    async with CheckpointStore.open(two_tiers) as store:
        heard = Heard(store)
        faults.kill("disk")
        await store.save(1, tree(1))
        await heard.first(TierFailed)
        calls = len(faults["disk"].calls)
        await asyncio.sleep(0.2)
        assert len(faults["disk"].calls) == calls


async def test_after_a_flush_tiers_rest_until_something_changes(two_tiers: StoreConfig, tmp_path: Path) -> None:
    """Or two tiers would wake each other for ever."""
    three_tiers = {tier.name: tier for tier in two_tiers.tiers} | {"far": folder(tmp_path / "far")}
    async with CheckpointStore.open(config(three_tiers)) as store:
        await store.save(1, tree(1))
        await store.flush()
        promoters = store._life.engine.promoters.values()
        before = sum(promoter._rests for promoter in promoters)
        await asyncio.sleep(0.2)
        assert sum(promoter._rests for promoter in promoters) < before + 30


@pytest.mark.parametrize("error", [SilentSource, Corrupt, NotFound, Conflict])
async def test_a_step_that_cannot_be_copied_is_no_failure_of_its_tier_and_keeps_no_other_from_it(
    two_tiers: StoreConfig, faults: FaultyTiers, monkeypatch: pytest.MonkeyPatch, error: type[TieredCkptError]
) -> None:
    copy = alone.copy_step

    async def fail_one(state: State, collector: Collector, step: StepId, tier: Tier) -> int:
        if step.step == 3:
            raise error("by script")
        return await copy(state, collector, step, tier)

    monkeypatch.setattr(alone, "copy_step", fail_one)
    async with CheckpointStore.open(two_tiers) as store:
        heard = Heard(store)
        first = faults["disk"].hold("put", key="packs/*")
        await store.save(1, tree(1))
        await first.reached()
        await store.save(2, tree(2))
        newest = await store.save(3, tree(3))
        first.release()
        await on_disk(store, 1, 2)
        with pytest.raises(error, match=r"step 3 .* cannot reach tier 'disk': by script"):
            await newest.reached("disk")
        assert not heard.of(TierFailed)


@pytest.mark.parametrize("error", [TierUnavailable, RuntimeError])
async def test_an_error_that_nobody_foresaw_fails_the_tier_for_a_while_and_is_logged(
    two_tiers: StoreConfig,
    faults: FaultyTiers,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    error: type[Exception],
) -> None:
    """It would be met again at once, and again."""

    errors, copy = [error("once")], alone.copy_step

    async def fail_once(*arguments: Any) -> int:
        if errors:
            raise errors.pop()
        return await copy(*arguments)

    monkeypatch.setattr(alone, "copy_step", fail_once)
    async with CheckpointStore.open(two_tiers) as store:
        heard = Heard(store)
        checkpoint = await store.save(1, tree(1))
        assert str((await heard.first(TierFailed)).error) == "once"
        await heard.first(TierRecovered)
        await checkpoint.reached("disk")
    assert ("unexpected failure" in caplog.text) is (error is RuntimeError)


async def test_ram_that_goes_away_under_a_promotion_is_no_failure_of_the_other_tier(
    two_tiers: StoreConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_from_slab, gone = copy_step._Packing.add_from_slab, False

    async def disconnect(packing: Any, *arguments: Any) -> None:
        nonlocal gone
        if not gone:
            gone = True
            nearest = packing.state.tiers[0]
            shutil.rmtree(nearest.store.location)
            await nearest.disconnect()  # as its promoter does where its folder went away
        await add_from_slab(packing, *arguments)

    monkeypatch.setattr(copy_step._Packing, "add_from_slab", disconnect)
    async with CheckpointStore.open(two_tiers) as store:
        heard = Heard(store)
        await store.save(1, tree(1))
        await store.flush()
        assert gone
        assert [event for event in heard.of(TierFailed) if event.tier == "disk"] == []


async def test_a_save_whose_ram_goes_away_under_the_copy_goes_past_it(
    two_tiers: StoreConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy_cells = copy_to_slab.copy_cells

    async def disconnect(state: State, snapshot: Snapshot, index: SlabIndex) -> None:
        nearest = state.tiers[0]
        shutil.rmtree(nearest.store.location)
        await nearest.disconnect()  # as its promoter does where its folder went away
        await copy_cells(state, snapshot, index)

    monkeypatch.setattr(copy_to_slab, "copy_cells", disconnect)
    async with CheckpointStore.open(two_tiers) as store:
        await store.save(1, tree(1))
        assert await store.where(1) == ("disk",)
        assert_restored(await store.restore(), tree(1))
