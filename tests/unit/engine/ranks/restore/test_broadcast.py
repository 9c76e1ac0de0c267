"""Ranks that restore serve each other: what one has or reads, the others need not read."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.clusters import Cluster, read, save, whole
from support.cohort import DEADLINE
from support.insight import let_wait
from support.scenes import CHUNK, SOON, Heard, assert_restored, assert_same

from tieredckpt.engine.ranks.restore.transfer import PEERS, ChunkTransfer
from tieredckpt.errors import TierUnavailable
from tieredckpt.events import StepPromoted


@pytest.fixture
def state() -> dict[str, Any]:
    rng = np.random.default_rng(5)
    return {f"w{i}": rng.standard_normal(20 * CHUNK // 8) for i in range(4)}


async def saved_on_disk_alone(cluster: Cluster, shared_memory: Path, state: dict[str, Any]) -> None:
    """All ranks save the state that they have alike, as step 1; RAM then loses it."""
    async with cluster.open() as stores:
        await asyncio.gather(*(store.save(1, state, replicated=("**",)) for store in stores))
        await asyncio.gather(*(store.flush() for store in stores))
    shutil.rmtree(shared_memory)
    shared_memory.mkdir()


async def test_four_replicas_read_the_bytes_of_one(shared_memory: Path, tmp_path: Path, state: dict[str, Any]) -> None:
    nbytes = sum(array.nbytes for array in state.values())
    cluster = Cluster(("a", "b", "c", "d"), shared_memory, tmp_path / "disk")
    await saved_on_disk_alone(cluster, shared_memory, state)
    async with cluster.open() as stores:
        before = [read(store) for store in stores]
        restored = await asyncio.gather(*(store.restore() for store in stores))
        total = sum(read(store) for store in stores) - sum(before)
        assert nbytes <= total <= 1.05 * nbytes
        for each in restored:
            assert_restored(each, state)
            assert sum(each.sources.values()) == nbytes
            assert 0.6 * nbytes < each.sources[PEERS] < 0.9 * nbytes
            assert each.sources["disk"] + each.sources[PEERS] == nbytes


async def test_what_a_rank_does_not_send_in_time_is_read_by_the_others(
    shared_memory: Path, tmp_path: Path, state: dict[str, Any]
) -> None:
    nbytes = sum(array.nbytes for array in state.values())
    cluster = Cluster(("a", "b", "c"), shared_memory, tmp_path / "disk")
    await saved_on_disk_alone(cluster, shared_memory, state)
    async with cluster.open() as stores:
        let_wait(stores, 2 * DEADLINE)
        held = cluster.world.hold(2, "send_bulk")
        restoring = asyncio.gather(*(store.restore() for store in stores))
        async with asyncio.timeout(SOON):
            while any(read(store) < 0.6 * nbytes for store in stores[:2]):  # nothing tells of it
                await asyncio.sleep(0.01)
            held.release()
            for each in await restoring:
                assert_restored(each, state)


async def test_a_restore_that_fails_on_one_rank_keeps_none_waiting_and_can_be_made_again(
    shared_memory: Path, tmp_path: Path, state: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = Cluster(("a", "b", "c"), shared_memory, tmp_path / "disk")
    await saved_on_disk_alone(cluster, shared_memory, state)
    async with cluster.open() as stores:
        for failing in (1, 0):
            really = ChunkTransfer.run

            async def run(self: ChunkTransfer, tasks: Any, failing: int = failing, really: Any = really) -> Any:
                if self.rank == failing:
                    raise TierUnavailable("this rank fails in the middle, by script")
                self.timeout = 0.2
                return await really(self, tasks)

            monkeypatch.setattr(ChunkTransfer, "run", run)
            async with asyncio.timeout(SOON / 2):
                for end in await asyncio.gather(*(store.restore() for store in stores), return_exceptions=True):
                    assert isinstance(end, TierUnavailable)
            monkeypatch.undo()
        for each in await asyncio.gather(*(store.restore() for store in stores)):
            assert_restored(each, state)


async def test_a_step_that_is_in_ram_alone_comes_without_bulk_too(shared_memory: Path, tmp_path: Path) -> None:
    nodes = ("a", "b")
    never = {"promote": {"kind": "never"}}
    cluster = Cluster(nodes, shared_memory, tmp_path / "disk", disk=never, bulk=False)
    async with cluster.open(crashing=True) as stores:
        await save(stores, 1)
        await asyncio.gather(*(store.flush() for store in stores))
    async with cluster.open(crashing=True) as stores:
        restored = await asyncio.gather(*(store.restore() for store in stores))  # all of it, on both ranks
        for each in restored:
            assert each is not None
            assert_same(each.tree["w"], whole(1))
            assert each.sources.keys() == {"ram", PEERS}


async def test_groups_read_for_themselves(shared_memory: Path, tmp_path: Path, state: dict[str, Any]) -> None:
    nbytes = sum(array.nbytes for array in state.values())
    cluster = Cluster(("a", "b", "c", "d"), shared_memory, tmp_path / "disk", store={"restore_group": 2})
    await saved_on_disk_alone(cluster, shared_memory, state)
    async with cluster.open() as stores:
        before = [read(store) for store in stores]
        restored = await asyncio.gather(*(store.restore() for store in stores))
        assert 2 * nbytes <= sum(map(read, stores)) - sum(before) <= 2.1 * nbytes
        for each in restored:
            assert_restored(each, state)


async def test_a_leader_that_has_flushed_has_told_the_others_everything(shared_memory: Path, tmp_path: Path) -> None:
    """A trainer that then waits for the others in a collective may keep every thread of its process from running."""
    cluster = Cluster(("a", "b"), shared_memory, tmp_path / "disk")
    async with cluster.open() as stores:
        heard = Heard(stores[0])
        held = cluster.world.hold(0, "send", topic="log/*", nth=3)  # that the step is on the disk
        await save(stores, 1)
        await held.reached()
        await heard.first(StepPromoted)
        flushing = [asyncio.create_task(store.flush()) for store in stores]
        ended, _ = await asyncio.wait(flushing, timeout=0.3)
        assert not ended
        held.release()
        await asyncio.gather(*flushing)
