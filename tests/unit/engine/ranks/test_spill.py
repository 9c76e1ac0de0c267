"""Ranks without RAM for their state, or without a RAM tier at all, stream it and commit it by agreement as well."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.cohort import DEADLINE, RanksPlace, assert_whole, cohort, part
from support.limits import limit
from support.scenes import SOON, config, files_under, folder, pack_bytes

from tieredckpt import CheckpointStore
from tieredckpt.engine.ranks import reopen as reopen_module
from tieredckpt.engine.ranks.reopen import is_unavailable_here
from tieredckpt.engine.saving import slower_tiers
from tieredckpt.errors import RanksUnavailable, TierUnavailable
from tieredckpt.events import StepCommitted, StepPromoted
from tieredckpt.testing.faulty import Faulty

SIZE = 3


class Place(RanksPlace):
    def packs(self) -> list[Path]:
        return list(self.disk.glob("packs/**/*.pack"))

    def commits(self) -> list[Path]:
        return list(self.disk.glob("steps/*/manifest.ocdbt"))


@pytest.fixture(params=["no RAM tier", "a small slab"])
def place(request: pytest.FixtureRequest, shared_memory: Path, tmp_path: Path) -> Place:
    disk = tmp_path / "disk"
    kinds = {"no RAM tier": {"tiers": {"disk": folder(disk)}}, "a small slab": {"ram_settings": {"capacity": "64 KiB"}}}
    return Place(shared_memory, disk, SIZE, kinds[request.param])


async def test_a_streamed_step_is_committed_by_all(place: Place) -> None:
    async with place.open() as ranks:
        for step in (1, 2):
            checkpoints = await ranks.save(step)
            assert all(checkpoint.saved is not None and checkpoint.saved.tier == "disk" for checkpoint in checkpoints)
            await ranks.reached(checkpoints, "disk")
        assert [await store.where(2) for store in ranks.stores] == [("disk",)] * SIZE
        for restored in await ranks.restored():
            assert_whole(restored, 2)
    async with place.open() as ranks:
        for restored in await ranks.restored(1):
            assert_whole(restored, 1)
    assert not [name for name in files_under(place.disk) if "parts" in name]


async def test_unchanged_chunks_of_all_ranks_are_written_once(place: Place) -> None:
    """Promise 7, across steps, ranks and a restart: rank 0 tells the others what the shared tier has."""
    async with place.open() as ranks:
        await ranks.reached(await ranks.save(1), "disk")
    before = pack_bytes(place.disk)
    async with place.open() as ranks:
        ranks.faulty(0).delay("*", 0.1, key="packs/*", nth=2)  # ranks overtake each other
        await ranks.reached(await ranks.save(2, 1), "disk")
        assert [heard.of(StepPromoted)[-1].written for heard in ranks.heard] == [0] * SIZE
        turned = [part(1, (rank + 1) % SIZE, SIZE) for rank in range(SIZE)]
        await ranks.reached(await ranks.all(lambda store, rank: store.save(3, turned[rank])), "disk")
        for restored in await ranks.restored(2):
            assert_whole(restored, 1)
    assert pack_bytes(place.disk) == before


@pytest.mark.parametrize("when", ["while it streams", "once it has streamed"])
async def test_what_rank_0_has_told_of_stays_until_the_save_is_decided(place: Place, when: str) -> None:
    async with place.open() as ranks:
        for step in (1, 2):
            await ranks.reached(await ranks.save(step), "disk")
        new = np.random.default_rng(3).integers(0, 255, 1 << 17, np.uint8)
        held = ranks.faulty(1).hold("put", key="packs/*")
        other = asyncio.create_task(ranks[1].save(3, part(1, 1, SIZE) | {"zzz": new}))
        await held.reached()
        if when == "once it has streamed":
            held.release()
            await other
        await ranks[0].evict(1, "disk")
        await ranks[0].collect()
        held.release()
        await ranks.reached([await other, *await ranks.save(3, 1, ranks=[0, 2])], "disk")
        for restored in await ranks.restored(3):
            assert_whole(restored, 1)
        assert ranks[0]._life.engine.state.membership.promised == {}


async def test_packs_are_kept_for_no_save_that_rank_0_does_not_make(place: Place) -> None:
    async with place.open(crashing=True) as ranks:
        promised = ranks[0]._life.engine.state.membership.promised
        for step in (1, 2):
            await ranks.reached(await ranks.save(step), "disk")
        await ranks.save(3, 1, ranks=[1])
        assert "0.3.0" in promised
        await ranks.save(4, 1)
        await ranks.failed(step=4)
        async with asyncio.timeout(SOON):
            while promised:
                await asyncio.sleep(0.01)
        await ranks.save(5, 1, ranks=[1])
        assert "0.5.0" in promised
        await ranks.restored(2)
        assert promised == {}


async def test_a_pack_that_came_while_rank_0_looked_is_kept_too(
    shared_memory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refer_to_intact = slower_tiers.refer_to_intact
    looks, go_on = threading.Event(), threading.Event()

    async def slowly(state: Any, *arguments: Any) -> None:
        if state.membership.rank == 0:
            looks.set()
            await asyncio.to_thread(go_on.wait)
        await refer_to_intact(state, *arguments)

    def new(seed: int, nbytes: int) -> Any:
        return np.random.default_rng(seed).integers(0, 255, nbytes, np.uint8)

    small = {"ram_settings": {"capacity": "64 KiB"}, "crashing": True}
    async with cohort(2, shared_memory, tmp_path / "disk", **small) as ranks:
        await ranks.reached(await ranks.all(lambda store, rank: store.save(1, {str(rank): new(rank, 4096)})), "disk")
        monkeypatch.setattr(slower_tiers, "refer_to_intact", slowly)
        held = ranks.faulty(0).hold("put", key="packs/*")
        fits = await ranks.all(lambda store, rank: store.save(2, {str(rank): new(10 + rank, 16 << 10)}))
        await held.reached()
        larger = {"1": new(11, 16 << 10), "2": new(20, 160 << 10)}
        streamed = asyncio.create_task(ranks[1].save(3, larger))
        await asyncio.to_thread(looks.wait)
        held.release()
        await ranks.reached(fits, "disk")
        go_on.set()
        await streamed
        disk = ranks[0]._life.engine.state.tier("disk")
        (part,) = ranks[1]._life.engine.state.membership.streamed.values()
        assert part.packs - part.written
        assert part.packs - part.written <= ranks[0]._life.engine.state.membership.packs_streamed_to(disk)


async def test_a_rank_0_that_does_not_tell_keeps_no_save_waiting(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    limit(monkeypatch, find_within=0.1)
    async with place.open() as ranks:
        await ranks.reached(await ranks.save(1), "disk")
        held = ranks.world.hold(0, "send", topic="found/*")
        streamed = await ranks.all(lambda store, rank: store.save(2, part(1, rank, SIZE)), ranks=[1, 2])
        assert [save.saved.tier for save in streamed if save.saved is not None] == ["disk", "disk"]
        held.release()
        await ranks.reached([*streamed, *await ranks.save(2, 1, ranks=[0])], "disk")
        for restored in await ranks.restored(2):
            assert_whole(restored, 1)


@pytest.mark.parametrize("how", ["late", "cancelled"])
async def test_an_answer_that_nobody_waits_for_leaves_its_memory(
    place: Place, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    if how == "late":
        limit(monkeypatch, find_within=0.1)
    async with place.open() as ranks:
        await ranks.reached(await ranks.save(1), "disk")
        held = ranks.world.hold(0, "send", topic="found/*")
        saving = asyncio.create_task(ranks.save(2, 1, ranks=[1]))
        await held.reached()
        if how == "cancelled":
            saving.cancel()
        await asyncio.wait([saving])
        held.release()
        await ranks.save(2, 1, ranks=[0, 2])
        await ranks.reached(await ranks.save(3, 1), "disk")
        assert not ranks.unreceived(1)


async def test_a_tier_that_rank_0_cannot_read_is_written_to_anew(place: Place) -> None:
    async with place.open() as ranks:
        await ranks.reached(await ranks.save(1), "disk")
    async with place.open() as ranks:  # what another process wrote is looked up before it is referred to
        script = ranks.faulty(0)
        script.fail("get", TierUnavailable("by script"))
        streamed = await ranks.save(2, 1, ranks=[1, 2])
        await ranks.reached([*streamed, *await ranks.save(2, 1, ranks=[0])], "disk")
        for restored in await ranks.restored(2):
            assert_whole(restored, 1)


async def test_a_tier_that_fails_on_one_rank_costs_one_save(
    shared_memory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Promise 5: all ranks stream past it from then on, until it is back there."""
    gone, reopen = True, reopen_module.reopen

    async def reopened(state: Any, tier: Any) -> bool:
        return False if gone else await reopen(state, tier)

    limit(monkeypatch, first_retry=0.02, last_retry=0.02)
    monkeypatch.setattr(reopen_module, "reopen", reopened)
    tiers = {"disk": folder(tmp_path / "disk"), "far": folder(tmp_path / "far")}
    async with cohort(SIZE, shared_memory, tmp_path, tiers=tiers) as ranks:
        ranks.faulty(1).kill()
        await ranks.save(1)
        await ranks.failed(step=1)  # one part is on another tier than the others
        for step in (2, 3):
            checkpoints = await ranks.save(step)
            assert {save.saved.tier for save in checkpoints if save.saved is not None} == {"far"}
            await ranks.reached(checkpoints, "far")
        gone = False
        state = ranks[1]._life.engine.state
        await ranks[1]._life.loop.call(state.changed.until(lambda: not is_unavailable_here(state.tier("disk"))))
        await ranks.reached(await ranks.save(4), "far")
        await ranks.reached(await ranks.save(5), "disk")
        for restored in await ranks.restored():
            assert_whole(restored, 5)


async def test_a_tier_that_takes_nothing_of_one_rank_costs_ever_fewer_saves(
    shared_memory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Promise 5: its marker can be read, so that it looks as if it was back at once."""
    reopen = reopen_module.reopen

    async def reopened(state: Any, tier: Any) -> bool:
        there = await reopen(state, tier)
        if state.membership.rank == 1 and tier.name == "disk":
            takes_nothing(tier)
        return there

    def takes_nothing(tier: Any) -> None:
        tier.blobs = Faulty(tier.store)
        tier.blobs.fail("put", TierUnavailable("by script"), key="packs/*", times=None)

    monkeypatch.setattr(reopen_module, "reopen", reopened)
    tiers = {"disk": folder(tmp_path / "disk"), "far": folder(tmp_path / "far")}
    async with cohort(SIZE, shared_memory, tmp_path, tiers=tiers) as ranks:
        takes_nothing(ranks[1]._life.engine.state.tier("disk"))
        lost = []
        for step in range(1, 13):
            outcomes = await asyncio.gather(
                *(save.reached("far") for save in await ranks.save(step)), return_exceptions=True
            )
            if any(isinstance(outcome, Exception) for outcome in outcomes):
                lost.append(step)
        assert lost == [1, 4, 9]


async def test_declared_replicas_are_streamed_once(place: Place) -> None:
    async with place.open() as ranks:
        tree = {"common": part(1, 0, SIZE)["common"]}
        saves = await ranks.all(lambda store, rank: store.save(1, tree, replicated=["common"]))
        await ranks.reached(saves, "disk")
        assert pack_bytes(place.disk) < 1.6 * tree["common"].nbytes  # one copy, in chunks with a page for a checksum


@pytest.mark.parametrize("when", ["while it streams", "once it has streamed"])
async def test_packs_that_a_part_refers_to_stay_when_the_step_goes_that_had_them(place: Place, when: str) -> None:
    async with place.open() as ranks:
        for step in (1, 2):
            await ranks.reached(await ranks.save(step), "disk")
        leader, new = ranks[0], np.random.default_rng(3).bytes(1 << 17)
        held = ranks.faulty(0).hold("put", key="packs/*")
        first = asyncio.create_task(leader.save(3, part(1, 0, SIZE) | {"new": np.frombuffer(new, np.uint8)}))
        await held.reached()
        if when == "once it has streamed":
            held.release()
            await first
        await leader.evict(1, "disk")
        await leader.collect()
        held.release()
        await ranks.reached([await first, *await ranks.save(3, 1, ranks=[1, 2])], "disk")
        for restored in await ranks.restored(3):
            assert_whole(restored, 1)
            assert restored is not None
            assert restored.tree["new"].tobytes() == new


async def test_a_pack_that_another_step_came_to_need_and_left_stays_with_the_part_that_wrote_it(place: Place) -> None:
    async with place.open() as ranks:
        leader, new = ranks[0], np.random.default_rng(3).integers(0, 255, 1 << 17, np.uint8)
        held = ranks.faulty(0).hold("put", key="packs/*", after=True)
        first = asyncio.create_task(leader.save(1, part(1, 0, SIZE) | {"new": new}))
        await held.reached()
        disk = leader._life.engine.state.tier("disk")

        async def as_if_known_to_be_used() -> None:
            await asyncio.sleep(0)
            disk.packs.sizes.update(
                {path.relative_to(place.disk).as_posix(): path.stat().st_size for path in place.packs()}
            )
            disk.packs.orphans.clear()

        await leader._life.loop.call(as_if_known_to_be_used())
        assert place.packs()
        await leader.collect()
        held.release()
        await ranks.reached([await first, *await ranks.save(1, ranks=[1, 2])], "disk")
        for restored in await ranks.restored(1):
            assert_whole(restored, 1)


async def test_a_rank_that_did_not_stream_leaves_no_commit(place: Place) -> None:
    async with place.open() as ranks:
        ranks.let_wait(DEADLINE)
        checkpoints = await ranks.save(1, ranks=[0, 2])
        for event in await ranks.failed():
            assert event.ranks == (1,)
        for checkpoint in checkpoints:
            with pytest.raises(RanksUnavailable, match="not committed"):
                await checkpoint.reached("disk")
        assert place.commits() == []
        ranks.let_wait(SOON)
        await ranks.reached(await ranks.save(2), "disk")


async def test_a_commit_of_streamed_parts_that_fails_is_told_to_all(place: Place) -> None:
    async with place.open() as ranks:
        ranks.faulty(0).fail("put", TierUnavailable("by script"), key="steps/*/btree")
        checkpoints = await ranks.save(1)
        for event in await ranks.failed(tier="disk"):
            assert "by script" in event.reason
        for checkpoint in checkpoints:
            with pytest.raises((RanksUnavailable, TierUnavailable)):
                await checkpoint.reached("disk")
        assert place.commits() == []
        await ranks.reached(await ranks.save(2), "disk")
        for restored in await ranks.restored():
            assert_whole(restored, 2)


async def test_a_rank_that_hangs_after_it_streamed_does_not_stall_the_saves_of_others(place: Place) -> None:
    async with place.open() as ranks:
        held = ranks.faulty(1).hold("put", key="steps/*/parts/*")
        await ranks.save(1)
        await held.reached()
        early = await ranks.save(2, ranks=[0, 2])
        held.release()
        late = await ranks.save(2, ranks=[1])
        await ranks.reached([*early, *late], "disk")
        for restored in await ranks.restored():
            assert_whole(restored, 2)


async def test_a_leader_that_dies_before_it_commits_what_was_streamed_keeps_nobody_waiting(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit(monkeypatch, wait_longer=0.1)
    async with place.open(crashing=True) as ranks:
        ranks.let_wait(DEADLINE)
        ranks.world.kill(0, "send", topic="todo/*")
        checkpoints = await ranks.save(1)
        await ranks.heard[1].first(StepCommitted)
        async with asyncio.timeout(SOON):
            for wait in (checkpoints[1].reached("disk"), ranks[1].flush()):
                with pytest.raises(RanksUnavailable, match="rank 0 is silent"):
                    await wait
        assert place.commits() == []


async def test_only_some_ranks_need_to_stream(shared_memory: Path, tmp_path: Path) -> None:
    """One rank has more than fits into its RAM, the others have theirs there: all goes to the shared tier."""
    disk = tmp_path / "disk"
    async with cohort(SIZE, shared_memory, disk, ram_settings={"capacity": "1 MiB"}, crashing=True) as ranks:
        trees = [part(1, rank, SIZE) for rank in range(SIZE)]
        trees[2]["own"]["large"] = part(7, 0, 1)["w"].array.repeat(4, axis=0)
        saves = await ranks.all(lambda store, rank: store.save(1, trees[rank]))
        assert [save.saved.tier for save in saves if save.saved is not None] == ["ram", "ram", "disk"]
        await ranks.reached(saves, "disk")
        await asyncio.gather(*(heard.first(StepCommitted) for heard in ranks.heard))
        assert [await store.where(1) for store in ranks.stores] == [("disk",)] * SIZE
        restored = await ranks.restored(keys=["epoch", "w", "common"])
        assert all(each is not None for each in restored)
        await ranks.reached(await ranks.save(2), "ram")
    async with CheckpointStore.open(config({"disk": folder(disk)}), ranks=None) as store:
        found = await store.restore(1)
        assert found is not None
        assert (found.tree["own"]["large"] == trees[2]["own"]["large"]).all()
