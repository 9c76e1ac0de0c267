"""A deletion that fails leaves no step behind that counts as damaged: whether it is there shows soon enough."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest
from insight import tier_of
from scenes import Heard, config, folder, ram, tree

from tieredckpt import CheckpointStore
from tieredckpt.engine.copier import copy_step
from tieredckpt.errors import Corrupt, NotFound, TierUnavailable
from tieredckpt.events import StepEvicted, TierRecovered
from tieredckpt.testing.tiers import FaultyTiers

MANIFEST = "steps/*/manifest*"


@pytest.mark.parametrize("after", [False, True], ids=["not done", "done, and the answer is lost"])
async def test_what_retention_could_not_delete_is_held_or_gone_and_never_damaged(
    after: bool, shared_memory: Path, tmp_path: Path, faults: FaultyTiers
) -> None:
    disk = tmp_path / "disk"
    one = {"kind": "last_n", "n": 1}
    async with CheckpointStore.open(config({"ram": ram(shared_memory), "disk": folder(disk, retain=one)})) as store:
        heard = Heard(store)
        await store.save(1, tree(1))
        await store.flush()
        faults["disk"].fail("delete", TierUnavailable("no answer"), key=MANIFEST, after=after)
        await store.save(2, tree(2))
        await store.flush()
        assert faults.struck["answer lost" if after else "error", "delete"] == 1
        (first, _) = await store.steps()
        assert (first.tiers, first.damaged) == (("ram",) if after else ("ram", "disk"), ())
        await store.save(3, tree(3))
        await store.flush()
        assert [event.step for event in heard.of(StepEvicted) if event.tier == "disk"] == [1, 2]
        await store.collect()
        assert len(list(disk.glob("steps/*/*"))) == 2
        assert len(list(disk.glob("packs/*/*"))) == 1


async def test_what_could_not_be_deleted_by_hand_is_held_as_before(
    shared_memory: Path, tmp_path: Path, faults: FaultyTiers, monkeypatch: pytest.MonkeyPatch
) -> None:
    everything = folder(tmp_path / "disk", retain="all")
    async with CheckpointStore.open(config({"ram": ram(shared_memory), "disk": everything})) as store:
        await store.save(1, tree(1))
        await store.save(2, tree(2))
        await store.flush()
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


async def test_what_was_deleted_by_hand_is_gone_though_the_answer_was_lost(
    shared_memory: Path, tmp_path: Path, faults: FaultyTiers
) -> None:
    everything = folder(tmp_path / "disk", retain="all")
    async with CheckpointStore.open(config({"ram": ram(shared_memory), "disk": everything})) as store:
        heard = Heard(store)
        await store.save(1, tree(1))
        await store.save(2, tree(2))
        await store.flush()
        faults["disk"].fail("delete", TierUnavailable("no answer"), key=MANIFEST, after=True)
        with pytest.raises(TierUnavailable):
            await store.evict(1, "disk")
        await heard.first(StepEvicted)
        await store.flush()
        (info, _) = await store.steps()
        assert (info.tiers, info.damaged) == (("ram",), ())


async def test_what_a_new_look_at_the_tier_does_not_find_is_told_to_be_gone(
    shared_memory: Path, tmp_path: Path, faults: FaultyTiers
) -> None:
    one = folder(tmp_path / "disk", retain={"kind": "last_n", "n": 1})
    async with CheckpointStore.open(config({"ram": ram(shared_memory), "disk": one})) as store:
        heard = Heard(store)
        await store.save(1, tree(1))
        await store.flush()
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


async def test_a_step_whose_old_commit_is_misread_while_it_is_committed_anew_is_held(
    shared_memory: Path, tmp_path: Path, faults: FaultyTiers
) -> None:
    everything = folder(tmp_path / "disk", retain="all")
    async with CheckpointStore.open(config({"ram": ram(shared_memory), "disk": everything})) as store:
        await store.save(1, tree(1))
        await store.flush()
        engine, disk = store._engine, tier_of(store, "disk")
        step = engine.state.find(1)
        held = faults["disk"].hold("put", key="steps/*1-*/manifest.ocdbt")
        again = copy_step(engine.state, engine.by_hand._collector, step, disk, again=True)
        anew = asyncio.create_task(store.engine_loop.call(again))
        await held.reached()

        async def misread() -> None:
            disk.condemn(step, Corrupt("misread"))

        await store.engine_loop.call(misread())
        held.release()
        await anew
        assert await store.where(1) == ("ram", "disk")
        assert all(found.intact for found in await store.verify(1))


async def test_a_step_that_is_evicted_while_it_is_committed_anew_is_gone(
    shared_memory: Path, tmp_path: Path, faults: FaultyTiers
) -> None:
    disk = tmp_path / "disk"
    async with CheckpointStore.open(config({"ram": ram(shared_memory), "disk": folder(disk, retain="all")})) as store:
        heard = Heard(store)
        for step in (1, 2):
            await store.save(step, tree(step))
        await store.flush()
        engine = store._engine
        step = engine.state.find(1)
        again = copy_step(engine.state, engine.by_hand._collector, step, tier_of(store, "disk"), again=True)
        held = faults["disk"].hold("put", key="steps/*1-*/manifest.ocdbt")
        anew = asyncio.create_task(store.engine_loop.call(again))
        await held.reached()
        evicting = asyncio.create_task(store.evict(1, "disk"))  # ends when the packs may be collected
        await heard.first(StepEvicted)
        held.release()
        with pytest.raises(NotFound, match="was evicted while it was committed anew"):
            await anew
        await evicting
        assert await store.where(1) == ("ram",)
        assert list(disk.glob("steps/*1-*/manifest.ocdbt")) == []
