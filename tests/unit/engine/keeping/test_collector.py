"""What no step needs goes, what a step needs stays, and a crash at any point of either costs nothing."""

from __future__ import annotations

import asyncio
import os
import shutil
import threading
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from reliability.tiers import FaultyTiers
from support.insight import flip_chunk, index_of, tier_of
from support.limits import limit
from support.scenes import (
    CHUNK,
    SOON,
    Heard,
    assert_restored,
    config,
    crash,
    files_below,
    files_under,
    folder,
    pack_bytes,
    ram,
)

from tieredckpt import CheckpointStore
from tieredckpt.blobs.base import BlobStore
from tieredckpt.blobs.posix.paths import new_temporary
from tieredckpt.engine.admin import Admin
from tieredckpt.engine.keeping import collector
from tieredckpt.engine.keeping.collector import Collected
from tieredckpt.engine.keeping.used_packs import packs_by_step
from tieredckpt.engine.opening.connect import connect
from tieredckpt.engine.opening.scan import look_again
from tieredckpt.engine.tier import commit_file, step_index, steps
from tieredckpt.engine.tier.index_cache import unique_extents
from tieredckpt.engine.tier.tier import Tier
from tieredckpt.errors import Corrupt, NoSpace, TieredCkptError, TierUnavailable
from tieredckpt.events import TierRecovered
from tieredckpt.format import layout, ocdbt
from tieredckpt.format.manifest import StepId, decode_step
from tieredckpt.format.ocdbt import Extent
from tieredckpt.testing.faulty import Faulty

GRACE = 3600.0
ARRAYS = 10


def state(**seeds: int) -> dict[str, Any]:
    """Ten arrays of a chunk each, and one in the index; those that are named differ by their seeds."""
    arrays = {f"w{i}": seeds.get(f"w{i}", i) for i in range(ARRAYS)}
    found = {key: np.random.default_rng(seed).integers(0, 255, CHUNK, dtype=np.uint8) for key, seed in arrays.items()}
    return found | {"small": np.arange(7.0), "seeds": sorted(arrays.values())}


def changed(seed: int, *, keeps: int = 0) -> dict[str, Any]:
    """A state of which the first ``keeps`` arrays are as ever."""
    return state(**{f"w{i}": 100 * seed + i for i in range(keeps, ARRAYS)})


def referenced(root: Path) -> set[str]:
    """Every file that a committed step of a tier needs, read from the files themselves."""
    needed = {layout.MARKER}
    for manifest in root.glob("steps/*/manifest.ocdbt"):
        data = manifest.read_bytes()
        btree = ocdbt.read_root(data).path
        index = decode_step(data, (root / btree).read_bytes(), btree)
        needed |= {manifest.relative_to(root).as_posix(), btree}
        needed |= {extent.path for extent in unique_extents(index.arrays).values()}
    return needed


class Place:
    """The folders of a test, and the passing of time over what lies there."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root = root
        self.disk = root / "of-test" / "disk"
        self.far = root / "of-test" / "far"
        self.late = 0.0
        real = time.time
        monkeypatch.setattr(time, "time", lambda: real() + self.late)
        passed = SimpleNamespace(time=time.time, monotonic=lambda: time.monotonic() + self.late)
        for module in (collector, steps):
            monkeypatch.setattr(module, "time", passed)

    def let_the_grace_pass(self) -> None:
        """Two hours pass, for the collector and for every file but leases, which are renewed."""
        self.late += 2 * GRACE
        for path in (path for path in files_below(self.root) if path.parent.name != "leases"):
            with suppress(FileNotFoundError):
                then = path.stat().st_mtime - 2 * GRACE
                os.utime(path, (then, then))


@pytest.fixture
def place(shared_memory: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    return Place(shared_memory, monkeypatch)


@pytest.fixture(params=["posix", "kvstore"])
def disk(request: pytest.FixtureRequest, place: Place) -> dict[str, Any]:
    """The slower tier, retaining everything, on one of two kinds of store."""
    if request.param == "posix":
        return folder(place.disk, retain="all")
    spec = {"driver": "file", "path": f"{place.disk}/"}
    return {"kind": "kvstore", "spec": spec, "retries": 0, "retain": "all"}


def opened(place: Place, disk: dict[str, Any], **more: Any) -> CheckpointStore:
    return CheckpointStore.open(config({"ram": ram(place.root), "disk": disk, **more}, grace=GRACE))


async def assert_restores(store: CheckpointStore, step: int, tree: Any) -> None:
    assert_restored(await store.restore(step, resume=False), tree)


# -- packs ------------------------------------------------------------------------------------------------


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
    place: Place, disk: dict[str, Any], monkeypatch: pytest.MonkeyPatch
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
        finally:
            go_on.set()
            await evicting
        assert await store.where(2) == ("ram", "disk")


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
        assert found["disk"].packs == 1
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


async def test_what_was_freed_is_told_less_what_was_written_anew(place: Place, disk: dict[str, Any]) -> None:
    async with opened(place, disk) as store:
        await (await store.save(1, state())).reached("disk")
        await (await store.save(2, changed(2, keeps=1))).reached("disk")
        await store.evict(1, "disk")
        before = pack_bytes(place.disk)
        found = {found.tier: found for found in await store.collect()}
        assert found["disk"].nbytes == before - pack_bytes(place.disk)


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
        surveying = faults["disk"].hold("list", key="steps*")
        collecting = asyncio.create_task(store._life.loop.call(engine.collector.collect(tier, orphans=False)))
        await reading.reached()
        connecting = asyncio.create_task(store._life.loop.call(connect(engine.state, tier)))
        begun = asyncio.create_task(surveying.reached())
        await asyncio.wait([begun], timeout=0.3)
        assert not begun.done()
        assert set(tier.steps.held) == known
        reading.release()
        assert (await collecting).packs == 0
        surveying.release()
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
        surveying = faults["disk"].hold("list", key="steps*")
        connecting = asyncio.create_task(store._life.loop.call(connect(engine.state, tier)))
        await surveying.reached()
        collecting = asyncio.create_task(store._life.loop.call(engine.collector.collect(tier)))
        await store.steps()  # the engine has taken the call up
        faults["disk"].fail("get", TierUnavailable("gone again"), times=None)
        surveying.release()
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


# -- a crash at every point -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Act:
    """Something that changes a tier: what is there before, and how it is done."""

    prepare: Callable[[CheckpointStore], Awaitable[dict[int, Any]]]
    """Saves steps; the trees of all that are committed on the disk afterwards."""
    run: Callable[[CheckpointStore], Awaitable[object]]
    leaves: frozenset[int] = frozenset()
    """Steps that need not be on the disk afterwards."""


async def two_steps(store: CheckpointStore) -> dict[int, Any]:
    trees = {1: state(), 2: changed(2, keeps=1)}
    for step, tree in trees.items():
        await (await store.save(step, tree)).reached("disk")
    await store.flush()
    return trees


async def promote_the_third(store: CheckpointStore) -> None:
    await (await store.save(3, changed(3, keeps=2))).reached("disk")


async def two_steps_apart(store: CheckpointStore) -> dict[int, Any]:
    trees = {1: state(), 2: changed(2)}
    for step, tree in trees.items():
        await (await store.save(step, tree)).reached("disk")
    await store.flush()
    return trees


async def evict_the_first(store: CheckpointStore) -> None:
    await store.evict(1, "disk")


async def a_sparse_pack(store: CheckpointStore) -> dict[int, Any]:
    trees = await two_steps(store)
    await store.evict(1, "disk")
    return {2: trees[2]}


async def collect(store: CheckpointStore) -> None:
    await store.collect()


async def a_damaged_step(store: CheckpointStore) -> dict[int, Any]:
    trees = await two_steps(store)
    for key in ("w3", "w7"):
        await flip_chunk(store, "disk", 2, key)
    return trees


async def repair(store: CheckpointStore) -> None:
    results = await store.verify(2, "disk", repair=True)
    assert all(found.intact for found in results)


ACTS = {
    "promotion": Act(two_steps, promote_the_third),
    "eviction": Act(two_steps_apart, evict_the_first, frozenset({1})),
    "collection": Act(a_sparse_pack, collect),
    "repair": Act(a_damaged_step, repair),
}


@pytest.mark.parametrize("ends", ["crash", "crash without RAM", "comes back", "comes back, an answer was lost"])
@pytest.mark.parametrize("name", ACTS)
async def test_a_device_that_dies_at_any_point_costs_no_step_and_leaves_no_litter(
    place: Place, faults: FaultyTiers, name: str, ends: str
) -> None:
    """All calls from the n-th on fail, for every n, until the act gets by without noticing."""
    act = ACTS[name]
    far = {"far": folder(place.far, retain="all")}
    for n in range(1, 500):
        for left in (place.root / "of-test").glob("*"):
            shutil.rmtree(left)
        store = await opened(place, folder(place.disk, retain="all"), **far)
        heard = Heard(store)
        trees = await act.prepare(store)
        # The leases stay out of it: a crashed process gives up its own.
        lost = ends == "comes back, an answer was lost"
        faults["disk"].fail("*", TierUnavailable("it died"), key="[!l]*", nth=n, after=lost, times=None)
        if lost:
            faults["disk"].fail("*", TierUnavailable("it died"), key="[!l]*", nth=n + 1, times=None)
        calls = len(faults["disk"].calls)
        with suppress(TieredCkptError, AssertionError):
            await act.run(store)
        made = [call for call in faults["disk"].calls[calls:] if not call.key.startswith(layout.LEASES)]
        got_by = len(made) < n
        if ends.startswith("comes back"):
            faults["disk"].clear()
            if not all(tier.healthy for tier in await store.tier_infos()):
                await heard.first(TierRecovered)
        else:
            await crash(store)
            if ends == "crash without RAM":
                shutil.rmtree(place.root / "of-test" / "ram")
            store = await opened(place, folder(place.disk, retain="all"), **far)
        try:
            if not ends.startswith("comes back"):  # a step is there whole or not at all
                assert not any(info.damaged for info in await store.steps()), n
            await assert_sound(store, place, trees, act, n)
        finally:
            await store.close()
        if got_by:
            assert n > 3
            return
    pytest.fail("it never got by")


async def assert_sound(store: CheckpointStore, place: Place, trees: dict[int, Any], act: Act, n: int) -> None:
    for step, tree in trees.items():
        await assert_restores(store, step, tree)
    await store.flush()
    where = {info.step: info.tiers for info in await store.steps()}
    for step, tree in trees.items():
        assert step in act.leaves or "disk" in where[step], (n, step, where)
        for found in await store.verify(step, repair=True):
            assert found.intact, (n, found)
        await assert_restores(store, step, tree)
    await (await store.save(9, changed(9, keeps=3))).reached("disk")
    await store.flush()
    place.let_the_grace_pass()
    await store.collect()
    assert set(files_under(place.disk)) == referenced(place.disk), n
    for info in await store.steps():
        for found in await store.verify(info.step):
            assert found.intact, (n, found)
    await assert_restores(store, 9, changed(9, keeps=3))


async def test_the_packs_of_a_step_stay_whose_commit_could_not_be_read_once(
    tmp_path: Path, faults: FaultyTiers, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = tmp_path / "disk"
    settings = config({"disk": folder(disk, retain="all")}, grace=GRACE)
    async with CheckpointStore.open(settings) as store:
        for step in (1, 2, 3):
            await store.save(step, changed(step))
    for path in disk.glob("packs/*/*"):
        os.utime(path, (time.time() - 2 * GRACE,) * 2)
    wrap = faults.wrap

    def lying_twice(name: str, blobs: BlobStore) -> Faulty:
        faulty = wrap(name, blobs)
        faulty.flip("get", 100, key="steps/0000000002-*/manifest.ocdbt", times=2)
        return faulty

    monkeypatch.setattr(faults, "wrap", lying_twice)
    async with CheckpointStore.open(settings) as store:
        assert [info.step for info in await store.steps()] == [1, 3]
        await store.collect()
        assert_restored(await store.restore(2, resume=False), changed(2))


@pytest.mark.parametrize(("owner", "call"), [(step_index, "load"), (Tier, "now")], ids=["indexes", "time"])
async def test_the_packs_of_a_step_stay_that_is_read_well_beside_the_collection(
    place: Place,
    disk: dict[str, Any],
    faults: FaultyTiers,
    monkeypatch: pytest.MonkeyPatch,
    owner: Any,
    call: str,
) -> None:
    """A medium fails now and then: for hours, and not when a verification asks while the collection waits for it."""
    really = getattr(owner, call)

    async def after_a_verification(tier: Tier, *more: Any) -> Any:
        if StepId(1, 1) in tier.steps.damaged:
            faults["disk"].clear()
            await look_again(tier, StepId(1, 1))
        return await really(tier, *more)

    async with opened(place, disk) as store:
        await two_steps_apart(store)
        tier = tier_of(store, "disk")
        tier.quarantine(StepId(1, 1), Corrupt("no commit"))
        stray = place.disk / layout.btree_key(7, 7)
        stray.parent.mkdir()
        stray.touch()  # whose age is looked up
        place.let_the_grace_pass()
        faults["disk"].flip("get", 100, key="steps/0000000001-*/manifest.ocdbt", times=None)
        tier.steps.indexes.forget(StepId(2, 2))  # which is looked up, too
        monkeypatch.setattr(owner, call, after_a_verification)
        await store._life.loop.call(store._life.engine.collector.collect(tier))
        assert StepId(1, 1) in tier.steps.held
        assert all(found.intact for found in await store.verify(1, "disk"))


async def test_a_step_that_is_read_well_while_others_are_looked_up_counts_with_its_packs(
    place: Place, disk: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the lookup itself had found it damaged."""
    really = step_index.load

    async def load(tier: Tier, step: StepId) -> Any:
        if step == StepId(1, 1) and step not in seen:
            seen.add(step)
            raise Corrupt("bytes that came wrong just once")
        if StepId(1, 1) in tier.steps.damaged:
            await look_again(tier, StepId(1, 1))
        return await really(tier, step)

    async with opened(place, disk) as store:
        await two_steps_apart(store)
        tier, seen = tier_of(store, "disk"), set[StepId]()
        for step in tuple(tier.steps.held):
            tier.steps.indexes.forget(step)
        monkeypatch.setattr(step_index, "load", load)
        used = await store._life.loop.call(packs_by_step(tier))
        assert used.keys() == tier.steps.held.keys() == {StepId(1, 1), StepId(2, 2)}


async def a_late_commit(place: Place, disk: dict[str, Any], step: int) -> tuple[Path, bytes]:
    """A step whose writer is taken for dead before its manifest arrives: the file, and what is to come there."""
    async with opened(place, disk) as store:
        await (await store.save(step, changed(step, keeps=3))).reached("disk")
    (manifest,) = place.disk.glob(f"steps/{step:010d}-*/manifest.ocdbt")
    content = manifest.read_bytes()
    manifest.unlink()
    return manifest, content


@pytest.mark.parametrize("readable", [True, False], ids=["whole", "torn"])
async def test_a_step_that_another_writer_commits_late_is_no_leftover(
    place: Place, disk: dict[str, Any], readable: bool
) -> None:
    async with opened(place, disk) as store:
        await (await store.save(1, state())).reached("disk")
    manifest, content = await a_late_commit(place, disk, 7)
    async with opened(place, disk) as store:
        heard = Heard(store)
        await (await store.save(2, changed(2))).reached("disk")
        manifest.write_bytes(content if readable else content[:-1])
        place.let_the_grace_pass()
        with pytest.raises(TierUnavailable, match="another writer has committed step 7"):
            await store.collect()
        await heard.first(TierRecovered)
        for _ in range(2):  # where a store tells no times, what is unknown ages from when it was first seen
            place.let_the_grace_pass()
            await store.collect()
        assert manifest.exists()
        assert await store.where(2) == ("ram", "disk")
        if readable:
            assert await store.where(7) == ("disk",)
            await assert_restores(store, 7, changed(7, keeps=3))
            assert all(found.intact for found in await store.verify(7))
            await store.save(8, changed(8))
            assert len({info.serial for info in await store.steps() if info.step in (7, 8)}) == 2


async def test_a_commit_of_a_step_that_was_evicted_here_is_collected_when_it_comes_late(
    place: Place, disk: dict[str, Any]
) -> None:
    """A put that was repeated may be carried out once more after the step has left."""
    async with opened(place, disk) as store:
        for step in (1, 2):
            await (await store.save(step, changed(step))).reached("disk")
        (manifest,) = place.disk.glob("steps/0000000001-*/manifest.ocdbt")
        content = manifest.read_bytes()
        await store.evict(1, "disk")
        manifest.parent.mkdir(exist_ok=True)
        manifest.write_bytes(content)
        for _ in range(2):
            place.let_the_grace_pass()
            await store.collect()
        assert not manifest.exists()
        assert await store.where(1) == ("ram",)


@pytest.mark.parametrize("lost", ["btree", "*"], ids=["index", "index and manifest"])
async def test_a_full_tier_takes_newer_steps_though_files_of_an_older_one_were_deleted(
    shared_memory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lost: str
) -> None:
    limit(monkeypatch, unreadable_commit=0.0)
    disk = folder(tmp_path / "disk", capacity="780 KiB", retain="all")
    settings = config({"ram": ram(shared_memory), "disk": disk})
    async with CheckpointStore.open(settings) as store:
        for step in (1, 2, 3):
            await store.save(step, changed(step))
            await store.flush()
    async with CheckpointStore.open(settings) as store:
        for file in (tmp_path / "disk/steps").glob(f"*1-*/{lost}"):
            file.unlink()
        for step in (4, 5):
            await store.save(step, changed(step))
            await store.flush()
            assert "disk" in await store.where(step)


async def test_a_tier_without_its_marker_is_no_tier_that_has_lost_a_step(shared_memory: Path, tmp_path: Path) -> None:
    settings = config({"ram": ram(shared_memory), "disk": folder(tmp_path / "disk")})
    async with CheckpointStore.open(settings) as store:
        for step in (1, 2):
            await store.save(step, changed(step))
            await store.flush()
    async with CheckpointStore.open(settings) as store:
        lost = [tmp_path / "disk" / layout.MARKER, *(tmp_path / "disk/steps").glob("*1-*/btree")]
        for file in lost:
            file.rename(tmp_path / file.name)
        with pytest.raises(TierUnavailable, match=r"tier 'disk' has lost its marker and step 1 .*; is it mounted"):
            await packs_by_step(tier_of(store, "disk"))
        for file in lost:
            (tmp_path / file.name).rename(file)
        assert await store.where(1) == ("disk",)
