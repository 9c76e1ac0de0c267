"""A copy that lacks a chunk counts as no good copy until it is known to have all of them again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from reliability.ranks import World
from reliability.tiers import FaultyTiers
from support.commit_scene import MANIFEST, Scene
from support.insight import flip_chunk, index_of, tier_of
from support.scenes import CHUNK, Heard, assert_restored, config, folder, polled, ram, tree

from tieredckpt import CheckpointStore
from tieredckpt.engine.tier import commit_file, step_index
from tieredckpt.engine.tier.commit_file import Encoded
from tieredckpt.engine.tier.packs import Packs
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
async def lost_on_both(
    tmp_path: Path, capacity: int | None = None
) -> AsyncIterator[tuple[CheckpointStore, list[Tier]]]:
    """Two steps on two durable tiers, of which the second one lacks a chunk on both; only the latter was looked at."""
    tiers = {name: folder(tmp_path / name, retain="all") for name in ("disk", "far")}
    tiers["disk"]["capacity"] = capacity
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


@pytest.mark.parametrize("index", ["there", "damaged"])
async def test_what_a_copy_lacks_is_written_anew_where_a_tier_has_it_again(tmp_path: Path, index: str) -> None:
    async with lost_on_both(tmp_path) as (store, (disk, far)):
        if index == "damaged":
            (nodes,) = tmp_path.glob("disk/steps/*2-*/btree*")
            nodes.write_bytes(b"damaged")
            disk.steps.indexes.forget(StepId(2, 2))  # which knew it
        await flip_chunk(store, "far", 2, "params/w0")  # as it was
        assert (await store.verify(2, "far", repair=True))[0].intact
        await polled(lambda: disk.steps.has_good(StepId(2, 2)))
        assert far.steps.has_good(StepId(2, 2))
        assert (await store.verify(2, "disk"))[0].intact


async def test_what_a_copy_lacks_is_written_anew_within_the_capacity_of_the_tier(tmp_path: Path) -> None:
    async with lost_on_both(tmp_path, capacity=510_000) as (store, (disk, _)):
        two_steps = disk.packs.used
        assert two_steps > 510_000 - CHUNK
        await flip_chunk(store, "far", 2, "params/w0")  # as it was
        assert (await store.verify(2, "far", repair=True))[0].intact
        await polled(lambda: disk.steps.has_good(StepId(2, 2)))
        assert disk.packs.used < two_steps
        assert disk.steps.held.keys() == {StepId(2, 2)}


@pytest.mark.parametrize("left", [False, True], ids=["held", "left"])
async def test_a_save_refers_to_no_bytes_that_were_found_damaged(left: bool, tmp_path: Path) -> None:
    """It lacked them, too, though the trainer had them."""
    async with lost_on_both(tmp_path) as (store, (disk, _)):
        if left:  # the pack stays, which another step uses, too
            params = {"w0": tree(3)["params"]["w0"], "w1": tree(2)["params"]["w1"]}
            await (await store.save(3, {"params": params})).reached("disk")
            await store.evict(2, "disk")
        await (await store.save(4, tree(2))).reached("disk")
        assert not disk.packs.doubted  # no later one reads it, or makes room for it
        assert (await store.verify(4, "disk"))[0].intact


async def test_a_save_refers_to_no_bytes_that_a_verification_has_found_damaged(
    shared_memory: Path, tmp_path: Path
) -> None:
    """Nobody asked for a repair, and the trainer has them intact."""
    tiers = {"ram": ram(shared_memory), "disk": folder(tmp_path / "disk", retain="all")}
    async with CheckpointStore.open(config(tiers)) as store:
        await (await store.save(1, tree(1))).reached("disk")
        await flip_chunk(store, "disk", 1, "params/w0")
        assert not (await store.verify(1, "disk"))[0].intact
        await (await store.save(2, tree(1))).reached("disk")
        assert (await store.verify(2, "disk"))[0].intact
        assert not (await store.verify(1, "disk"))[0].intact  # for a repair was not asked for


async def test_a_chunk_that_was_written_anew_in_another_encoding_is_not_lost(tmp_path: Path) -> None:
    """The damaged copy, in the encoding of the step, came first, and the good one was forgotten."""
    tiers = {"disk": folder(tmp_path / "disk", retain="all")}
    state = {"w": np.repeat(np.arange(CHUNK // 64), 16)}
    async with CheckpointStore.open(config(tiers)) as store:
        await (await store.save(1, state)).reached("disk")
        await flip_chunk(store, "disk", 1, "w")
    tiers["disk"]["codec"] = "fast"
    async with CheckpointStore.open(config(tiers)) as store:
        assert (await store.verify(1, "disk", repair=True))[0].lost
        await (await store.save(2, state)).reached("disk")
        assert (await store.verify(1, "disk", repair=True))[0].repaired
        assert (await store.verify(1, "disk"))[0].intact


@pytest.mark.parametrize("first", [0, 1])
async def test_a_save_refers_to_no_lost_chunk_of_which_there_are_copies_in_two_encodings(
    first: int, tmp_path: Path
) -> None:
    """Whichever of them was listed first: the copy in the encoding of the tier was believed."""
    tiers = {name: folder(tmp_path / name, retain="all") for name in ("disk", "far")}
    tiers["far"]["promote"] = "never"
    state = {"w": np.repeat(np.arange(CHUNK // 64), 16)}
    for step, codec in ((1, "none"), (2, "fast")):
        tiers["disk"]["codec"] = codec
        async with CheckpointStore.open(config(tiers)) as store:
            await (await store.save(step, state)).reached("disk")
            await store.promote(step, "far")
    async with CheckpointStore.open(config(tiers)) as store:
        packs = tier_of(store, "disk").packs
        chunks: list[Any] = [(await index_of(store, "disk", step))["w"].chunks[0] for step in (1, 2)]
        packs.index[chunks[0].digest] = chunks[first].where
        packs.duplicates[chunks[0].digest] = [chunks[not first].where]
        for name, step in (("disk", 1), ("disk", 2), ("far", 2)):
            await flip_chunk(store, name, step, "w")
        assert (await store.verify(2, "far", repair=True))[0].lost
        await (await store.save(3, state)).reached("disk")
        assert (await store.verify(3, "disk"))[0].intact


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


async def save_by_all(stores: Sequence[CheckpointStore], step: int, seed: int | None = None) -> None:
    """Save an array of each rank, which no other one has."""
    arrays = tree(seed or step, arrays=len(stores))["params"]
    parts = ({f"w{rank}": arrays[f"w{rank}"]} for rank in range(len(stores)))
    saved = await asyncio.gather(*(store.save(step, part) for store, part in zip(stores, parts, strict=True)))
    await asyncio.gather(*(checkpoint.reached("disk") for checkpoint in saved))


@asynccontextmanager
async def lost_for_ranks(
    shared_memory: Path | None, tmp_path: Path, *, found: bool = True, capacity: int | None = None
) -> AsyncIterator[list[CheckpointStore]]:
    """As `lost_on_both`, of two ranks; the steps have left their RAM, and what is lost was ``found``, or not yet."""
    world = World(2, nodes=["a", "a"])
    tiers = {"ram": ram(shared_memory)} if shared_memory is not None else {}
    tiers |= {name: folder(tmp_path / name, retain="all") for name in ("disk", "far")}
    tiers["far"]["promote"], tiers["disk"]["capacity"] = "never", capacity
    stores = await asyncio.gather(*(CheckpointStore.open(config(tiers), ranks=c) for c in world.communicators()))
    first = stores[0]
    for step in (1, 2):
        await save_by_all(stores, step)
        await first.promote(step, "far")
        if shared_memory is not None:
            await first.evict(step, "ram")  # with which the other rank drops its part
            await polled(lambda: not any(tier_of(store, "ram").steps.held for store in stores))
    for name in ("disk", "far"):
        await flip_chunk(first, name, 2, "w1")
    if found:
        assert (await first.verify(2, "far", repair=True))[0].lost
    yield stores
    await asyncio.gather(*(store.close() for store in stores))


@asynccontextmanager
async def step_3_waiting(stores: Sequence[CheckpointStore]) -> AsyncIterator[Tier]:
    """The tier "disk", where the commit of a step like the second one waits until the end of the context."""
    disk, loop = tier_of(stores[0], "disk"), stores[0]._life.loop
    await loop.call(disk.packs.guard.acquire())
    saving = asyncio.create_task(save_by_all(stores, 3, seed=2))
    await polled(lambda: bool(disk.packs.guard._waiters))
    yield disk
    loop.soon(disk.packs.guard.release)
    await saving


async def test_ranks_write_anew_what_a_copy_lacks(shared_memory: Path, tmp_path: Path) -> None:
    async with lost_for_ranks(shared_memory, tmp_path) as (first, _):
        await flip_chunk(first, "far", 2, "w1")  # as it was
        assert (await first.verify(2, "far", repair=True))[0].intact
        await polled(lambda: tier_of(first, "disk").steps.has_good(StepId(2, 2)))
        assert (await first.verify(2, "disk"))[0].intact


async def test_ranks_refer_to_no_bytes_that_were_found_damaged(shared_memory: Path, tmp_path: Path) -> None:
    async with lost_for_ranks(shared_memory, tmp_path, capacity=270_000) as stores:
        disk = tier_of(stores[0], "disk")
        assert disk.packs.used > 270_000 - CHUNK
        await save_by_all(stores, 3, seed=2)
        assert (await stores[0].verify(3, "disk"))[0].intact
        assert disk.packs.used <= 270_000


async def test_ranks_refer_to_no_bytes_that_were_found_damaged_while_they_waited(
    shared_memory: Path, tmp_path: Path
) -> None:
    async with lost_for_ranks(shared_memory, tmp_path, found=False) as stores:
        async with step_3_waiting(stores):
            assert (await stores[0].verify(2, "far", repair=True))[0].lost
        assert (await stores[0].verify(3, "disk"))[0].intact


async def test_ranks_write_what_was_forgotten_while_they_waited(shared_memory: Path, tmp_path: Path) -> None:
    """Nobody was asked for it, and the step never came to the tier."""
    async with lost_for_ranks(shared_memory, tmp_path, found=False) as stores:
        guard = tier_of(stores[0], "disk").packs.guard
        await stores[0]._life.loop.call(guard.acquire())
        repairing = asyncio.create_task(stores[0].verify(2, "disk", repair=True))
        await polled(lambda: bool(guard._waiters))
        saving = asyncio.create_task(save_by_all(stores, 3, seed=2))
        await polled(lambda: len(guard._waiters or ()) == 2)
        stores[0]._life.loop.soon(guard.release)
        assert (await repairing)[0].lost
        await saving
        assert (await stores[0].verify(3, "disk"))[0].intact


async def test_ranks_write_what_a_scan_has_not_found_again_while_they_waited(
    shared_memory: Path, tmp_path: Path
) -> None:
    async with lost_for_ranks(shared_memory, tmp_path, found=False) as stores:
        async with step_3_waiting(stores) as disk:
            stores[0]._life.loop.soon(lambda: disk.packs.exchange(Packs()))
        assert (await stores[0].verify(3, "disk"))[0].intact


async def test_ranks_that_streamed_before_a_chunk_was_found_damaged_commit_no_good_copy(tmp_path: Path) -> None:
    """Their parts refer to it; later saves did, too."""
    async with lost_for_ranks(None, tmp_path, found=False) as stores:
        async with step_3_waiting(stores) as disk:
            assert (await stores[0].verify(2, "far", repair=True))[0].lost
        assert not disk.steps.has_good(StepId(3, 3))
        await save_by_all(stores, 4, seed=2)
        assert (await stores[0].verify(4, "disk"))[0].intact


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
