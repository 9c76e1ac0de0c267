"""A copy that lacks a chunk counts as no good copy until it is known to have all of them again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest
from reliability.ranks import World
from reliability.tiers import FaultyTiers
from support.commit_scene import MANIFEST, Scene
from support.insight import flip_chunk, tier_of
from support.scenes import Heard, assert_restored, config, folder, polled, ram, tree

from tieredckpt import CheckpointStore
from tieredckpt.engine.tier import commit_file, step_index
from tieredckpt.engine.tier.commit_file import Encoded
from tieredckpt.engine.tier.tier import Tier
from tieredckpt.errors import Conflict, Corrupt, NotFound, TieredCkptError, TierUnavailable
from tieredckpt.events import ChunkRepaired, StepPromoted, TierFailed, TierRecovered
from tieredckpt.format.manifest import StepId


async def lose(scene: Scene, key: str) -> None:
    """Damage a chunk on both tiers, and have it found."""
    for tier in ("ram", "disk"):
        await flip_chunk(scene.store, tier, 1, key)
    assert any(found.lost for found in await scene.store.verify(1, repair=True))
    assert not any(tier_of(scene.store, tier).steps.has_good(scene.step) for tier in ("ram", "disk"))


async def test_a_copy_that_lacks_a_chunk_is_not_good_once_another_chunk_is_repaired(scene: Scene) -> None:
    heard = Heard(scene.store)
    await lose(scene, "params/w0")
    await flip_chunk(scene.store, "ram", 1, "params/w1")
    assert await scene.store.restore(1, keys=["params/w1"], resume=False) is not None
    await heard.first(ChunkRepaired, lambda event: event.key == "params/w1")
    await scene.store.flush()
    assert not tier_of(scene.store, "ram").steps.has_good(scene.step)


async def test_a_copy_that_lacks_a_chunk_is_not_good_once_its_index_is_repaired(scene: Scene) -> None:
    await lose(scene, "params/w0")
    (manifest,) = scene.manifests
    manifest.write_bytes(b"damaged")
    (found,) = await scene.store.verify(1, "disk", repair=True)
    assert found.repaired
    assert not scene.tier.steps.has_good(scene.step)


async def test_a_copy_that_is_found_to_lack_a_chunk_while_another_is_repaired_is_not_good(
    scene: Scene, faults: FaultyTiers
) -> None:
    await flip_chunk(scene.store, "ram", 1, "params/w1")
    read = faults["disk"].hold("get_into")
    repairing = asyncio.create_task(scene.store.verify(1, "ram", repair=True))
    await read.reached()
    await lose(scene, "params/w0")
    read.release()
    await repairing
    assert not tier_of(scene.store, "ram").steps.has_good(scene.step)


async def test_a_step_of_which_only_the_commit_is_damaged_is_committed_anew_and_promoted(
    tmp_path: Path, faults: FaultyTiers
) -> None:
    """This process can restore it, and no other could."""
    tiers = {name: folder(tmp_path / name, retain="all") for name in ("disk", "far")}
    async with CheckpointStore.open(config(tiers)) as store:
        faults["far"].kill()
        await (await store.save(1, tree(1))).reached("disk")
        (manifest,) = tmp_path.glob(f"disk/{MANIFEST}")
        manifest.write_bytes(b"damaged")
        faults["disk"].fail("put", TierUnavailable("no answer"), key=MANIFEST)
        assert not (await store.verify(1, "disk", repair=True))[0].repaired
        assert await store.restore(1) is not None
        heard = Heard(store)
        faults["far"].revive()
        await heard.first(StepPromoted, lambda event: event.tier == "far")
        await polled(lambda: tier_of(store, "disk").steps.has_good(StepId(1, 1)))
    async with CheckpointStore.open(config(tiers)) as store:
        assert_restored(await store.restore(1), tree(1))


@asynccontextmanager
async def lost_on_both(tmp_path: Path) -> AsyncIterator[tuple[CheckpointStore, list[Tier]]]:
    """Two steps on two durable tiers, of which the second one lacks a chunk on both; only the latter was looked at."""
    tiers = {name: folder(tmp_path / name, retain="all") for name in ("disk", "far")}
    tiers["far"]["promote"] = "never"
    async with CheckpointStore.open(config(tiers)) as store:
        for step in (1, 2):
            await (await store.save(step, tree(step))).reached("disk")
            await store.promote(step, "far")
        for name in tiers:
            await flip_chunk(store, name, 2, "params/w0")
        assert (await store.verify(2, "far", repair=True))[0].lost
        yield store, [tier_of(store, name) for name in tiers]


async def test_the_repair_of_a_chunk_on_a_durable_tier_makes_no_copy_good_that_lacks_another(tmp_path: Path) -> None:
    """Promise 6: the last good copy of the step before could be evicted then."""
    async with lost_on_both(tmp_path) as (store, (disk, _)):
        heard = Heard(store)
        await flip_chunk(store, "disk", 2, "params/w1")
        assert await store.restore(2, keys=["params/w1"], resume=False) is not None
        await heard.first(ChunkRepaired, lambda event: (event.key, event.tier) == ("params/w1", "disk"))
        await store.flush()
        assert not disk.steps.has_good(StepId(2, 2))
        await store.evict(1, "disk")
        with pytest.raises(Conflict, match="last good copy"):
            await store.evict(1, "far")


async def test_what_a_copy_lacks_is_written_anew_where_a_tier_has_it_again(tmp_path: Path) -> None:
    async with lost_on_both(tmp_path) as (store, (disk, far)):
        await flip_chunk(store, "far", 2, "params/w0")  # as it was
        assert (await store.verify(2, "far", repair=True))[0].intact
        await polled(lambda: disk.steps.has_good(StepId(2, 2)))
        assert far.steps.has_good(StepId(2, 2))
        assert (await store.verify(2, "disk"))[0].intact


async def test_a_damaged_commit_that_cannot_be_replaced_takes_neither_the_step_nor_its_tier(
    tmp_path: Path, faults: FaultyTiers
) -> None:
    """It was promoted from its own tier: that failed, and forgot the only index of the step."""
    async with CheckpointStore.open(config({"disk": folder(tmp_path / "disk", retain="all")})) as store:
        await (await store.save(1, tree(1))).reached("disk")
        (manifest,) = tmp_path.glob(f"disk/{MANIFEST}")
        manifest.write_bytes(b"damaged")
        faults["disk"].fail("put", TierUnavailable("cannot be written"), key=MANIFEST, times=None)
        heard = Heard(store)
        assert not (await store.verify(1, "disk", repair=True))[0].repaired
        await (await store.save(2, tree(2))).reached("disk")
        await store.flush()
        assert not heard.of(TierFailed)
        assert_restored(await store.restore(1, resume=False), tree(1))


async def test_a_copy_that_lacks_a_chunk_is_not_good_once_its_deletion_has_failed(
    tmp_path: Path, faults: FaultyTiers
) -> None:
    async with lost_on_both(tmp_path) as (store, (disk, _)):
        faults["disk"].fail("delete", TierUnavailable("no answer"), key="steps/*2-*/manifest.ocdbt")
        with pytest.raises(TierUnavailable):
            await store.evict(2, "disk")
        await polled(lambda: StepId(2, 2) in disk.steps.held)
        assert not disk.steps.has_good(StepId(2, 2))


async def test_a_copy_whose_commit_is_damaged_is_not_good_once_its_deletion_has_failed(
    tmp_path: Path, faults: FaultyTiers
) -> None:
    """Only that it is there is looked at then."""
    tiers = {name: folder(tmp_path / name, retain="all") for name in ("disk", "far")}
    async with CheckpointStore.open(config(tiers)) as store:
        await (await store.save(1, tree(1))).reached("far")
        far, key = tier_of(store, "far"), StepId(1, 1)
        (manifest,) = tmp_path.glob(f"far/{MANIFEST}")
        manifest.write_bytes(b"damaged")
        faults["far"].fail("put", TierUnavailable("no answer"), key=MANIFEST, times=None)
        assert not (await store.verify(1, "far", repair=True))[0].repaired
        faults["far"].fail("delete", TierUnavailable("no answer"), key=MANIFEST)
        with pytest.raises(TierUnavailable):
            await store.evict(1, "far")
        await polled(lambda: key in far.steps.held)
        assert not far.steps.has_good(key)


async def test_a_commit_that_was_misread_is_good_once_it_is_read_well(tmp_path: Path, faults: FaultyTiers) -> None:
    """It could be evicted, though it was the newest and the only copy."""
    async with CheckpointStore.open(config({"disk": folder(tmp_path / "disk", retain="all")})) as store:
        for step in (1, 2):
            await (await store.save(step, tree(step))).reached("disk")
        disk = faults["disk"]
        disk.fail("get", Corrupt("misread"), key=MANIFEST.replace("1-", "2-"), times=None)
        disk.fail("put", TierUnavailable("no answer"), key=MANIFEST.replace("1-", "2-"), times=None)
        assert not (await store.verify(2, "disk", repair=True))[0].repaired
        with suppress(TieredCkptError):
            await store.collect()
        disk.clear()
        await store.collect()
        await polled(lambda: tier_of(store, "disk").steps.has_good(StepId(2, 2)))
        with pytest.raises(Conflict, match="last good copy"):
            await store.evict(2, "disk")


async def test_ranks_write_anew_what_a_copy_lacks(shared_memory: Path, tmp_path: Path) -> None:
    world = World(2, nodes=["a", "a"])
    tiers = {"ram": ram(shared_memory), **{name: folder(tmp_path / name, retain="all") for name in ("disk", "far")}}
    tiers["far"]["promote"] = "never"
    stores = await asyncio.gather(*(CheckpointStore.open(config(tiers), ranks=c) for c in world.communicators()))
    saved = await asyncio.gather(*(store.save(1, tree(1)) for store in stores))
    await asyncio.gather(*(checkpoint.reached("disk") for checkpoint in saved))
    first = stores[0]
    await first.promote(1, "far")
    for store in stores:
        await flip_chunk(store, "ram", 1, "params/w0")
    for name in ("disk", "far"):
        await flip_chunk(first, name, 1, "params/w0")
    assert (await first.verify(1, "far", repair=True))[0].lost
    await flip_chunk(first, "far", 1, "params/w0")  # as it was
    assert (await first.verify(1, "far", repair=True))[0].intact
    await polled(lambda: tier_of(first, "disk").steps.has_good(StepId(1, 1)))
    assert (await first.verify(1, "disk"))[0].intact
    await asyncio.gather(*(store.close() for store in stores))


async def test_who_waits_for_a_step_that_lacks_chunks_is_told_so(
    shared_memory: Path, tmp_path: Path, faults: FaultyTiers
) -> None:
    """Newer steps were said to have come first, where there was none."""
    async with CheckpointStore.open(config({"ram": ram(shared_memory), "disk": folder(tmp_path / "disk")})) as store:
        heard = Heard(store)
        faults["disk"].kill()
        checkpoint = await store.save(1, tree(1))
        await heard.first(TierFailed)
        await flip_chunk(store, "ram", 1, "params/w0")
        assert (await store.verify(1, "ram", repair=True))[0].lost
        faults["disk"].revive()
        await heard.first(TierRecovered)
        with pytest.raises(NotFound, match="is not due on tier 'disk': it lacks chunks on 'ram', as `tieredckpt veri"):
            await checkpoint.reached("disk")


async def test_a_commit_of_another_step_that_cannot_be_replaced_is_no_good_copy(
    scene: Scene, faults: FaultyTiers
) -> None:
    tier = scene.tier

    async def encode() -> Encoded:
        other = await step_index.load(tier, max(tier.steps.held))
        return await commit_file.encode(tier, other.record, other.arrays, tier.steps.held[scene.step].btree_key)

    other = await scene.store._life.loop.call(encode())
    (manifest,) = scene.manifests
    manifest.write_bytes(other.index.manifest)
    (scene.disk / other.btree_key).write_bytes(other.index.btree)
    faults["disk"].fail("put", TierUnavailable("no answer"), key=MANIFEST)
    (found,) = await scene.store.verify(1, "disk", repair=True)
    assert not found.repaired
    assert not tier.steps.has_good(scene.step)
