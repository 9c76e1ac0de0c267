"""A step's manifest is put and taken back by one at a time, so that the last one is who was last."""

from __future__ import annotations

import asyncio
import os
import threading
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from reliability.tiers import FaultyTiers
from support.commit_scene import MANIFEST, Scene
from support.insight import bytes_of_listed_steps, slab_of, tier_of
from support.scenes import SOON, assert_restored, config, folder, polled, ram, taken_over, tree

from tieredckpt import CheckpointStore
from tieredckpt.blobs.wrap import Overdue
from tieredckpt.engine.repairing.repair import repair_index
from tieredckpt.engine.tier import commit_file, step_index
from tieredckpt.engine.tier.index_cache import located
from tieredckpt.engine.tier.steps import Stale
from tieredckpt.errors import Conflict, Corrupt, Invalid, NotFound, TierUnavailable
from tieredckpt.events import StepEvicted, StepPromoted, TierRecovered
from tieredckpt.format.manifest import Chunk, StepIndex, decode_step


@pytest.mark.parametrize("after", [False, True], ids=["before the put", "after it"])
@pytest.mark.parametrize("damaged", [False, True], ids=["held", "damaged"])
async def test_a_step_that_is_evicted_while_it_is_committed_anew_is_gone_and_told_to_be(
    quiet: Scene, faults: FaultyTiers, damaged: bool, after: bool
) -> None:
    held, anew = await quiet.held_up(faults["disk"], damaged=damaged, after=after)
    evicting = await quiet.evicting()
    held.release()
    await asyncio.gather(anew, evicting)
    assert await quiet.is_gone()
    assert quiet.told() == [StepPromoted, StepEvicted]
    await quiet.store.collect()
    assert len(list(quiet.disk.glob("packs/*/*"))) == 1


@pytest.mark.parametrize("damaged", [False, True], ids=["held", "damaged"])
async def test_a_step_that_was_evicted_before_it_is_committed_anew_stays_away(
    quiet: Scene, faults: FaultyTiers, damaged: bool
) -> None:
    if damaged:
        await quiet.quarantine()
    written = faults["disk"].hold("put", key="packs/*")
    quiet.tier.packs.index.clear()  # so that its chunks are written anew, which takes time
    anew = asyncio.create_task(quiet.copied(again=not damaged))
    await written.reached()
    deleted = faults["disk"].hold("delete", key=MANIFEST)
    evicting = await quiet.evicting()
    await deleted.reached()
    written.release()
    await asyncio.sleep(0)
    deleted.release()
    with pytest.raises(NotFound, match="was evicted before it could be committed anew"):
        await anew
    await evicting
    assert await quiet.is_gone()
    assert quiet.told() == [StepEvicted]


async def test_a_step_whose_eviction_fails_while_it_is_committed_anew_is_held(
    scene: Scene, faults: FaultyTiers
) -> None:
    held, anew = await scene.held_up(faults["disk"])
    faults["disk"].fail("delete", TierUnavailable("no answer"), key=MANIFEST)
    evicting = await scene.evicting()
    held.release()
    await anew
    with pytest.raises(TierUnavailable):
        await evicting
    await scene.store.flush()
    assert await scene.is_held()


async def test_a_step_whose_eviction_is_cancelled_while_it_is_committed_anew_is_held(
    scene: Scene, faults: FaultyTiers
) -> None:
    held, anew = await scene.held_up(faults["disk"])
    evicting = await scene.evicting()
    evicting.cancel()
    await asyncio.wait([evicting])
    held.release()
    await anew
    assert await scene.is_held()
    assert scene.told() == [StepPromoted]


async def test_a_step_whose_old_commit_is_misread_while_it_is_committed_anew_is_held(
    scene: Scene, faults: FaultyTiers
) -> None:
    held, anew = await scene.held_up(faults["disk"])
    await scene.quarantine()
    held.release()
    await anew
    assert await scene.is_held()


@pytest.mark.parametrize("damaged", [False, True], ids=["held", "damaged"])
async def test_until_a_step_is_committed_anew_the_commit_before_it_stays_as_it_was(
    quiet: Scene, faults: FaultyTiers, damaged: bool
) -> None:
    """Also one that was misread: after a crash the medium may read it well, and RAM may be gone."""
    before = {path: path.read_bytes() for path in quiet.disk.glob("steps/*1-*/*")}
    assert len(before) == 2
    quiet.tier.packs.index.clear()  # so that its chunks are written anew, and its index differs
    held, anew = await quiet.held_up(faults["disk"], damaged=damaged)
    meanwhile = {path: path.read_bytes() for path in before}
    held.release()
    await anew
    assert meanwhile == before
    if not damaged:  # of one that was misread, it stays for the grace period
        assert len(list(quiet.disk.glob("steps/*1-*/btree*"))) == 1
    assert await quiet.is_held()


async def test_a_misread_step_that_cannot_be_committed_anew_stays_as_it_was(
    quiet: Scene, faults: FaultyTiers, tmp_path: Path
) -> None:
    """The medium may read it well the next time, and RAM may be gone by then."""
    before = {path: path.read_bytes() for path in quiet.disk.glob("steps/*1-*/*")}
    faults["disk"].fail("put", TierUnavailable("no answer"), key=MANIFEST)
    await quiet.quarantine()
    with pytest.raises(TierUnavailable):
        await quiet.copied(again=False)
    assert before.items() <= {path: path.read_bytes() for path in quiet.disk.glob("steps/*1-*/*")}.items()
    await quiet.store.collect()
    assert await quiet.is_held()


async def test_what_a_commit_uses_stays_that_failed_in_the_place_of_a_misread_one(
    scene: Scene, faults: FaultyTiers
) -> None:
    """It may have happened, and is misread still while packs are collected."""
    scene.tier.packs.index.clear()  # so that it has packs of its own
    faults["disk"].fail("get", Corrupt("misread"), key=MANIFEST, times=None)
    await scene.quarantine()
    faults["disk"].fail("put", TierUnavailable("its answer is lost"), key=MANIFEST, after=True)
    with pytest.raises(TierUnavailable, match="answer is lost"):
        await scene.copied(again=False)
    await asyncio.sleep(0.3)  # until it could be collected
    await scene.store.collect()
    faults["disk"].clear()
    await scene.store.collect()
    assert await scene.is_held()


async def test_a_commit_that_failed_in_the_place_of_a_stale_one_is_undone(scene: Scene, faults: FaultyTiers) -> None:
    """No look would find it again, and its packs go."""

    async def grow_stale() -> None:
        held = scene.tier.steps.held[scene.step]
        scene.tier.quarantine(scene.step, Stale("saved elsewhere since", held.btree_key, None))

    await scene.store._life.loop.call(grow_stale())
    faults["disk"].fail("put", TierUnavailable("its answer is lost"), key=MANIFEST, after=True)
    with pytest.raises(TierUnavailable, match="answer is lost"):
        await scene.copied(again=False)
    assert not scene.manifests


@pytest.mark.parametrize("put", [False, True], ids=["not put", "put"])
async def test_a_promotion_that_fails_while_its_deletion_is_looked_into_leaves_no_half_of_a_step(
    quiet: Scene, faults: FaultyTiers, put: bool
) -> None:
    """What it wrote is not forgotten with the deletion."""
    disk = faults["disk"]
    disk.fail("delete", TierUnavailable("its answer is lost"), key=MANIFEST, after=True)
    looking = disk.hold("stat", key=MANIFEST)
    with pytest.raises(TierUnavailable):
        await quiet.store.evict(1, "disk")
    await looking.reached()
    disk.fail("put", TierUnavailable("its answer is lost"), key=MANIFEST, after=put)
    putting = disk.hold("put", key=MANIFEST)
    promoting = asyncio.create_task(quiet.store.promote(1, "disk"))
    await putting.reached()
    looking.release()
    await asyncio.sleep(0.1)  # the look waits for its turn
    putting.release()
    with pytest.raises(TierUnavailable):
        await promoting
    async with asyncio.timeout(SOON):
        while quiet.tier.steps.damaged or quiet.tier.steps.indeterminate:
            await quiet.store.collect()
            await asyncio.sleep(0.05)
    assert await quiet.is_gone() or await quiet.is_held()


async def test_a_promotion_that_fails_does_not_delete_what_a_deletion_has_left(
    scene: Scene, faults: FaultyTiers
) -> None:
    """Promise 6: the deletion was not carried out, and then this was the last good copy."""
    disk = faults["disk"]
    disk.fail("delete", TierUnavailable("no answer"), key=MANIFEST)
    disk.fail("stat", TierUnavailable("no answer"), key=MANIFEST, times=None)
    with pytest.raises(TierUnavailable):
        await scene.store.evict(1, "disk")
    disk.fail("put", TierUnavailable("no answer"), key=MANIFEST)
    with pytest.raises(TierUnavailable):
        await scene.store.promote(1, "disk")
    assert scene.manifests


async def test_a_damaged_commit_that_cannot_be_replaced_is_not_said_to_be_repaired_and_is_no_good_copy(
    scene: Scene, faults: FaultyTiers
) -> None:
    (manifest,) = scene.manifests
    manifest.write_bytes(b"damaged")
    faults["disk"].fail("put", TierUnavailable("no answer"), key=MANIFEST)
    (found,) = await scene.store.verify(1, "disk", repair=True)
    assert not found.repaired
    assert "it could not be committed anew: no answer" in found.problem
    assert not scene.tier.steps.has_good(scene.step)
    (found,) = await scene.store.verify(1, "disk", repair=True)
    assert found.repaired
    assert scene.tier.steps.has_good(scene.step)
    assert await scene.is_held()


async def test_a_commit_that_reads_well_after_a_failed_repair_is_a_good_copy(scene: Scene, faults: FaultyTiers) -> None:
    """The new one came there, though its put failed: what depends on this copy is not held up."""
    (manifest,) = scene.manifests
    manifest.write_bytes(b"damaged")
    faults["disk"].fail("put", TierUnavailable("its answer is lost"), key=MANIFEST, after=True)
    (found,) = await scene.store.verify(1, "disk", repair=True)
    assert not found.repaired
    assert scene.tier.steps.has_good(scene.step)


async def test_a_step_is_not_committed_anew_once_a_deletion_of_it_may_come_late(
    quiet: Scene, faults: FaultyTiers
) -> None:
    """As of a promotion that began before: the manifest would go, and the copy would count."""
    faults["disk"].fail("delete", Overdue("no answer"), key=MANIFEST)

    async def commit_behind_a_deletion() -> None:
        index = await step_index.load(quiet.tier, quiet.step)
        with pytest.raises(Overdue):
            await commit_file.retract(quiet.tier, quiet.step)
        await commit_file.commit(quiet.tier, index.record, index.arrays)

    with pytest.raises(Conflict, match=r"tier 'disk': a deletion of step 1 .* may still be carried out"):
        await quiet.store._life.loop.call(commit_behind_a_deletion())


async def test_a_damaged_step_that_is_evicted_while_its_commit_is_read_again_is_told_once_to_be_gone(
    quiet: Scene, faults: FaultyTiers
) -> None:
    await quiet.quarantine()
    read = faults["disk"].hold("get", key=MANIFEST, after=True)
    verifying = asyncio.create_task(quiet.store.verify(1, "disk"))
    await read.reached()
    await quiet.store.evict(1, "disk")
    read.release()
    with pytest.raises(NotFound, match="left tier 'disk' while it was verified"):
        await verifying
    assert quiet.told() == [StepEvicted]


async def test_a_step_that_is_evicted_while_it_is_repaired_is_no_step_that_could_not_be_repaired(
    scene: Scene, faults: FaultyTiers, caplog: pytest.LogCaptureFixture
) -> None:
    verifying = await scene.evicted_while_repaired(faults["disk"], "disk")
    with pytest.raises(NotFound, match="left tier 'disk' while it was verified"):
        await verifying
    assert "could not be repaired" not in caplog.text


async def test_what_is_verified_on_other_tiers_is_told_though_the_step_leaves_one(
    scene: Scene, faults: FaultyTiers
) -> None:
    verifying = await scene.evicted_while_repaired(faults["disk"])
    assert [(found.tier, found.intact) for found in await verifying] == [("ram", True)]


async def test_a_commit_is_encoded_while_its_packs_are_written(
    scene: Scene, faults: FaultyTiers, monkeypatch: pytest.MonkeyPatch
) -> None:
    await scene.store.save(3, tree(3))
    encode_step, encoded = commit_file.encode_step, threading.Semaphore(0)

    def encode(*arguments: Any, **options: Any) -> Any:
        try:
            return encode_step(*arguments, **options)
        finally:
            encoded.release()

    monkeypatch.setattr(commit_file, "encode_step", encode)
    held = faults["disk"].hold("put", key="packs/*")
    promoting = asyncio.create_task(scene.store.promote(3, "disk"))
    await held.reached()
    assert await asyncio.to_thread(encoded.acquire, timeout=SOON)
    held.release()
    await promoting
    assert not encoded.acquire(blocking=False), "once was enough"
    assert all(found.intact for found in await scene.store.verify(3))


async def test_a_commit_that_cannot_be_encoded_fails_its_promotion_and_no_other(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    await scene.store.save(3, tree(3))

    def refuse(*_: Any, **__: Any) -> Any:
        raise Invalid("no such commit")

    with monkeypatch.context() as patched:
        patched.setattr(commit_file, "encode_step", refuse)
        with pytest.raises(Invalid, match="no such commit"):
            await scene.store.promote(3, "disk")
    assert await scene.store.where(3) == ("ram",)
    assert scene.store._life.engine.state.scratch.slab.used == 0
    await scene.store.promote(3, "disk")
    assert all(found.intact for found in await scene.store.verify(3))


@pytest.mark.parametrize("cancelled", [False, True], ids=["failed", "cancelled"])
async def test_a_commit_that_ended_otherwise_after_it_had_happened_leaves_no_manifest(
    scene: Scene, faults: FaultyTiers, cancelled: bool
) -> None:
    """As of a put whose answer was lost, and that was refused when it was repeated.

    The step counts as not held, and its packs as dead.
    """
    await scene.store.save(3, tree(3))
    manifest = "steps/*3-*/manifest.ocdbt"
    if cancelled:
        held = faults["disk"].hold("put", key=manifest, after=True)
        promoting = asyncio.create_task(scene.store.promote(3, "disk"))
        await held.reached()
        promoting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await promoting
        await scene.store.collect()
    else:
        faults["disk"].fail("put", Conflict("another writes"), key=manifest, after=True)
        with pytest.raises(Conflict):
            await scene.store.promote(3, "disk")
    assert not list(scene.disk.glob("steps/*3-*/manifest.ocdbt"))
    assert await scene.store.where(3) == ("ram",)
    await scene.store.promote(3, "disk")
    assert all(found.intact for found in await scene.store.verify(3))


@pytest.mark.parametrize("after", [False, True], ids=["before the put", "after it"])
async def test_a_collection_keeps_what_that_commit_of_a_step_needs_which_is_there(
    scene: Scene, faults: FaultyTiers, after: bool
) -> None:
    """A commit that failed may have happened, and a step that is held may be the one before it or that one."""
    scene.tier.packs.index.clear()  # so that its chunks are written anew
    faults["disk"].fail("put", TierUnavailable("by script"), key=MANIFEST, after=after)
    with pytest.raises(TierUnavailable):
        await scene.copied(again=True)
    async with asyncio.timeout(SOON):
        while len(list(scene.disk.glob("steps/*1-*/btree*"))) > 1 or len(list(scene.disk.glob("packs/*/*"))) > 2:
            await scene.store.collect()
    assert await scene.is_held()


async def test_a_collection_waits_for_a_commit_that_it_meets_and_takes_it_for_no_other_writers(
    scene: Scene, faults: FaultyTiers
) -> None:
    """As where an agent's trainer calls a save off, and gives the tier back before the agent's commit has ended."""
    await scene.store.save(3, tree(1))  # its chunks are on the disk
    state = scene.store._life.engine.state

    async def commit() -> None:
        index = await step_index.load(state.tier("ram"), state.find(3))
        await commit_file.commit(scene.tier, index.record, located(index.arrays, scene.tier.packs.index))

    put = faults["disk"].hold("put", key="steps/*3-*/manifest.ocdbt", after=True)
    committing = asyncio.create_task(scene.store._life.loop.call(commit()))
    await put.reached()
    collecting = asyncio.create_task(scene.store.collect())
    await asyncio.wait([collecting], timeout=0.5)  # longer than it takes, unless it waits
    put.release()
    await asyncio.gather(committing, collecting)
    assert await scene.store.where(3) == ("ram", "disk")


async def test_index_nodes_of_a_commit_that_may_come_late_stay_however_long_ago_they_were_put(
    shared_memory: Path, tmp_path: Path, faults: FaultyTiers
) -> None:
    """The put of a manifest may take longer than ``grace``; what it names then is older than that."""
    disk = folder(tmp_path / "disk", retain="all", promote="never")
    async with CheckpointStore.open(config({"ram": ram(shared_memory), "disk": disk}, grace=600)) as store:
        await store.save(1, tree(1))
        await store.promote(1, "disk")
        scene = Scene(store, tmp_path / "disk")
        scene.tier.steps.commits_come_late = True  # as on an object store
        (old,) = scene.disk.glob("steps/*/btree*")
        faults["disk"].fail("put", TierUnavailable("no answer"), key=MANIFEST)
        with pytest.raises(TierUnavailable):
            await scene.copied(again=True)
        (nodes,) = {*scene.disk.glob("steps/*/btree*")} - {old}
        os.utime(nodes, (1, 1))
        await store.collect()
        assert nodes.exists()


async def test_a_commit_that_failed_and_cannot_be_read_costs_its_step_and_no_collection(
    scene: Scene, faults: FaultyTiers
) -> None:
    faults["disk"].fail("put", TierUnavailable("by script"), key=MANIFEST)
    with pytest.raises(TierUnavailable):
        await scene.copied(again=True)
    (manifest,) = scene.manifests
    manifest.write_bytes(b"")
    collecting = scene.store._life.engine.collector.collect(scene.tier)
    await scene.store._life.loop.call(collecting)
    assert isinstance(scene.tier.steps.damaged[scene.step], Corrupt)


@pytest.mark.parametrize("changed", ["arrays", "name"])
async def test_a_commit_that_was_encoded_for_what_did_not_come_true_is_encoded_anew(scene: Scene, changed: str) -> None:
    tier = scene.tier

    async def commit_otherwise() -> tuple[StepIndex, StepIndex]:
        async with tier.packs.guard:  # or a collection could take the packs before the commit
            return await commit()

    async def commit() -> tuple[StepIndex, StepIndex]:
        index = await step_index.load(tier, scene.step)
        arrays, name = dict(index.arrays), scene.step.first_btree_key
        if changed == "arrays":
            key, array = next(iter(arrays.items()))
            arrays[key] = replace(array, chunks=[Chunk(chunk.digest[::-1], chunk.where) for chunk in array.chunks])
            await commit_file.retract(tier, scene.step)
        else:  # the step has that name by now
            assert tier.steps.held[scene.step].btree_key == name
            arrays = index.arrays
        encoded = await commit_file.encode(tier, index.record, arrays, name)
        await commit_file.commit(tier, index.record, index.arrays, encoded)
        manifest, nodes, key = await step_index.read(tier, scene.step)
        assert (key == name) is (changed == "arrays")
        return index, decode_step(manifest, nodes, key)

    meant, found = await scene.store._life.loop.call(commit_otherwise())
    assert found.arrays == meant.arrays
    assert await scene.is_held()


async def test_a_step_that_was_evicted_since_its_commit_was_misread_is_not_repaired(scene: Scene) -> None:
    await scene.store.evict(1, "disk")
    engine = scene.store._life.engine
    repairing = repair_index(engine.state, engine.admin._collector, scene.step, scene.tier, Corrupt("misread"))
    await scene.store._life.loop.call(repairing)
    assert await scene.is_gone()
    assert scene.step not in scene.tier.steps.damaged


async def test_a_step_in_ram_whose_damaged_commit_nobody_remembers_leaves_ram_when_it_is_repaired(
    quiet: Scene, shared_memory: Path
) -> None:
    """It could be read from there neither now nor later, and is no copy."""
    (manifest,) = (shared_memory / "of-test").glob(f"ram/*/{MANIFEST}")
    manifest.write_bytes(b"damaged")
    tier_of(quiet.store, "ram").steps.indexes.forget(quiet.step)
    (found,) = await quiet.store.verify(1, "ram", repair=True)
    assert (found.repaired, found.lost) == (False, ())
    assert not manifest.exists()
    assert await quiet.store.where(1) == ("disk",)
    assert_restored(await quiet.store.restore(1), tree(1))


async def test_a_step_that_becomes_the_last_good_copy_while_its_eviction_waits_stays(
    quiet: Scene, faults: FaultyTiers
) -> None:
    newer = quiet.store._life.engine.state.find(2)
    used = await quiet.store._life.loop.call(step_index.packs(quiet.tier, newer))
    quiet.tier.steps.indexes.forget(quiet.step)  # as after an opening that believed a catalog
    reading = faults["disk"].hold("get", key=MANIFEST)
    evicting = asyncio.create_task(quiet.store.evict(1, "disk"))
    await reading.reached()
    for pack in used:
        (quiet.disk / pack).unlink()
    collecting = asyncio.create_task(quiet.store.collect())
    await polled(lambda: newer in quiet.tier.steps.impaired)
    reading.release()
    with pytest.raises(Conflict, match="last good copy"):
        await evicting
    await collecting
    assert await quiet.store.where(1) == ("ram", "disk")


async def test_a_policy_does_not_take_out_what_somebody_takes_out_already(quiet: Scene, faults: FaultyTiers) -> None:
    deleting = faults["disk"].hold("delete", key=MANIFEST)
    evicting = await quiet.evicting()
    await deleting.reached()
    evictor = quiet.store._life.engine.admin._collector.evictor
    assert not await quiet.store._life.loop.call(evictor.try_evict(quiet.step, quiet.tier))
    deleting.release()
    await evicting
    assert await quiet.is_gone()


async def test_a_part_that_is_dropped_twice_at_a_time_frees_its_chunks_once(quiet: Scene) -> None:
    ram_tier = tier_of(quiet.store, "ram")
    evictor = quiet.store._life.engine.admin._collector.evictor
    await quiet.store.save(3, tree(1) | {"epoch": 3})  # with the chunks of step 1

    async def drop() -> None:
        await asyncio.gather(*(evictor.drop_part(quiet.step, ram_tier) for _ in range(2)))

    await quiet.store._life.loop.call(drop())
    assert await quiet.store.where(1) == ("disk",)
    assert slab_of(quiet.store).used == await bytes_of_listed_steps(quiet.store)


async def test_an_eviction_beside_a_collection_that_resolves_a_commit_leaves_no_index_nodes(
    quiet: Scene, faults: FaultyTiers
) -> None:
    faults["disk"].fail("put", TierUnavailable("no answer"), key=MANIFEST, after=True)
    with pytest.raises(TierUnavailable):
        await quiet.copied(again=True)
    nodes = quiet.disk / quiet.tier.steps.held[quiet.step].btree_key
    assert nodes.exists()
    deleting = faults["disk"].hold("delete", key=MANIFEST, after=True)
    evicting = await quiet.evicting()
    await deleting.reached()
    collecting = asyncio.create_task(quiet.store.collect())
    await asyncio.wait([collecting], timeout=0.5)
    deleting.release()
    await evicting
    await collecting
    assert not nodes.exists()
    assert await quiet.is_gone()


async def test_a_step_that_loses_its_packs_while_it_is_verified_is_no_good_copy(
    quiet: Scene, faults: FaultyTiers
) -> None:
    used = await quiet.store._life.loop.call(step_index.packs(quiet.tier, quiet.store._life.engine.state.find(2)))
    read = faults["disk"].hold("*", key="packs/*", after=True)
    verifying = asyncio.create_task(quiet.store.verify(2, "disk"))
    await read.reached()
    for pack in used:
        (quiet.disk / pack).unlink()
    await quiet.store.collect()
    read.release()
    (found,) = await verifying
    assert found.intact  # it was read before
    with pytest.raises(Conflict, match="last good copy"):
        await quiet.store.evict(1, "disk")


async def test_a_promotion_under_way_is_not_committed_once_another_writer_was_there_though_the_lease_is_back(
    quiet: Scene, faults: FaultyTiers
) -> None:
    await quiet.store.delete(2, force=True)
    state, writer = quiet.store._life.engine.state, faults["disk"]
    three = tree(1)
    three["params"]["w0"] = three["params"]["w0"] + 1  # and else the chunks of step 1
    await quiet.store.save(3, three)
    writing = writer.hold("put", key="packs/*")
    promoting = asyncio.create_task(quiet.store.promote(3, "disk"))
    try:
        await writing.reached()
        await taken_over(quiet.disk)  # which deletes step 1 and its pack
        quiet.store._life.loop.soon(lambda: state.report(quiet.tier, TierUnavailable("stale handle")))
        await polled(lambda: bool(quiet.tier.packs.guard._waiters))  # the lease is back, and the scan waits
    finally:
        writing.release()
    with pytest.raises(TierUnavailable, match="another one has been there"):
        await promoting
    await quiet.heard.first(TierRecovered)
    await quiet.store.promote(3, "disk")
    assert all(found.intact for found in await quiet.store.verify(3))
