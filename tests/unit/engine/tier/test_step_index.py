"""The index of a step that is read while the step is committed anew, or its tier scanned, is never the old one."""

from __future__ import annotations

import asyncio
import os
import shutil
from typing import Any

import pytest
from reliability.tiers import FaultyTiers
from support.commit_scene import Scene
from support.insight import flip, flip_chunk
from support.rescan import scan_again, scanned_again

from tieredckpt.engine.keeping.used_packs import packs_by_step
from tieredckpt.engine.repairing import repair


@pytest.mark.parametrize("read", ["manifest.ocdbt", "btree*"])
async def test_a_collection_that_reads_a_step_while_it_is_committed_anew_keeps_its_new_packs(
    scene: Scene, faults: FaultyTiers, caplog: pytest.LogCaptureFixture, read: str
) -> None:
    await flip_chunk(scene.store, "disk", 1, "params/w0")
    scene.tier.steps.indexes.forget(scene.step)  # as after an opening that believed a catalog
    reading = faults["disk"].hold("get", key=f"steps/*1-*/{read}", after=True)
    collecting = asyncio.create_task(scene.store.collect())
    await reading.reached()
    assert all(found.intact or found.repaired for found in await scene.store.verify(1, "disk", repair=True))
    reading.release()
    await collecting
    assert "cannot be read" not in caplog.text
    assert await scene.is_held()


async def test_an_index_that_a_verification_began_with_is_not_remembered_once_its_step_was_committed_anew(
    quiet: Scene, faults: FaultyTiers
) -> None:
    reading = faults["disk"].hold("*", key="packs/*")
    verifying = asyncio.create_task(quiet.store.verify(1, "disk"))
    await reading.reached()
    quiet.tier.packs.index.clear()  # so that its chunks are written to a new pack
    await quiet.copied(again=True)
    quiet.tier.steps.indexes.pop(quiet.step)  # as if those of many other steps were read since
    reading.release()
    await verifying
    await quiet.store.collect()
    assert await quiet.is_held()


async def test_what_is_read_of_a_step_while_its_tier_is_scanned_again_is_not_remembered(
    quiet: Scene, faults: FaultyTiers
) -> None:
    call = quiet.store._life.loop.call
    (place,) = quiet.disk.glob("steps/*1-*")
    shutil.copytree(place, quiet.disk.parent / "before")
    quiet.tier.packs.index.clear()  # so that its chunks are written to a new pack
    await quiet.copied(again=True)
    place.rename(quiet.disk.parent / "after")
    shutil.copytree(quiet.disk.parent / "before", place)
    await scan_again(quiet.store, quiet.tier)
    reading = faults["disk"].hold("get", key="steps/*1-*/btree*", after=True)
    asking = asyncio.create_task(call(packs_by_step(quiet.tier)))
    await reading.reached()
    async with scanned_again(quiet.store, quiet.tier, faults["disk"]):
        shutil.rmtree(place)  # for another writer has committed it anew
        (quiet.disk.parent / "after").rename(place)
        reading.release()
        await asking
    for pack in quiet.disk.glob("packs/*/*"):
        os.utime(pack, (1e9, 1e9))  # long ago, so that no grace keeps it
    await quiet.store.collect()
    assert await quiet.is_held()


async def test_a_step_that_is_asked_for_while_its_tier_is_scanned_again_is_found(
    quiet: Scene, faults: FaultyTiers, caplog: pytest.LogCaptureFixture
) -> None:
    call, disk = quiet.store._life.loop.call, faults["disk"]
    quiet.tier.steps.indexes.clear()
    quiet.tier.steps.indexes.packs.clear()
    reading = disk.hold("get", key="steps/*/manifest*", after=True)
    asking = asyncio.create_task(call(packs_by_step(quiet.tier)))
    await reading.reached()
    async with scanned_again(quiet.store, quiet.tier, disk):
        reading.release()
        assert quiet.step in await asking
    assert "cannot be read" not in caplog.text
    assert await quiet.is_held()


async def test_a_small_array_that_is_repaired_while_its_step_is_repacked_takes_no_chunk_from_it(
    quiet: Scene, faults: FaultyTiers
) -> None:
    call, tier = quiet.store._life.loop.call, quiet.tier
    await quiet.damage_index()
    reading, may_read = asyncio.Event(), asyncio.Event()
    read_good = repair._read_good

    async def slow(*arguments: Any) -> Any:
        reading.set()
        await may_read.wait()
        return await read_good(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(repair, "_read_good", slow)
        verifying = asyncio.create_task(quiet.store.verify(1, "disk", repair=True))
        await call(reading.wait())
        tier.packs.index.clear()  # so that its chunks are written to a new pack
        await quiet.copied(again=True)
        await quiet.store.collect()
        await call(_set(may_read))
        (found,) = await verifying
    assert found.repaired
    await quiet.store.collect()
    assert await quiet.is_held()


async def _set(event: asyncio.Event) -> None:
    event.set()


async def test_an_index_that_waits_for_its_repair_is_not_committed_once_its_step_was_committed_anew(
    quiet: Scene, faults: FaultyTiers
) -> None:
    quiet.tier.packs.index.clear()  # so that its chunks are written to a new pack
    writing = faults["disk"].hold("put", key="packs/*")
    anew = asyncio.create_task(quiet.copied(again=True))
    await writing.reached()
    (manifest,) = quiet.manifests
    flip(manifest, 20)
    works: list[asyncio.Task[Any]] = []
    for work in (quiet.store.collect(), quiet.store.verify(1, "disk", repair=True)):
        works.append(asyncio.create_task(work))
        await asyncio.wait(works, timeout=0.5)  # in this order behind the copy
    writing.release()
    await anew
    await asyncio.gather(*works)
    assert await quiet.is_held()
