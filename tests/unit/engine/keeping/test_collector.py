"""The collector deletes the packs and files that no step needs, and no others, whatever else is under way."""

from __future__ import annotations

import asyncio
import shutil
import threading
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from reliability.tiers import FaultyTiers
from support.collecting import (
    ARRAYS,
    GRACE,
    Place,
    a_sparse_pack,
    assert_restores,
    changed,
    opened,
    referenced,
    state,
    two_steps,
    two_steps_apart,
)
from support.insight import flip_chunk, index_of, tier_of
from support.scenes import CHUNK, SOON, Heard, config, crash, files_under, folder, pack_bytes

from tieredckpt import CheckpointStore
from tieredckpt.blobs.base import BlobInfo
from tieredckpt.blobs.posix.paths import new_temporary
from tieredckpt.engine.admin import Admin
from tieredckpt.engine.keeping.collector import Collected
from tieredckpt.engine.opening.connect import connect
from tieredckpt.engine.tier import commit_file, step_index, steps
from tieredckpt.engine.tier.tier import Tier
from tieredckpt.errors import Corrupt, NoSpace, TierUnavailable
from tieredckpt.events import StepPromoted, TierFailed, TierRecovered
from tieredckpt.format import layout
from tieredckpt.format.manifest import StepId
from tieredckpt.format.ocdbt import Extent
from tieredckpt.testing.faulty import Faulty


async def test_an_evicted_step_takes_its_packs_and_leaves_those_that_others_need(
    place: Place, disk: dict[str, Any]
) -> None:
    async with opened(place, disk) as store:
        trees = {1: state(), 2: changed(2, keeps=5), 3: changed(3)}
        sizes = []
        for step, tree in trees.items():
            await (await store.save(step, tree)).reached("disk")
            sizes.append(pack_bytes(place.disk))
        await store.evict(2, "disk")
        assert pack_bytes(place.disk) == sizes[0] + sizes[2] - sizes[1]
        assert set(files_under(place.disk)) == referenced(place.disk)
        await store.evict(1, "disk")
        assert pack_bytes(place.disk) == sizes[2] - sizes[1]
        assert set(files_under(place.disk)) == referenced(place.disk)
        assert await store.where(3) == ("ram", "disk")
    async with opened(place, disk) as store:
        await assert_restores(store, 3, trees[3])


async def test_a_pack_that_lost_its_own_step_lives_on_for_the_step_that_shares_it(
    place: Place, disk: dict[str, Any]
) -> None:
    async with opened(place, disk) as store:
        await (await store.save(1, state())).reached("disk")
        alone = pack_bytes(place.disk)
        await (await store.save(2, state() | {"seeds": [2]})).reached("disk")
        await store.evict(1, "disk")
        await store.collect()
        assert pack_bytes(place.disk) == alone
    async with opened(place, disk) as store:
        await assert_restores(store, 2, state() | {"seeds": [2]})


async def test_no_step_refers_to_a_pack_that_somebody_has_deleted_once_it_was_collected(
    place: Place, disk: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    async with opened(place, disk) as store:
        for step in (1, 2):
            await (await store.save(step, changed(step, keeps=5))).reached("disk")
        (lost,) = (await index_of(store, "disk", 1))["w0"].chunks
        assert isinstance(lost.where, Extent)
        (place.disk / lost.where.path).unlink()
        await store.collect()
        assert lost.where.path in caplog.text
        await (await store.save(3, changed(3, keeps=5))).reached("disk")
        await store.flush()  # the steps before come from RAM once more
        assert referenced(place.disk) <= set(files_under(place.disk))
        for step in (1, 2, 3):
            assert all(not found.problem for found in await store.verify(step))


async def test_packs_that_a_listing_leaves_out_are_not_taken_for_deleted(
    place: Place, disk: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """As the listing of a folder that a client of a network has in its cache."""

    class ListsLate(Faulty):
        async def list(self, prefix: str) -> AsyncIterator[BlobInfo]:
            async for info in super().list(prefix):
                if not info.key.startswith(layout.PACKS):
                    yield info

    async with opened(place, disk) as store:
        await two_steps(store)
        tier = tier_of(store, "disk")
        tier.blobs, known = ListsLate(tier.store), dict(tier.packs.sizes)
        await store.collect()
        assert tier.packs.sizes == known
        assert "are gone" not in caplog.text
        assert all(found.intact for found in await store.verify(1))


async def test_packs_of_a_place_that_is_not_mounted_are_not_taken_for_deleted(
    place: Place, disk: dict[str, Any]
) -> None:
    """Else all that was known of them would be forgotten, and written again once it is back."""
    async with opened(place, disk) as store:
        await (await store.save(1, changed(1))).reached("disk")
        known = {*tier_of(store, "disk").packs.sizes}
        place.disk.rename(place.disk.with_name("away"))
        (place.disk / "packs").mkdir(parents=True)
        with suppress(TierUnavailable):
            await store.collect()
        assert {*tier_of(store, "disk").packs.sizes} == known
        shutil.rmtree(place.disk)
        place.disk.with_name("away").rename(place.disk)


async def test_an_orphan_goes_after_the_grace_period_and_not_before(
    place: Place, disk: dict[str, Any], faults: FaultyTiers
) -> None:
    async with opened(place, disk | {"promote": "never"}) as store:
        await store.save(1, state())
        faults["disk"].fail("put", TierUnavailable("no answer"), key="*/manifest.ocdbt")
        with pytest.raises(TierUnavailable):
            await store.promote(1, "disk")
        left = pack_bytes(place.disk)
        assert left > ARRAYS * CHUNK
        found = {found.tier: found for found in await store.collect()}
        assert (found["disk"].packs, found["disk"].files, pack_bytes(place.disk)) == (0, 0, left)
        place.let_the_grace_pass()
        found = {found.tier: found for found in await store.collect()}
        assert (found["disk"].packs, found["disk"].nbytes) == (1, left)
        if disk["kind"] == "kvstore":  # which knows no times: what no step uses ages from when it was first seen
            place.let_the_grace_pass()
            await store.collect()
        assert set(files_under(place.disk)) == {layout.MARKER}
        # What was deleted is not relied on.
        await store.promote(1, "disk")
        assert all(found.intact for found in await store.verify(1))


async def test_an_orphan_of_a_dead_writer_goes_after_the_grace_period_and_not_before(
    place: Place, disk: dict[str, Any], faults: FaultyTiers
) -> None:
    store = await opened(place, disk)
    await (await store.save(1, state())).reached("disk")
    kept = set(files_under(place.disk))
    faults["disk"].fail("put", TierUnavailable("no answer"), key="*/manifest.ocdbt", times=None)
    with pytest.raises(TierUnavailable):
        await (await store.save(2, changed(2))).reached("disk")
    await crash(store)
    shutil.rmtree(place.root / "of-test" / "ram")
    left = set(files_under(place.disk)) - kept
    assert {Path(name).name.partition("-")[0].removesuffix(".pack") for name in left} >= {"btree"}
    assert any(name.startswith(layout.PACKS) for name in left)
    async with opened(place, disk) as store:
        await store.collect()
        assert set(files_under(place.disk)) == kept | left
        place.let_the_grace_pass()
        await store.collect()
        assert set(files_under(place.disk)) == kept
        await assert_restores(store, 1, state())


async def test_a_collection_beside_an_eviction_does_not_miss_the_step_that_leaves(
    place: Place, disk: dict[str, Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    deleted, go_on = threading.Event(), threading.Event()
    really = commit_file.delete_manifest

    async def delete_slowly(tier: Tier, step: StepId) -> None:
        await really(tier, step)
        deleted.set()
        await asyncio.to_thread(go_on.wait, SOON)

    async with opened(place, disk) as store:
        await two_steps(store)
        monkeypatch.setattr(commit_file, "delete_manifest", delete_slowly)
        evicting = asyncio.create_task(store.evict(1, "disk"))
        assert await asyncio.to_thread(deleted.wait, SOON)
        tier_of(store, "disk").steps.indexes.forget(StepId(1, 1))  # of many steps, not all are remembered
        try:
            await store.collect()
            assert not evicting.done()  # a collection does not read the step over and over until it has gone
        finally:
            go_on.set()
            await evicting
        assert "cannot be read" not in caplog.text
        assert await store.where(2) == ("ram", "disk")


async def test_packs_of_a_step_that_cannot_be_read_while_it_leaves_stay_until_it_has_left(
    place: Place, faults: FaultyTiers
) -> None:
    """Its deletion failed, and a step without bytes was held."""
    tiers = {name: folder(place.root / "of-test" / name, retain="all") for name in ("disk", "far")}
    async with CheckpointStore.open(config(tiers, grace=GRACE)) as store:
        await two_steps_apart(store)
    place.let_the_grace_pass()
    async with CheckpointStore.open(config(tiers, grace=GRACE)) as store:  # by catalogs, so that no index is known
        disk = faults["disk"]
        disk.fail("get", Corrupt("misread"), key="steps/*1-*/btree*", times=4)
        held = disk.hold("delete", key="steps/*1-*/manifest.ocdbt")
        evicting = asyncio.create_task(store.evict(1, "disk"))
        await held.reached()
        await store.collect()
        assert disk.struck["error", "get"] == 4
        evicting.cancel()
        await asyncio.wait([evicting])
        await store.collect()
        assert await store.where(1) == ("disk", "far")
        assert all(found.intact for found in await store.verify(1))


async def test_a_full_tier_evicts_nothing_while_a_step_that_cannot_be_read_leaves(
    place: Place, faults: FaultyTiers
) -> None:
    """Promise 6 apart, it was in vain: no pack goes meanwhile, and so all steps went that may go."""
    disk = folder(place.disk, retain="all", capacity=6 * ARRAYS * (CHUNK + 4096))
    async with opened(place, disk) as store:
        for step in range(1, 6):
            await (await store.save(step, changed(step))).reached("disk")
        await store.flush()
        tier, first = tier_of(store, "disk"), StepId(1, 1)
        tier.steps.indexes.forget(first)
        faults["disk"].fail("get", Corrupt("misread"), key="steps/*1-*/btree*", times=None)
        held = faults["disk"].hold("delete", key="steps/*1-*/manifest.ocdbt")
        evicting = asyncio.create_task(store.evict(1, "disk"))
        await held.reached()
        heard = Heard(store)
        for step in (6, 7):
            await store.save(step, changed(step))
        await heard.first(TierFailed, lambda event: event.tier == "disk")
        assert [step.step for step in tier.steps.held] == [1, 2, 3, 4, 5]
        held.release()
        await evicting
        await heard.first(StepPromoted, lambda event: (event.step, event.tier) == (7, "disk"))
        assert {4, 5} <= {step.step for step in tier.steps.held}


async def test_what_is_being_written_stays_however_far_ahead_the_clock_of_this_host_is(place: Place) -> None:
    """As the packs of another rank, whose step rank 0 does not know yet: they are as old as the tier's clock says."""
    async with opened(place, folder(place.disk, retain="all")) as store:
        await (await store.save(1, state())).reached("disk")
        being_written = place.disk / layout.pack_key("ab" * 16), place.disk / layout.part_key(2, 2, rank=1)
        for path in being_written:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(bytes(CHUNK))
        place.late = 24 * 3600.0
        await store.collect()
        assert all(path.exists() for path in being_written)


async def test_packs_of_a_damaged_step_stay_when_the_clock_is_set_on(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(place, folder(place.disk, retain="all")) as store:
        await (await store.save(1, state())).reached("disk")
        disk = tier_of(store, "disk")
        kept = set(disk.packs.sizes)
        (manifest,) = place.disk.glob("steps/*/manifest.ocdbt")
        manifest.write_bytes(b"no commit")
        disk.quarantine(StepId(1, 1), Corrupt("no commit"))
        ahead = time.time() + 24 * 3600.0
        monkeypatch.setattr(steps, "time", SimpleNamespace(time=lambda: ahead, monotonic=time.monotonic))
        await store.collect()
        assert kept
        assert set(disk.packs.sizes) == kept


async def test_a_pack_that_is_mostly_dead_is_rewritten_and_everything_restores(
    place: Place, disk: dict[str, Any]
) -> None:
    trees = {2: changed(2, keeps=1), 3: changed(3, keeps=1)}
    async with opened(place, disk) as store:
        await (await store.save(1, state())).reached("disk")
        for step, tree in trees.items():
            await (await store.save(step, tree)).reached("disk")
        await store.evict(1, "disk")
        before = pack_bytes(place.disk)
        found = {found.tier: found for found in await store.collect()}
        saved = before - pack_bytes(place.disk)
        assert saved > (ARRAYS - 2) * CHUNK
        assert (found["disk"].packs, found["disk"].nbytes) == (1, saved)
        assert set(files_under(place.disk)) == referenced(place.disk)
        again = {found.tier: found.packs for found in await store.collect()}
        assert again == {"ram": 0, "disk": 0}
        for step in trees:
            assert all(found.intact for found in await store.verify(step, "disk"))
    async with opened(place, disk) as store:
        for step, tree in trees.items():
            await assert_restores(store, step, tree)


async def test_no_index_is_read_again_for_sparse_packs_before_a_step_has_left(
    place: Place, disk: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Thousands of steps took a collection minutes, each `grace`."""
    loaded = []
    load = step_index.load

    async def counted(tier: Any, step: StepId) -> Any:
        loaded.append(step.step)
        return await load(tier, step)

    monkeypatch.setattr(step_index, "load", counted)
    async with opened(place, disk) as store:
        await (await store.save(1, state())).reached("disk")
        await store.collect()
        assert loaded
        await (await store.save(2, changed(2))).reached("disk")
        await (await store.save(3, changed(2, keeps=9))).reached("disk")
        loaded.clear()
        await store.collect()
        assert set(loaded) == {2, 3}
        loaded.clear()
        await store.collect()
        assert not loaded
        await store.evict(2, "disk")
        (collected,) = [each for each in await store.collect() if each.tier == "disk"]
        assert loaded
        assert collected.packs == 1
        for step, tree in (1, state()), (3, changed(2, keeps=9)):
            await assert_restores(store, step, tree)


async def test_a_pack_of_no_step_of_which_a_later_one_uses_little_is_sparse(place: Place, faults: FaultyTiers) -> None:
    """No step has left since the last collection, and the pack was there before."""
    async with opened(place, folder(place.disk, retain="all")) as store:
        heard = Heard(store)
        await (await store.save(1, state())).reached("disk")
        faults["disk"].fail("put", NoSpace("full"), key="steps/*", times=None)
        with pytest.raises(NoSpace):
            await (await store.save(2, changed(2))).reached("disk")
        await store.delete(2, force=True)
        faults["disk"].clear()
        await heard.first(TierRecovered)
        await store.collect()
        before = pack_bytes(place.disk)
        await (await store.save(3, changed(2, keeps=9))).reached("disk")
        assert pack_bytes(place.disk) < before + CHUNK  # it has taken the chunk that was there
        await store.collect()
        assert pack_bytes(place.disk) < before - 8 * CHUNK
        await assert_restores(store, 3, changed(2, keeps=9))


@pytest.mark.parametrize("why", ["repair", "collection"])
async def test_what_is_committed_anew_keeps_to_good_bytes_where_a_damaged_copy_is_known_too(
    place: Place, disk: dict[str, Any], why: str
) -> None:
    """A pack with a chunk that was repaired lives on for its other chunks, and its footer still lists that one."""
    async with opened(place, disk) as store:
        await (await store.save(1, state())).reached("disk")
        damaged = (await index_of(store, "disk", 1))["w3"].chunks[0]
        await flip_chunk(store, "disk", 1, "w3")
        await store.verify(1, "disk", repair=True)
        await (await store.save(2, changed(2, keeps=4))).reached("disk")
        # A new process may meet the packs in any order: let it be this one.
        assert isinstance(damaged.where, Extent)
        tier_of(store, "disk").packs.index[damaged.digest] = damaged.where
        if why == "repair":
            await flip_chunk(store, "disk", 2, "w7")
            await store.verify(2, "disk", repair=True)
        else:
            await store.evict(1, "disk")
            await store.collect()
        assert [found.problem for found in await store.verify(2, "disk")] == [""]


async def test_temporary_files_of_dead_writers_are_swept_and_those_of_live_ones_are_not(place: Place) -> None:
    tier = folder(place.disk)
    async with opened(place, tier) as store:
        await (await store.save(1, state())).reached("disk")
        kept = set(files_under(place.disk))
        pack = next(place.disk.glob("packs/*"))
        stale = [place.disk / new_temporary(), pack / new_temporary(), place.disk / "steps" / new_temporary()]
        for path in stale:
            path.write_bytes(b"half of a pack")
        place.let_the_grace_pass()
        (pack / new_temporary()).write_bytes(b"of a writer at work")
        found = {found.tier: found.files for found in await store.collect()}
        assert found == {"ram": 0, "disk": len(stale)}
        assert not any(path.exists() for path in stale)
        assert len(set(files_under(place.disk)) - kept) == 1


async def test_a_collection_waits_for_the_promotion_whose_packs_no_commit_names_yet(
    place: Place, disk: dict[str, Any], faults: FaultyTiers
) -> None:
    async with opened(place, disk) as store:
        await (await store.save(1, state())).reached("disk")
        held = faults["disk"].hold("put", key="*/manifest.ocdbt")
        checkpoint = await store.save(2, changed(2))
        await held.reached()
        place.let_the_grace_pass()
        collecting = asyncio.create_task(store.collect())
        await store.steps()  # the engine has taken the call up
        assert not collecting.done()
        held.release()
        await checkpoint.reached("disk")
        await collecting
        await store.evict(2, "ram")
        await assert_restores(store, 2, changed(2))


async def test_a_tier_that_reconnects_waits_for_the_collection_that_is_under_way(
    place: Place, disk: dict[str, Any], faults: FaultyTiers
) -> None:
    async with opened(place, disk) as store:
        for step, tree in {1: state(), 2: changed(2)}.items():
            await (await store.save(step, tree)).reached("disk")
    async with opened(place, disk) as store:
        tier, engine = tier_of(store, "disk"), store._life.engine
        known = set(tier.steps.held)
        reading = faults["disk"].hold("get", key="steps/*")
        scanning = faults["disk"].hold("list", key="steps*")
        collecting = asyncio.create_task(store._life.loop.call(engine.collector.collect(tier, orphans=False)))
        await reading.reached()
        connecting = asyncio.create_task(store._life.loop.call(connect(engine.state, tier)))
        begun = asyncio.create_task(scanning.reached())
        await asyncio.wait([begun], timeout=0.3)
        assert not begun.done()
        assert set(tier.steps.held) == known
        reading.release()
        assert (await collecting).packs == 0
        scanning.release()
        await connecting
        await begun
        assert set(tier.steps.held) == known
        await assert_restores(store, 2, changed(2))


async def test_a_collection_deletes_nothing_where_a_reconnect_failed_half_way(
    place: Place, disk: dict[str, Any], faults: FaultyTiers
) -> None:
    async with opened(place, disk) as store:
        await (await store.save(1, state())).reached("disk")
        place.let_the_grace_pass()
        before = set(files_under(place.disk))
        tier, engine = tier_of(store, "disk"), store._life.engine
        tier.marker = None  # as of a tier that comes back
        scanning = faults["disk"].hold("list", key="steps*")
        connecting = asyncio.create_task(store._life.loop.call(connect(engine.state, tier)))
        await scanning.reached()
        collecting = asyncio.create_task(store._life.loop.call(engine.collector.collect(tier)))
        await store.steps()  # the engine has taken the call up
        faults["disk"].fail("get", TierUnavailable("gone again"), times=None)
        scanning.release()
        with pytest.raises(TierUnavailable, match="gone again"):
            await connecting
        assert (await collecting).packs == 0
        assert set(files_under(place.disk)) == before
        faults["disk"].clear()
        await store._life.loop.call(connect(engine.state, tier))


async def test_a_tier_that_cannot_be_collected_keeps_no_other_from_it(place: Place, faults: FaultyTiers) -> None:
    async with opened(place, folder(place.disk), far=folder(place.far)) as store:
        await store.save(1, state())
        await store.flush()
        stray = place.far / new_temporary()
        stray.write_bytes(b"half of a pack")
        place.let_the_grace_pass()
        faults["disk"].fail("list", TierUnavailable("no answer"))
        with pytest.raises(TierUnavailable, match="no answer"):
            await store.collect()
        assert not stray.exists()


async def test_a_tier_that_is_full_is_collected_too_and_nothing_is_rewritten_there(
    place: Place, faults: FaultyTiers
) -> None:
    async with opened(place, folder(place.disk, retain="all")) as store:
        trees = await a_sparse_pack(store)
        stray = place.disk / new_temporary()
        stray.write_bytes(b"half of a pack")
        place.let_the_grace_pass()
        faults["disk"].fail("put", NoSpace("full"), times=None)
        await store.save(3, changed(3))
        with pytest.raises(NoSpace):
            await store.flush()
        refused = faults.struck["error", "put"]
        await store.collect()
        assert not stray.exists()
        assert faults.struck["error", "put"] == refused
        for step, tree in trees.items():
            assert all(found.intact for found in await store.verify(step, "disk"))
            await assert_restores(store, step, tree)


async def test_a_capacity_that_has_no_room_to_rewrite_packs_is_collected_all_the_same(place: Place) -> None:
    async with opened(place, folder(place.disk, retain="all")) as store:
        await two_steps(store)
        await store.evict(1, "disk")
        used = tier_of(store, "disk").used
    stray = place.disk / new_temporary()
    stray.write_bytes(b"half of a pack")
    async with opened(place, folder(place.disk, retain="all", capacity=used + CHUNK // 2)) as store:
        place.let_the_grace_pass()
        await store.collect()
        assert not stray.exists()
        await (await store.save(3, changed(2, keeps=1))).reached("disk")  # without a chunk that is not there


async def test_a_capacity_that_is_full_of_dead_bytes_takes_steps_again_once_it_is_collected(place: Place) -> None:
    one = folder(place.disk, retain={"kind": "last_n", "n": 1}, capacity=25 * (CHUNK + 4096))
    async with opened(place, one) as store:
        heard = Heard(store)
        await two_steps(store)
        checkpoint = await store.save(3, changed(3, keeps=1))
        with pytest.raises(NoSpace, match=r"'disk' has .* in use"):
            await store.flush()
        await store.collect()
        await heard.first(TierRecovered)
        await checkpoint.reached("disk")
        await assert_restores(store, 3, changed(3, keeps=1))


async def test_tidying_goes_on_after_a_failure_that_nobody_foresaw(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    again = threading.Event()
    bugs = [RuntimeError("a bug")]

    async def collect(_: Admin) -> list[Collected]:
        if bugs:
            raise bugs.pop()
        again.set()
        return []

    monkeypatch.setattr(Admin, "collect", collect)
    settings = config({"disk": folder(place.disk)}, grace=0.1, lease_ttl=0.05)
    async with CheckpointStore.open(settings):
        assert await asyncio.to_thread(again.wait, SOON)


async def test_a_step_that_is_being_evicted_is_read_from_another_tier(place: Place, faults: FaultyTiers) -> None:
    """A reader that came now would lose its packs."""
    async with opened(place, folder(place.disk, retain="all"), far=folder(place.far)) as store:
        await store.save(1, state())
        await store.flush()
        await store.evict(1, "ram")
        held = faults["disk"].hold("delete", key="steps/*")
        evicting = asyncio.create_task(store.evict(1, "disk"))
        await held.reached()
        found = await store.restore(1, resume=False)
        assert found is not None
        assert set(found.sources) == {"far"}
        held.release()
        await evicting
        assert await store.where(1) == ("far",)
