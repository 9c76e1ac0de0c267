"""Ranks that restore serve each other: what one has or reads, the others need not read."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.cohort import DEADLINE, RanksPlace, assert_whole, cohort
from support.scenes import CHUNK, SOON, assert_restored

from tieredckpt.engine.ranks.restore.transfer import PEERS, ChunkTransfer
from tieredckpt.errors import TierUnavailable
from tieredckpt.events import StepPromoted


@pytest.fixture
def state() -> dict[str, Any]:
    rng = np.random.default_rng(5)
    return {f"w{i}": rng.standard_normal(20 * CHUNK // 8) for i in range(4)}


async def saved_on_disk_alone(place: RanksPlace, state: dict[str, Any]) -> None:
    """All ranks save the state that they have alike, as step 1; RAM then loses it."""
    async with place.open() as ranks:
        await ranks.all(lambda store, rank: store.save(1, state, replicated=("**",)))
        await ranks.flush()
    place.lose_ram()


async def test_four_replicas_read_the_bytes_of_one(shared_memory: Path, tmp_path: Path, state: dict[str, Any]) -> None:
    nbytes = sum(array.nbytes for array in state.values())
    place = RanksPlace(shared_memory, tmp_path / "disk", 4, {"nodes": "abcd"})
    await saved_on_disk_alone(place, state)
    async with place.open() as ranks:
        before = sum(map(ranks.read, range(4)))
        restored = await ranks.restored()
        total = sum(map(ranks.read, range(4))) - before
        assert nbytes <= total <= 1.05 * nbytes
        for each in restored:
            assert_restored(each, state)
            assert each is not None
            assert sum(each.sources.values()) == nbytes
            assert 0.6 * nbytes < each.sources[PEERS] < 0.9 * nbytes
            assert each.sources["disk"] + each.sources[PEERS] == nbytes


async def test_what_a_rank_does_not_send_in_time_is_read_by_the_others(
    shared_memory: Path, tmp_path: Path, state: dict[str, Any]
) -> None:
    nbytes = sum(array.nbytes for array in state.values())
    place = RanksPlace(shared_memory, tmp_path / "disk", 3, {"nodes": "abc"})
    await saved_on_disk_alone(place, state)
    async with place.open() as ranks:
        ranks.let_wait(2 * DEADLINE)
        held = ranks.world.hold(2, "send_bulk")
        restoring = asyncio.ensure_future(ranks.restored())
        async with asyncio.timeout(SOON):
            while any(ranks.read(rank) < 0.6 * nbytes for rank in (0, 1)):  # nothing tells of it
                await asyncio.sleep(0.01)
            held.release()
            for each in await restoring:
                assert_restored(each, state)


async def test_a_restore_that_fails_on_one_rank_keeps_none_waiting_and_can_be_made_again(
    shared_memory: Path, tmp_path: Path, state: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    place = RanksPlace(shared_memory, tmp_path / "disk", 3, {"nodes": "abc"})
    await saved_on_disk_alone(place, state)
    async with place.open() as ranks:
        for failing in (1, 0):
            really = ChunkTransfer.run

            async def run(self: ChunkTransfer, tasks: Any, failing: int = failing, really: Any = really) -> Any:
                if self.rank == failing:
                    raise TierUnavailable("this rank fails in the middle, by script")
                self.timeout = 0.2
                return await really(self, tasks)

            monkeypatch.setattr(ChunkTransfer, "run", run)
            async with asyncio.timeout(SOON / 2):
                for end in await asyncio.gather(*(store.restore() for store in ranks.stores), return_exceptions=True):
                    assert isinstance(end, TierUnavailable)
            monkeypatch.undo()
        for each in await ranks.restored():
            assert_restored(each, state)


async def test_a_step_that_is_in_ram_alone_comes_without_bulk_too(shared_memory: Path, tmp_path: Path) -> None:
    settings = {"nodes": "ab", "bulk": False, "disk_settings": {"promote": "never"}, "crashing": True}
    place = RanksPlace(shared_memory, tmp_path / "disk", 2, settings)
    async with place.open() as ranks:
        await ranks.save(1)
        await ranks.flush()
    async with place.open() as ranks:
        for each in await ranks.restored():  # all of it, on both ranks
            assert_whole(each, 1)
            assert each is not None
            assert each.sources.keys() == {"ram", PEERS}


async def test_groups_read_for_themselves(shared_memory: Path, tmp_path: Path, state: dict[str, Any]) -> None:
    nbytes = sum(array.nbytes for array in state.values())
    place = RanksPlace(shared_memory, tmp_path / "disk", 4, {"nodes": "abcd", "restore_group": 2})
    await saved_on_disk_alone(place, state)
    async with place.open() as ranks:
        before = sum(map(ranks.read, range(4)))
        restored = await ranks.restored()
        assert 2 * nbytes <= sum(map(ranks.read, range(4))) - before <= 2.1 * nbytes
        for each in restored:
            assert_restored(each, state)


async def test_a_leader_that_has_flushed_has_told_the_others_everything(shared_memory: Path, tmp_path: Path) -> None:
    """A trainer that then waits for the others in a collective may keep every thread of its process from running."""
    async with cohort(2, shared_memory, tmp_path / "disk", nodes="ab") as ranks:
        held = ranks.world.hold(0, "send", topic="log/*", nth=3)  # that the step is on the disk
        await ranks.save(1)
        await held.reached()
        await ranks.heard[0].first(StepPromoted)
        flushing = [asyncio.create_task(store.flush()) for store in ranks.stores]
        ended, _ = await asyncio.wait(flushing, timeout=0.3)
        assert not ended
        held.release()
        await asyncio.gather(*flushing)
