"""Promise 5: a tier may fail, training may not; and what the tier missed it gets when it works again."""

from __future__ import annotations

import asyncio
import shutil
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from reliability.tiers import FaultyTiers
from support.insight import tier_of
from support.overdue import only_held_calls_are_late
from support.scenes import (
    CHUNK,
    SOON,
    Heard,
    assert_restored,
    assert_same,
    config,
    crash,
    files_below,
    folder,
    leases,
    ram,
    save_steps,
    tree,
)

from tieredckpt import CheckpointStore
from tieredckpt.blobs.posix import store as posix
from tieredckpt.config import StoreConfig
from tieredckpt.engine.admin import Admin
from tieredckpt.engine.mode import alone
from tieredckpt.engine.promoting.promoter import Promoter
from tieredckpt.engine.restoring import reader
from tieredckpt.engine.restoring.pieces import Piece
from tieredckpt.engine.restoring.source import StepSource
from tieredckpt.engine.state.state import State
from tieredckpt.engine.tier.lease import Lease
from tieredckpt.engine.tier.tier import Tier
from tieredckpt.errors import Corrupt, NoSpace, NotFound, TierUnavailable
from tieredckpt.events import StepPromoted, TierFailed, TierRecovered


@pytest.fixture
def three_tiers(shared_memory: Path, tmp_path: Path, disk: Path) -> StoreConfig:
    return config({"ram": ram(shared_memory), "disk": folder(disk), "far": folder(tmp_path / "far")})


def manifests(disk: Path) -> list[Path]:
    return [path for path in files_below(disk) if path.name == "manifest.ocdbt"]


ERRORS = pytest.mark.parametrize(
    "error", [TierUnavailable, pytest.param(RuntimeError, marks=pytest.mark.unmapped, id="unmapped")]
)
"""What our own stores raise, and what the store of another package may raise though it should not."""


@ERRORS
async def test_a_tier_that_dies_is_bypassed_reported_and_caught_up(
    two_tiers: StoreConfig, faults: FaultyTiers, error: type[Exception]
) -> None:
    async with CheckpointStore.open(two_tiers) as store:
        heard = Heard(store)
        await save_steps(store, 1)
        faults.kill("disk", error("the cable was pulled"))
        checkpoints = [await store.save(step, tree(step)) for step in (2, 3)]
        failed = await heard.first(TierFailed)
        assert failed.tier == "disk"
        with pytest.raises(TierUnavailable, match=r"step 2 .*'disk'.*the cable was pulled"):
            await checkpoints[0].reached("disk")
        with pytest.raises(TierUnavailable, match="the cable was pulled"):
            await store.flush()
        restored = await store.restore()
        assert restored is not None
        assert restored.step == 3
        assert set(restored.sources) == {"ram"}
        faults.revive("disk")
        await heard.first(TierRecovered)
        for checkpoint in checkpoints:
            await checkpoint.reached("disk")
        await store.flush()
        assert [info.tiers for info in await store.steps()] == [("ram", "disk")] * 3


@pytest.mark.unmapped
async def test_a_restore_reads_another_tier_where_one_raises_an_error_of_its_own(
    three_tiers: StoreConfig, faults: FaultyTiers
) -> None:
    async with CheckpointStore.open(three_tiers) as store:
        await save_steps(store, 1)
        await store.evict(1, "ram")
        faults.kill("disk", RuntimeError("of a library"))
        restored = await store.restore()
        assert restored is not None
        assert_same(restored.tree, tree(1))
        assert "far" in restored.sources


async def test_a_step_that_a_tier_holds_is_not_called_missing_while_the_tier_is_scanned_anew(
    two_tiers: StoreConfig, faults: FaultyTiers, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def is_another(self: Promoter) -> bool:  # as when its file system was mounted anew
        return False

    monkeypatch.setattr(Promoter, "_is_itself", is_another)
    async with CheckpointStore.open(two_tiers) as store:
        first = await store.save(1, tree(1))
        await store.flush()
        scan = faults["disk"].hold("list", key="steps/*")
        faults["disk"].fail("put", TierUnavailable("stale handle"), key="packs/*")
        await store.save(2, tree(2))
        await asyncio.wait_for(scan.reached(), SOON)
        waiting = asyncio.gather(first.reached("disk"), store.flush())
        done, _ = await asyncio.wait([waiting], timeout=0.2)
        scan.release()
        await waiting
        assert not done


@ERRORS
async def test_a_tier_that_is_dead_at_open_is_caught_up_later(
    two_tiers: StoreConfig, disk: Path, faults: FaultyTiers, error: type[Exception]
) -> None:
    faults.refuse("disk", error("it cannot be opened"))
    async with CheckpointStore.open(two_tiers) as store:
        heard = Heard(store)
        checkpoint = await store.save(1, tree(1))
        with pytest.raises(TierUnavailable, match="cannot be opened"):
            await checkpoint.reached("disk")
        assert not (disk / "packs").exists()
        faults.allow("disk")
        await heard.first(TierRecovered)
        await checkpoint.reached("disk")
        assert await store.where(1) == ("ram", "disk")


async def test_an_index_that_is_slow_to_come_holds_nothing_else_up(two_tiers: StoreConfig, faults: FaultyTiers) -> None:
    async with CheckpointStore.open(two_tiers) as store:
        await save_steps(store, 1)
    async with CheckpointStore.open(two_tiers) as store:
        slow = faults["disk"].hold("get", key="steps/*/btree")
        reading = asyncio.create_task(store.verify(1, "disk"))
        await slow.reached()
        saved = await store.save(2, tree(2))
        async with asyncio.timeout(SOON):
            await saved.reached("disk")
        slow.release()
        (verified,) = await reading
        assert verified.intact


async def test_a_flush_ends_though_a_tier_is_tried_again_and_again_meanwhile(
    three_tiers: StoreConfig, faults: FaultyTiers, monkeypatch: pytest.MonkeyPatch
) -> None:
    rest = Promoter.rest
    async with CheckpointStore.open(three_tiers) as store:
        failing = tier_of(store, "disk")

        async def rest_and_see_the_disk_fail_once_more(self: Promoter) -> None:
            await rest(self)
            if self.tier is not failing:
                refused = faults.struck["no space", "put"]
                await self._state.changed.until(lambda: faults.struck["no space", "put"] > refused)
                await self._state.changed.until(lambda: not failing.steps.promotions)

        monkeypatch.setattr(Promoter, "rest", rest_and_see_the_disk_fail_once_more)
        faults["disk"].fail("put", NoSpace("full"), key="packs/*", times=None)
        await store.save(1, tree(1))
        async with asyncio.timeout(SOON):
            with pytest.raises(NoSpace, match=r"tier 'disk' lacks step 1 "):
                await store.flush()
        assert await store.where(1) == ("ram", "far")


@pytest.mark.parametrize("verb", ["put", "list", "get", "stat", "delete"])
async def test_one_failure_anywhere_in_a_promotion_is_made_good(
    two_tiers: StoreConfig, faults: FaultyTiers, verb: str
) -> None:
    async with CheckpointStore.open(two_tiers) as store:
        faults["disk"].fail(verb, TierUnavailable("just once"), times=1)
        await store.save(1, tree(1))
        while "disk" not in await store.where(1):
            try:
                await store.flush()
            except TierUnavailable:
                await asyncio.sleep(0.01)
        verified = await store.verify(1, "disk")
        assert verified[0].damaged == ()


@pytest.mark.parametrize("key", ["packs/*", "steps/*/btree", "steps/*/manifest.ocdbt"])
async def test_a_put_whose_answer_is_lost_does_no_harm(two_tiers: StoreConfig, faults: FaultyTiers, key: str) -> None:
    store = await CheckpointStore.open(two_tiers)
    heard = Heard(store)
    faults["disk"].fail("put", TierUnavailable("done, but nobody heard"), key=key, after=True)
    await store.save(1, tree(1))
    await heard.first(TierRecovered)
    await store.flush()
    await crash(store)
    async with CheckpointStore.open(two_tiers) as store:
        assert await store.where(1) == ("ram", "disk")
        assert [found.damaged for found in await store.verify(1)] == [(), ()]


async def test_a_commit_whose_answer_is_lost_is_taken_back(
    two_tiers: StoreConfig, disk: Path, faults: FaultyTiers
) -> None:
    """A step that was not acknowledged must not be found later, when its packs may be gone."""
    async with CheckpointStore.open(two_tiers) as store:
        heard = Heard(store)
        faults["disk"].fail("put", TierUnavailable("done, but nobody heard"), key="steps/*/manifest.ocdbt", after=True)
        held = faults["disk"].hold("put", key="steps/*/btree*", nth=2)
        await store.save(1, tree(1))
        await held.reached()
        assert manifests(disk) == []
        held.release()
        await heard.first(TierRecovered)
        await store.flush()
        assert len(manifests(disk)) == 1


async def test_a_commit_that_could_not_be_taken_back_is_so_before_its_packs_go(
    shared_memory: Path, disk: Path, faults: FaultyTiers
) -> None:
    """A newer step is promoted instead, and the older one is due no more."""
    newest = {"kind": "last_n", "n": 1}
    tiers = config({"ram": ram(shared_memory, on_close="release"), "disk": folder(disk, retain=newest)})
    async with CheckpointStore.open(tiers) as store:
        heard = Heard(store)
        faults["disk"].fail("put", TierUnavailable("done, but nobody heard"), key="steps/*/manifest.ocdbt", after=True)
        faults["disk"].fail("delete", TierUnavailable("not done"), key="steps/*/manifest.ocdbt")
        held = faults["disk"].hold("put", key="steps/*/btree*", nth=2)
        faults["disk"].fail("put", TierUnavailable("no answer"), key="steps/*/btree*", nth=2)
        await store.save(1, tree(1))
        await held.reached()
        assert len(manifests(disk)) == 1
        await store.save(2, tree(2))
        held.release()
        await heard.first(StepPromoted, lambda event: event.step == 2)
        await store.collect()
        assert await store.where(1) == ("ram",)
    async with CheckpointStore.open(tiers) as store:
        assert [info.step for info in await store.steps()] == [2]
        assert all(found.intact for found in await store.verify(2))


async def test_a_folder_that_was_moved_away_and_back_is_caught_up(
    two_tiers: StoreConfig, disk: Path, faults: FaultyTiers
) -> None:
    async with CheckpointStore.open(two_tiers) as store:
        heard = Heard(store)
        await (await store.save(1, tree(1))).reached("disk")
        disk.rename(disk.with_name("elsewhere"))
        with pytest.raises(TierUnavailable):
            await (await store.save(2, tree(2))).reached("disk")
        disk.with_name("elsewhere").rename(disk)
        await heard.first(TierRecovered)
        await store.flush()
        assert [found.damaged for step in (1, 2) for found in await store.verify(step)] == [()] * 4


async def test_a_folder_that_was_emptied_is_filled_again(
    two_tiers: StoreConfig, disk: Path, faults: FaultyTiers
) -> None:
    """Its chunks are written anew: nothing refers to packs that went."""
    async with CheckpointStore.open(two_tiers) as store:
        heard = Heard(store)
        await (await store.save(1, tree(1))).reached("disk")
        faults["disk"].fail("put", TierUnavailable("no answer"))
        for path in disk.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        await store.save(2, tree(1))
        await heard.first(TierFailed)  # and may work again by now
        await heard.first(TierRecovered)
        await store.flush()
        assert [found.damaged for found in await store.verify(2)] == [(), ()]
    async with CheckpointStore.open(two_tiers) as store:
        restored = await store.restore()
        assert restored is not None
        assert (restored.step, set(restored.sources)) == (2, {"disk"})
        assert_same(restored.tree, tree(1))


async def test_a_folder_that_was_mounted_anew_is_found_by_its_marker(
    two_tiers: StoreConfig, disk: Path, faults: FaultyTiers
) -> None:
    """An empty folder in its place may be where it is to be mounted: nothing is written there."""
    async with CheckpointStore.open(two_tiers) as store:
        heard = Heard(store)
        await (await store.save(1, tree(1))).reached("disk")
        away = disk.with_name("away")
        disk.rename(away)
        disk.mkdir()
        for step in (2, 3):
            with pytest.raises(TierUnavailable):
                await (await store.save(step, tree(step))).reached("disk")
        assert list(disk.iterdir()) == []
        disk.rmdir()
        shutil.copytree(away, disk)
        await heard.first(TierRecovered)
        await store.flush()
        assert [found.damaged for step in (1, 2, 3) for found in await store.verify(step)] == [()] * 6
        assert len(leases(disk)) == 1


async def test_a_tier_that_hangs_stops_neither_saves_nor_the_other_tiers(
    three_tiers: StoreConfig, faults: FaultyTiers
) -> None:
    async with CheckpointStore.open(three_tiers) as store:
        held = faults["disk"].hold("put", key="packs/*")
        await save_steps(store, 1, 2, 3, to="far")
        await held.reached()
        assert "disk" not in await store.where(3)
        held.release()
        await store.flush()
        assert await store.where(3) == ("ram", "disk", "far")


async def test_a_tier_that_hangs_fails_by_its_deadline(
    shared_memory: Path, disk: Path, faults: FaultyTiers, monkeypatch: pytest.MonkeyPatch
) -> None:
    only_held_calls_are_late(monkeypatch)
    settings = config({"ram": ram(shared_memory), "disk": folder(disk)})
    async with CheckpointStore.open(settings) as store:
        heard = Heard(store)
        held = faults["disk"].hold("put", key="packs/*", times=None)
        checkpoint = await store.save(1, tree(1))
        with pytest.raises(TierUnavailable, match="had not ended after"):
            await checkpoint.reached("disk")
        held.release()
        await heard.first(TierRecovered)
        await checkpoint.reached("disk")


async def test_with_nothing_readable_a_silent_tier_is_no_empty_store(
    two_tiers: StoreConfig, faults: FaultyTiers
) -> None:
    async with CheckpointStore.open(two_tiers) as store:
        await (await store.save(1, tree(1))).reached("disk")
    faults.refuse("disk")
    async with CheckpointStore.open(two_tiers) as store:
        heard = Heard(store)
        with pytest.raises(TierUnavailable, match="'disk' cannot be read"):
            await store.restore()
        faults.allow("disk")
        await heard.first(TierRecovered)
        assert_restored(await store.restore(), tree(1))
        await (await store.save(2, tree(2))).reached("disk")
        assert not any(info.off_branch for info in await store.steps())
    async with CheckpointStore.open(two_tiers) as store:
        restored = await store.restore()
        assert restored is not None
        assert restored.step == 2


async def test_an_empty_store_restores_nothing(two_tiers: StoreConfig) -> None:
    async with CheckpointStore.open(two_tiers) as store:
        assert await store.restore() is None
        with pytest.raises(NotFound, match="no tier holds step 3"):
            await store.restore(3)


async def test_the_only_tier_dead_at_open_is_an_error(disk: Path, faults: FaultyTiers) -> None:
    faults.refuse("disk", TierUnavailable("no route to it"))
    with pytest.raises(TierUnavailable, match="no route to it"):
        await CheckpointStore.open(config({"disk": folder(disk)}))


@pytest.mark.parametrize("takes", [0.0, 0.1], ids=["at once", "slowly"])
async def test_a_silent_source_is_not_the_targets_failure(
    three_tiers: StoreConfig, faults: FaultyTiers, takes: float
) -> None:
    """A step that only a silent tier holds waits; the tier below it works again, however slowly it shows that."""
    async with CheckpointStore.open(three_tiers) as store:
        heard = Heard(store)
        faults.kill("far")
        await (await store.save(1, tree(1))).reached("disk")
        await heard.first(TierFailed)
        await store.evict(1, "ram")
        faults.kill("disk")
        # The silent tier is asked again after 0.05 s.
        faults["far"].delay("get", takes, key="tieredckpt.json", times=None)
        faults.revive("far")
        await heard.first(TierFailed, lambda event: event.tier == "disk")
        await heard.first(TierRecovered, lambda event: event.tier == "far")
        with pytest.raises(TierUnavailable, match="'disk'"):
            await store.flush()
        faults.revive("disk")
        await heard.first(StepPromoted, lambda event: event.tier == "far")


async def test_a_chunk_that_a_silent_tier_may_have_is_not_called_lost(
    two_tiers: StoreConfig, shared_memory: Path, faults: FaultyTiers
) -> None:
    async with CheckpointStore.open(two_tiers) as store:
        await (await store.save(1, tree(1))).reached("disk")
        (slab,) = shared_memory.rglob("*.pack")
        with slab.open("r+b") as file:
            file.write(b"\xff" * (2 * CHUNK))
        faults.kill("disk")
        with pytest.raises(TierUnavailable, match=r"'params/w\d'.*'disk' may have it"):
            await store.restore()
        faults.revive("disk")
        assert_restored(await store.restore(), tree(1))


async def test_a_chunk_that_no_tier_has_is_lost_by_name(disk: Path) -> None:
    settings = config({"disk": folder(disk)})
    async with CheckpointStore.open(settings) as store:
        await store.save(1, tree(1))
    for pack in (disk / "packs").rglob("*.pack"):
        pack.write_bytes(bytes(pack.stat().st_size))
    async with CheckpointStore.open(settings) as store:
        with pytest.raises(Corrupt, match=r"array 'params/w\d' of step 1 .* is lost"):
            await store.restore()


@pytest.mark.parametrize("how", ["promoted by hand", "verified"])
async def test_a_chunk_that_was_misread_once_keeps_its_step_from_no_tier_for_ever(
    how: str, disk: Path, tmp_path: Path, faults: FaultyTiers
) -> None:
    async with CheckpointStore.open(config({"disk": folder(disk), "far": folder(tmp_path / "far")})) as store:
        faults["disk"].flip("get_into", 7, key="packs/*")
        await store.save(1, tree(1))
        with pytest.raises(Corrupt, match=r"tier 'far' lacks step 1 .* is lost"):
            await store.flush()
        if how == "verified":
            assert all(found.intact for found in await store.verify(1))
        else:
            await store.promote(1, "far")
        await store.flush()
        assert await store.where(1) == ("disk", "far")


async def test_ram_that_goes_away_is_no_failure_of_training(
    two_tiers: StoreConfig, shared_memory: Path, faults: FaultyTiers
) -> None:
    async with CheckpointStore.open(two_tiers) as store:
        heard = Heard(store)
        await (await store.save(1, tree(1))).reached("disk")
        shutil.rmtree(shared_memory / "of-test")
        await store.save(2, tree(2))
        restored = await store.restore()
        assert restored is not None
        assert restored.step == 2
        assert_same(restored.tree, tree(2))
        assert (await heard.first(TierFailed)).tier == "ram"
        await heard.first(TierRecovered, lambda event: event.tier == "ram")
        await save_steps(store, 3)
        assert await store.where(3) == ("ram", "disk")
        assert [found.damaged for found in await store.verify(3)] == [(), ()]


async def test_ram_that_goes_away_under_a_restore_leaves_it_to_the_next_tier(
    two_tiers: StoreConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = reader._from_slab

    async def disconnect(state: State, source: StepSource, tier: Tier, *more: Any) -> list[Piece]:
        shutil.rmtree(tier.store.location)
        await tier.disconnect()  # as its promoter does where its folder went away
        return await read(state, source, tier, *more)

    monkeypatch.setattr(reader, "_from_slab", disconnect)
    async with CheckpointStore.open(two_tiers) as store:
        await (await store.save(1, tree(1))).reached("disk")
        restored = await store.restore()
        assert_restored(restored, tree(1))
        assert set(restored.sources) == {"ram", "disk"}  # small arrays are in the index


async def test_ram_that_goes_away_before_the_close_keeps_nothing_from_being_closed(
    two_tiers: StoreConfig, shared_memory: Path, disk: Path
) -> None:
    async with CheckpointStore.open(two_tiers) as store:
        await (await store.save(1, tree(1))).reached("disk")
        shutil.rmtree(shared_memory / "of-test")
    assert not list(disk.glob("leases/*"))
    async with CheckpointStore.open(two_tiers) as store:
        assert await store.where(1) == ("disk",)


async def test_what_was_read_in_ram_that_went_away_is_not_taken_from_the_new_one(
    two_tiers: StoreConfig, shared_memory: Path, faults: FaultyTiers
) -> None:
    async with CheckpointStore.open(two_tiers) as store:
        heard = Heard(store)
        await save_steps(store, 1, 2, to="disk")
        seen = await store.restore(1, copy=False, resume=False)
        assert seen is not None
        await store.evict(1, "ram")  # whose extents are given back when the view has gone
        shutil.rmtree(shared_memory / "of-test")
        await store.save(3, tree(3))
        await heard.first(TierRecovered, lambda event: event.tier == "ram")
        await store.save(4, tree(1))
        await store.collect()
        await store.save(5, tree(5))
        restored = await store.restore(4, resume=False)
        assert_restored(restored, tree(1))
        assert set(restored.sources) == {"ram"}


@pytest.mark.parametrize("read_only", [False, True])
async def test_a_mount_that_hangs_at_open_holds_up_neither_open_nor_close(
    shared_memory: Path, disk: Path, monkeypatch: pytest.MonkeyPatch, read_only: bool
) -> None:
    nearest = ram(shared_memory)
    writer = await CheckpointStore.open(config({"ram": nearest, "disk": folder(disk)}))
    await (await writer.save(1, tree(1))).reached("disk")
    await crash(writer)  # so that RAM stays
    settings = config({"ram": nearest, "disk": folder(disk, deadline=0.1)})
    answers, answered, is_dir = threading.Event(), threading.Event(), Path.is_dir

    def hang(*_: object, **__: object) -> Any:
        answers.wait(SOON)
        answered.set()
        raise TierUnavailable("it came to an end")

    monkeypatch.setattr(posix, "PosixStore", hang)
    monkeypatch.setattr(Path, "is_dir", lambda path: hang() if path == disk else is_dir(path))
    try:
        async with CheckpointStore.open(settings, read_only=read_only) as store:
            error = tier_of(store, "disk").health.error
            assert "'disk'" in str(error)
            assert "deadline" in str(error)
        assert not answered.is_set()
    finally:
        answers.set()


async def test_without_ram_a_save_goes_to_the_next_tier_that_works(tmp_path: Path, faults: FaultyTiers) -> None:
    settings = config({"near": folder(tmp_path / "near"), "far": folder(tmp_path / "far")})
    state = {"x": np.arange(20 * CHUNK, dtype=np.uint8)}
    async with CheckpointStore.open(settings) as store:
        faults.kill("near")
        await store.save(1, state)
        assert await store.where(1) == ("far",)
        faults.kill("far")
        with pytest.raises(NoSpace, match=r"'far'.*'near'"):
            await store.save(2, state)
        faults.revive("near")
        faults.revive("far")
        assert_restored(await store.restore(), state)


@pytest.mark.parametrize("work", ["promoting", "collecting", "renewing its lease"])
async def test_work_that_fails_as_it_is_stopped_does_not_keep_the_store_from_closing(
    two_tiers: StoreConfig, faults: FaultyTiers, monkeypatch: pytest.MonkeyPatch, work: str
) -> None:
    begun = threading.Event()

    async def fail_when_stopped(*_: Any, **__: Any) -> int:
        begun.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            raise TierUnavailable("it failed in the very moment") from None
        return 0

    if work == "promoting":
        monkeypatch.setattr(alone, "copy_step", fail_when_stopped)
    elif work == "collecting":
        monkeypatch.setattr(Admin, "collect", fail_when_stopped)
    else:
        monkeypatch.setattr(Lease, "renew", fail_when_stopped)
    often = two_tiers.model_copy(update={"lease_ttl": 0.03, "grace": 0.03})
    async with asyncio.timeout(SOON):
        store = await CheckpointStore.open(often)
        await store.save(1, tree(1))
        await asyncio.to_thread(begun.wait, SOON)
        await crash(store)


async def test_a_tier_that_has_failed_for_days_comes_back(two_tiers: StoreConfig, faults: FaultyTiers) -> None:
    async with CheckpointStore.open(two_tiers) as store:
        heard = Heard(store)
        health = tier_of(store, "disk").health
        faults.kill("disk")
        for _ in range(5000):  # at a try a minute
            health.fail(TierUnavailable("silent"))
        checkpoint = await store.save(1, tree(1))
        await heard.first(TierFailed)
        faults.revive("disk")
        await heard.first(TierRecovered)
        await checkpoint.reached("disk")
