"""A deletion that fails leaves no step behind that counts as damaged: whether it is there shows soon enough."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from reliability.tiers import FaultyTiers
from support.insight import tier_of
from support.limits import limit
from support.scenes import SOON, Heard, assert_restored, config, folder, ram, save_steps, tree

from tieredckpt import CheckpointStore
from tieredckpt.engine.opening.upkeep import catalogue
from tieredckpt.engine.promoting.promoter import Promoter
from tieredckpt.engine.tier.steps import IndeterminateDelete
from tieredckpt.engine.tier.tier import Tier
from tieredckpt.errors import Conflict, TierUnavailable
from tieredckpt.events import StepEvicted, TierFailed, TierRecovered

MANIFEST = "steps/*/manifest*"


@asynccontextmanager
async def two_steps(shared_memory: Path, tmp_path: Path) -> AsyncIterator[CheckpointStore]:
    """A store with steps 1 and 2 in RAM and on a disk that keeps all."""
    everything = folder(tmp_path / "disk", retain="all")
    async with CheckpointStore.open(config({"ram": ram(shared_memory), "disk": everything})) as store:
        await store.save(1, tree(1))
        await store.save(2, tree(2))
        await store.flush()
        yield store


@pytest.mark.parametrize("after", [False, True], ids=["not done", "done, and the answer is lost"])
async def test_what_retention_could_not_delete_is_held_or_gone_and_never_damaged(
    after: bool, shared_memory: Path, tmp_path: Path, faults: FaultyTiers
) -> None:
    disk = tmp_path / "disk"
    one = {"kind": "last_n", "n": 1}
    async with CheckpointStore.open(config({"ram": ram(shared_memory), "disk": folder(disk, retain=one)})) as store:
        heard = Heard(store)
        await save_steps(store, 1)
        faults["disk"].fail("delete", TierUnavailable("no answer"), key=MANIFEST, after=after)
        await save_steps(store, 2)
        assert faults.struck["answer lost" if after else "error", "delete"] == 1
        (first, _) = await store.steps()
        assert (first.tiers, first.damaged) == (("ram",) if after else ("ram", "disk"), ())
        await save_steps(store, 3)
        assert [event.step for event in heard.of(StepEvicted) if event.tier == "disk"] == [1, 2]
        await store.collect()
        assert len(list(disk.glob("steps/*/*"))) == 2
        assert len(list(disk.glob("packs/*/*"))) == 1


async def test_what_could_not_be_deleted_by_hand_is_held_as_before(
    shared_memory: Path, tmp_path: Path, faults: FaultyTiers, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with two_steps(shared_memory, tmp_path) as store:
        faults["disk"].fail("delete", TierUnavailable("no answer"), key=MANIFEST)
        with pytest.raises(TierUnavailable):
            await store.evict(1, "disk")
        now = time.time
        monkeypatch.setattr(time, "time", lambda: now() + 1e6)  # no grace keeps its packs any more
        await store.collect()
        await store.flush()
        assert await store.where(1) == ("ram", "disk")
        assert all(found.intact for found in await store.verify(1))
        await store.evict(1, "disk")
        assert await store.where(1) == ("ram",)


@pytest.mark.parametrize("alone", [False, True], ids=["beside another step", "alone"])
async def test_what_may_be_deleted_is_not_called_damaged_to_who_restores_it(
    tmp_path: Path, faults: FaultyTiers, alone: bool
) -> None:
    """Who handles `Corrupt` gives the step up, though it may be intact."""
    async with CheckpointStore.open(config({"disk": folder(tmp_path / "disk", retain="all")})) as store:
        for step in (1,) if alone else (1, 2):
            await store.save(step, tree(step))
        looking = faults["disk"].hold("stat", key=MANIFEST)
        faults["disk"].fail("delete", TierUnavailable("no answer"), key=MANIFEST)
        with pytest.raises(TierUnavailable):
            await store.delete(1, force=True)
        await looking.reached()
        for number in (1, None) if alone else (1,):
            with pytest.raises(TierUnavailable, match=r"step 1 .* was being deleted when that failed"):
                await store.restore(number, resume=False)
        looking.release()
        await store.flush()
        assert_restored(await store.restore(1, resume=False), tree(1))


async def test_what_was_deleted_by_hand_is_gone_though_the_answer_was_lost(
    shared_memory: Path, tmp_path: Path, faults: FaultyTiers
) -> None:
    async with two_steps(shared_memory, tmp_path) as store:
        heard = Heard(store)
        faults["disk"].fail("delete", TierUnavailable("no answer"), key=MANIFEST, after=True)
        with pytest.raises(TierUnavailable):
            await store.evict(1, "disk")
        await heard.first(StepEvicted)
        await store.flush()
        (info, _) = await store.steps()
        assert (info.tiers, info.damaged) == (("ram",), ())


async def test_what_is_deleted_by_hand_while_its_first_deletion_is_looked_into_is_gone_and_the_tier_works(
    shared_memory: Path, tmp_path: Path, faults: FaultyTiers, caplog: pytest.LogCaptureFixture
) -> None:
    async with two_steps(shared_memory, tmp_path) as store:
        faults["disk"].fail("delete", TierUnavailable("no answer"), key=MANIFEST)
        looking = faults["disk"].hold("stat", key=MANIFEST, after=True)
        with pytest.raises(TierUnavailable):
            await store.evict(1, "disk")
        await looking.reached()
        await store.evict(1, "disk")
        looking.release()
        await store.flush()
        assert await store.where(1) == ("ram",)
        assert "unexpected failure" not in caplog.text


async def test_what_is_promoted_again_while_the_rest_of_it_is_deleted_is_whole(
    shared_memory: Path, tmp_path: Path, faults: FaultyTiers
) -> None:
    async with two_steps(shared_memory, tmp_path) as store:
        faults["disk"].fail("delete", TierUnavailable("no answer"), key=MANIFEST, after=True)
        deleting = faults["disk"].hold("delete", key="steps/*1-*/btree")
        with pytest.raises(TierUnavailable):
            await store.evict(1, "disk")
        await deleting.reached()
        promoting = asyncio.create_task(store.promote(1, "disk"))
        await asyncio.wait([promoting], timeout=0.5)  # longer than it takes, unless it waits
        deleting.release()
        await promoting
        await store.flush()
        assert await store.where(1) == ("ram", "disk")
        assert all(found.intact for found in await store.verify(1))


async def test_what_a_new_look_at_the_tier_does_not_find_is_told_to_be_gone(
    shared_memory: Path, tmp_path: Path, faults: FaultyTiers
) -> None:
    one = folder(tmp_path / "disk", retain={"kind": "last_n", "n": 1})
    async with CheckpointStore.open(config({"ram": ram(shared_memory), "disk": one})) as store:
        heard = Heard(store)
        await save_steps(store, 1)
        disk = faults["disk"]
        disk.fail("delete", TierUnavailable("no answer"), key=MANIFEST, after=True)
        disk.fail("stat", TierUnavailable("no answer"), key=MANIFEST)  # the tier fails before it is found out,
        disk.flip("get", 300, key="tieredckpt.json")  # and does not look like itself when it comes back
        await store.save(2, tree(2))
        await heard.first(StepEvicted, lambda event: (event.step, event.tier) == (1, "disk"))
        assert faults.struck["wrong bytes", "get"] == 1
        await heard.first(TierRecovered)
        await store.flush()
        assert [(info.step, info.tiers) for info in await store.steps()] == [(1, ("ram",)), (2, ("ram", "disk"))]
        disk.fail("put", TierUnavailable("no answer"), key="packs/*")
        disk.flip("get", 300, key="tieredckpt.json")
        await store.save(3, tree(3))
        await heard.first(StepEvicted, lambda event: (event.step, event.tier) == (2, "disk"))
        assert faults.struck["wrong bytes", "get"] == 2
        assert [event.step for event in heard.of(StepEvicted) if event.tier == "disk"] == [1, 2], "each once"


@pytest.mark.parametrize("answered", [True, False], ids=["deleted", "deleted, and the answer is lost"])
@pytest.mark.parametrize("in_catalog", [True, False], ids=["catalogued", "read"])
async def test_what_leaves_while_the_tier_is_scanned_anew_is_no_copy_to_rely_on(
    in_catalog: bool,
    answered: bool,
    shared_memory: Path,
    tmp_path: Path,
    faults: FaultyTiers,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def is_another(self: Promoter) -> bool:  # as when its file system was mounted anew
        return False

    monkeypatch.setattr(Promoter, "_is_itself", is_another)
    limit(monkeypatch, catalog_entries=1)
    slower = {name: folder(tmp_path / name, retain="all") for name in ("disk", "far")}
    async with CheckpointStore.open(config({"ram": ram(shared_memory), **slower})) as store:
        heard, disk, state = Heard(store), tier_of(store, "disk"), store._life.engine.state
        for step in (1, 2):
            await store.save(step, tree(step))
        await store.flush()
        if in_catalog:
            await store._life.loop.call(catalogue(disk))
        if not answered:
            faults["disk"].fail("delete", TierUnavailable("no answer"), key=MANIFEST, after=True)
        leaving = faults["disk"].hold("delete", key=MANIFEST)
        evicting = asyncio.gather(store.evict(2, "disk"), return_exceptions=True)
        await asyncio.wait_for(leaving.reached(), SOON)
        scan = faults["disk"].hold("get", key="steps/*2/manifest*", after=True)
        store._life.loop.soon(lambda: state.report(disk, TierUnavailable("stale handle")))
        await asyncio.wait_for(scan.reached(), SOON)
        leaving.release()
        await evicting
        scan.release()
        await heard.first(TierRecovered)
        await store.flush()
        assert [str(event.error) for event in heard.of(TierFailed)] == ["stale handle"]
        assert await store.where(2) == ("ram", "far")
        with pytest.raises(Conflict, match="last good copy"):
            await store.evict(2, "far")


async def test_who_waits_for_a_step_hears_that_its_deletion_was_not_done(
    shared_memory: Path, tmp_path: Path, faults: FaultyTiers
) -> None:
    everything = folder(tmp_path / "disk", retain="all")
    async with CheckpointStore.open(config({"ram": ram(shared_memory), "disk": everything})) as store:
        first = await store.save(1, tree(1))
        await store.save(2, tree(2))
        await store.flush()
        faults["disk"].fail("delete", TierUnavailable("no answer"), key=MANIFEST)
        looking = faults["disk"].hold("stat", key=MANIFEST)
        with pytest.raises(TierUnavailable):
            await store.evict(1, "disk")
        await looking.reached()
        reaching = asyncio.create_task(first.reached("disk"))
        await asyncio.wait([reaching], timeout=0.3)
        looking.release()
        await asyncio.wait_for(reaching, SOON)


async def test_what_a_new_look_at_the_tier_finds_is_not_told_to_be_gone(
    shared_memory: Path, tmp_path: Path, faults: FaultyTiers
) -> None:
    async with two_steps(shared_memory, tmp_path) as store:
        heard = Heard(store)
        disk = faults["disk"]
        disk.fail("delete", TierUnavailable("no answer"), key=MANIFEST)
        disk.fail("stat", TierUnavailable("no answer"), key=MANIFEST)  # the tier fails before it is found out,
        disk.flip("get", 300, key="tieredckpt.json")  # and does not look like itself when it comes back
        with pytest.raises(TierUnavailable):
            await store.evict(1, "disk")
        await heard.first(TierRecovered)
        await store.flush()
        assert faults.struck["wrong bytes", "get"] == 1
        assert await store.where(1) == ("ram", "disk")
        assert not heard.of(StepEvicted)


async def test_a_deletion_is_not_repeated_while_the_step_is_the_last_good_copy(
    shared_memory: Path, tmp_path: Path, faults: FaultyTiers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Tier, "hanging", 1)  # so that the deletion may come late
    everything = folder(tmp_path / "disk", retain="all", promote="never")
    async with CheckpointStore.open(config({"ram": ram(shared_memory), "disk": everything})) as store:
        for number in (1, 2):
            await store.save(number, tree(number))
            await store.promote(number, "disk")
        disk, engine = tier_of(store, "disk"), store._life.engine
        first, second = disk.steps.held

        async def find_out(*, impaired: bool) -> None:
            disk.steps.impair(second, ("",)) if impaired else disk.steps.mend(second, ("",))
            if first not in disk.steps.damaged:
                disk.steps.deletions[first] = time.monotonic()
                disk.quarantine(first, IndeterminateDelete("no answer", disk.steps.held[first]))
            await engine.admin._collector.evictor.find_out(disk)

        await store._life.loop.call(find_out(impaired=True))
        assert len(list((tmp_path / "disk").glob(MANIFEST))) == 2
        await store._life.loop.call(find_out(impaired=False))
        assert len(list((tmp_path / "disk").glob(MANIFEST))) == 1
