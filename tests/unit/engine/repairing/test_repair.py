"""A repair leaves what others repaired or wrote meanwhile."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from reliability.tiers import FaultyTiers
from support.commit_scene import Scene
from support.insight import flip_chunk
from support.scenes import SOON, Heard, assert_restored, config, folder, tree

from tieredckpt import CheckpointStore
from tieredckpt.errors import TierUnavailable
from tieredckpt.events import ChunkRepaired


@pytest.mark.parametrize("repaired", [False, True], ids=["saved again", "and repaired"])
async def test_a_lost_chunk_that_comes_back_while_a_step_is_repaired_is_not_lost(
    tmp_path: Path, faults: FaultyTiers, repaired: bool
) -> None:
    """The step referred to its damaged bytes again, or nothing knew of the good ones any more."""
    tiers = {name: folder(tmp_path / name, retain="all") for name in ("disk", "far")}
    async with CheckpointStore.open(config(tiers)) as store:
        await (await store.save(1, tree(1))).reached("far")
        for name in tiers:
            await flip_chunk(store, name, 1, "params/w0")
        assert (await store.verify(1, "disk", repair=True))[0].lost
        await flip_chunk(store, "disk", 1, "params/w1")
        held = faults["far"].hold("get_into", nth=2)  # of w1: w0 was found to be damaged there, too
        overtaken = asyncio.create_task(store.verify(1, "disk", repair=True))
        await held.reached()
        await (await store.save(2, tree(1))).reached("disk")  # with the same chunks
        if repaired:
            assert (await store.verify(1, "disk", repair=True))[0].repaired
        held.release()
        (found,) = await overtaken
        assert bool(found.lost) is not repaired
        assert all(each.intact for each in await store.verify(1, "disk"))
        assert_restored(await store.restore(1, resume=False), tree(1))


async def test_bytes_in_an_index_that_two_find_damaged_are_repaired_once(
    scene: Scene, faults: FaultyTiers, caplog: pytest.LogCaptureFixture
) -> None:
    heard = Heard(scene.store)
    await scene.damage_index()
    held = faults["disk"].hold("put", key="steps/*1-*/btree*")
    both = asyncio.gather(*(scene.store.verify(1, "disk", repair=True) for _ in range(2)))
    await held.reached()
    async with asyncio.timeout(SOON):
        while caplog.text.count("bytes of 'half' in the index are damaged") < 2:
            await asyncio.sleep(0.001)
    held.release()
    found = await both
    assert [(each.damaged, each.repaired) for (each,) in found] == [(("half",), True)] * 2
    assert len(heard.of(ChunkRepaired)) == 1
    assert await scene.is_held()


async def test_a_commit_whose_old_nodes_cannot_be_deleted_is_a_commit(scene: Scene, faults: FaultyTiers) -> None:
    """They are left to the collector."""
    (manifest,) = scene.manifests
    manifest.write_bytes(b"damaged")
    faults["disk"].fail("delete", TierUnavailable("no answer"), key="steps/*1-*/btree*")
    (found,) = await scene.store.verify(1, "disk", repair=True)
    assert found.repaired
    assert await scene.is_held()
