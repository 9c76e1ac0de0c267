"""A deletion that fails leaves no step behind that counts as damaged: whether it is there shows soon enough."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from reliability.tiers import FaultyTiers
from support.scenes import Heard, config, folder, ram, tree

from tieredckpt import CheckpointStore
from tieredckpt.errors import TierUnavailable
from tieredckpt.events import StepEvicted, TierRecovered

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
