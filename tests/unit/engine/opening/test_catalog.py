"""A catalog saves reading what it has where the listing agrees; without it a store knows what it holds as well."""

from __future__ import annotations

import asyncio
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test
from reliability.life import slow_stores
from reliability.memory import MemoryBlobs, Objects
from reliability.tiers import FaultyTiers
from support.insight import flip, flip_chunk, tier_of
from support.limits import limit
from support.scenes import CHUNK, SOON, Heard, assert_restored, config, folder, new_shared_folder, ram

from tieredckpt import CheckpointStore
from tieredckpt.blobs.base import Survives
from tieredckpt.blobs.wrap import Metered
from tieredckpt.config import StoreConfig
from tieredckpt.engine.opening import catalog_read, catalog_write
from tieredckpt.engine.opening.upkeep import catalogue
from tieredckpt.engine.tier import commit_file, step_index
from tieredckpt.engine.tier.chunk_index import ChunkIndex
from tieredckpt.engine.tier.tier import Tier
from tieredckpt.errors import Conflict, Corrupt, NoSpace, NotFound, TieredCkptError, TierUnavailable
from tieredckpt.events import StepEvicted
from tieredckpt.format import layout
from tieredckpt.format.catalog import decode_catalog, encode_catalog
from tieredckpt.format.manifest import StepId, StepIndex
from tieredckpt.testing.faulty import Faulty


@pytest.fixture(autouse=True, scope="module")
def _everything_is_enough() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        limit(patch, catalog_entries=1)
        yield


def state(step: int) -> dict[str, Any]:
    """An array that is new with every step, and one that comes back every third."""
    new, old = (np.random.default_rng(seed).bytes(2 * CHUNK) for seed in (step, 1000 + step % 3))
    return {"new": np.frombuffer(new, np.uint8), "old": np.frombuffer(old, np.uint8), "step": step}


class Place:
    """A store of RAM, which ends with the store, and a directory."""

    def __init__(self, shared_memory: Path, disk: Path) -> None:
        self._ram, self.disk = ram(shared_memory, on_close="release"), disk

    def config(self, **settings: Any) -> StoreConfig:
        return config({"ram": self._ram, "disk": folder(self.disk, retain="all")}, **settings)

    def opened(self, *, read_only: bool = False, **settings: Any) -> CheckpointStore:
        return CheckpointStore.open(self.config(**settings), read_only=read_only)

    async def trained(self, *steps: int) -> None:
        """Save and close."""
        async with self.opened() as store:
            for step in steps:
                await (await store.save(step, state(step), metrics={"loss": step})).reached("disk")

    @property
    def catalogs(self) -> list[Path]:
        return sorted(self.disk.glob("catalogs/*"))

    def manifest(self, step: int) -> Path:
        return self.disk / layout.manifest_key(step, step)


@pytest.fixture
def place(shared_memory: Path, tmp_path: Path) -> Place:
    return Place(shared_memory, tmp_path / "disk")


def reads(store: CheckpointStore) -> tuple[int, int]:
    """How often whole files of the directory were read since it was opened, and parts of files."""
    blobs = tier_of(store, "disk").blobs
    assert isinstance(blobs, Metered)
    verbs = blobs.usage().verbs
    return verbs["get"].operations, verbs["get_into"].operations


def known(tier: Tier) -> dict[str, Any]:
    """What a store knows of a tier, wherever it read that."""
    extents: dict[bytes, set[Any]] = {digest: {at} for digest, at in tier.packs.index.items()}
    for digest, places in tier.packs.duplicates.items():
        extents.setdefault(digest, set()).update(places)
    steps = {
        step: (each.btree_key, each.record.saved_at, each.record.nbytes, each.record.metrics, each.record.line)
        for step, each in tier.steps.held.items()
    }
    return {
        "steps": steps,
        "damaged": set(tier.steps.damaged),
        "packs": dict(tier.packs.sizes),
        "index": dict(tier.steps.indexes.nbytes),
        "extents": extents,
    }


async def assert_all_there(store: CheckpointStore, *steps: int) -> None:
    assert [info.step for info in await store.steps()] == list(steps)
    for step in steps:
        assert_restored(await store.restore(step, resume=False), state(step))


async def test_a_long_history_is_opened_with_as_few_reads_as_a_short_one(place: Place) -> None:
    await place.trained(1, 2)
    async with place.opened() as store:
        few = reads(store)
    await place.trained(*range(3, 12))
    async with place.opened() as store:
        assert reads(store) == (few[0] + len(place.catalogs) - 1, 0)
        await assert_all_there(store, *range(1, 12))
        with pytest.raises(Conflict, match="saved before"):
            await store.save(11, state(11))
        await (await store.save(12, state(12))).reached("disk")
        await assert_all_there(store, *range(1, 13))


async def test_what_came_after_a_catalog_is_read_and_what_went_is_forgotten(place: Place) -> None:
    await place.trained(1, 2, 3)
    catalogs = {path: path.read_bytes() for path in place.catalogs}
    async with place.opened() as store:
        await (await store.save(4, state(4))).reached("disk")
        await store.evict(2, "disk")
    shutil.rmtree(place.disk / "catalogs")
    for path, data in catalogs.items():
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(data)
    async with place.opened() as store:
        await assert_all_there(store, 1, 3, 4)
        with pytest.raises(NotFound):
            await store.restore(2)


async def test_a_step_that_a_crash_left_without_its_commit_is_none_whatever_a_catalog_says(place: Place) -> None:
    await place.trained(1, 2, 3)
    place.manifest(2).unlink()
    async with place.opened(read_only=True) as store:
        await assert_all_there(store, 1, 3)


DAMAGE: dict[str, Callable[[Path], object]] = {
    "a bit": lambda path: flip(path, -100),
    "its end": lambda path: os.truncate(path, path.stat().st_size // 2),
    "all of it": lambda path: path.write_bytes(b""),
    "its kind": lambda path: path.write_bytes(b"{}"),
    "the file": Path.unlink,
}


@pytest.mark.parametrize("what", DAMAGE)
async def test_a_damaged_catalog_costs_time_alone_and_is_written_anew(
    place: Place, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    await place.trained(1, 2, 3)
    (before,) = place.catalogs
    DAMAGE[what](before)
    left = before.exists()
    async with place.opened() as store:
        assert ("a catalog is not used" in caplog.text) == left
        await assert_all_there(store, 1, 2, 3)
    (after,) = place.catalogs
    assert after != before
    caplog.clear()
    async with place.opened() as store:
        assert "a catalog" not in caplog.text
        await assert_all_there(store, 1, 2, 3)


@pytest.mark.parametrize("error", [TierUnavailable("Input/output error"), NotFound("a writer has replaced it")])
async def test_a_catalog_that_cannot_be_read_any_more_costs_time_alone_and_is_written_anew(
    place: Place, error: TieredCkptError, faults: FaultyTiers
) -> None:
    await place.trained(1, 2, 3)
    (before,) = place.catalogs

    def without_it(tier: str, faulty: Faulty) -> None:
        faulty.fail("get", error, key=f"catalogs/{before.name}", times=None)

    with faults.from_opening(without_it):
        async with place.opened() as store:
            await assert_all_there(store, 1, 2, 3)
    (after,) = place.catalogs
    assert after != before


async def test_the_catalog_of_another_store_is_not_believed(place: Place) -> None:
    await place.trained(1, 2)
    (catalog,) = place.catalogs
    other = replace(decode_catalog(catalog.read_bytes(), ""), store="00000000-0000-4000-8000-000000000000")
    catalog.write_bytes(encode_catalog(other))
    async with place.opened(read_only=True) as store:
        assert reads(store)[1] > 0
        await assert_all_there(store, 1, 2)


async def test_the_newest_step_is_read_whatever_a_catalog_says_of_it(place: Place) -> None:
    for newest in (1, 2, 3):
        await place.trained(newest)
        async with place.opened() as store:
            held = tier_of(store, "disk").steps.held
            assert {step.serial for step, each in held.items() if each.whole} == {newest}
            assert held[StepId(newest, newest)].record.provenance["process"] == str(os.getpid())


async def test_a_step_that_was_committed_anew_is_catalogued_anew(place: Place) -> None:
    async with place.opened() as store:
        for step in (1, 2, 3):
            await (await store.save(step, state(step))).reached("disk")
        await store._life.loop.call(catalogue(tier_of(store, "disk")))
        await flip_chunk(store, "disk", 1, "new")
        assert [each.repaired for each in await store.verify(1, "disk", repair=True)] == [True]
    async with place.opened() as store:
        assert reads(store)[1] == 0
        assert not tier_of(store, "disk").steps.held[StepId(1, 1)].whole
        assert_restored(await store.restore(1, resume=False), state(1))


async def test_chunks_that_lie_in_two_packs_are_known_in_both(place: Place) -> None:
    await place.trained(1, 2)
    async with place.opened(read_only=True) as store:
        (key,) = await store._life.loop.call(step_index.packs(tier_of(store, "disk"), StepId(1, 1)))
    again = place.disk / layout.pack_key("ab" * 16)
    again.parent.mkdir(exist_ok=True)
    shutil.copy(place.disk / key, again)
    async with place.opened() as store:
        before = known(tier_of(store, "disk"))
    async with place.opened(read_only=True) as store:
        assert reads(store)[1] == 0
        assert known(tier_of(store, "disk")) == before
        assert len(tier_of(store, "disk").packs.duplicates) == 4


async def test_a_commit_that_changed_since_is_read_and_not_believed(place: Place) -> None:
    await place.trained(1, 2, 3)
    flip(place.manifest(1), -1)
    async with place.opened() as store:
        (damaged,) = next(tier for tier in await store.tier_infos() if tier.name == "disk").damaged
        assert damaged.step == 1
        await assert_all_there(store, 2, 3)


async def test_a_pack_of_another_size_is_read_and_not_believed(place: Place, caplog: pytest.LogCaptureFixture) -> None:
    await place.trained(1, 2, 3)
    async with place.opened() as store:
        (key,) = await store._life.loop.call(step_index.packs(tier_of(store, "disk"), StepId(1, 1)))
        chunks = len(tier_of(store, "disk").packs.index)
    os.truncate(place.disk / key, 4096)
    async with place.opened() as store:
        assert f"pack {key} has no readable footer" in caplog.text
        assert len(tier_of(store, "disk").packs.index) < chunks
    caplog.clear()
    async with place.opened():
        assert f"pack {key} has no readable footer" in caplog.text  # as long as it is there


def rot(path: Path) -> None:
    """Change a byte silently, as a disk does."""
    before = path.stat()
    flip(path, -1)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


async def test_a_commit_that_rotted_unseen_is_found_out_when_it_is_read(place: Place) -> None:
    await place.trained(1, 2, 3)
    rot(place.manifest(2))
    async with place.opened() as store:
        with pytest.raises(Corrupt, match="step 2"):
            await store.restore(2)
        await assert_all_there(store, 1, 3)


async def test_a_commit_that_rotted_unseen_holds_up_no_collection(place: Place) -> None:
    await place.trained(1, 2, 3)
    rot(place.manifest(2))
    async with place.opened() as store:
        await store.collect()
        assert [info.step for info in await store.steps()] == [1, 3]
        await store.evict(1, "disk")
        await store.collect()
        await assert_all_there(store, 3)


async def test_a_scrub_reads_the_commits_that_a_catalog_has(place: Place) -> None:
    await place.trained(1, 2, 3)
    rot(place.manifest(2))
    async with place.opened() as store:
        assert [each.id.step for each in await store.scrub() if each.problem and each.id] == [2]


async def test_a_restore_takes_the_step_before_where_the_newest_ones_rotted_unseen(place: Place) -> None:
    await place.trained(1, 2, 3)
    rot(place.manifest(3))
    rot(place.manifest(2))
    async with place.opened() as store:
        restored = await store.restore()
        assert restored is not None
        assert restored.step == 1


async def test_a_reader_takes_what_a_catalog_has_and_writes_none(place: Place) -> None:
    await place.trained(1, 2)
    catalogs = {path: path.read_bytes() for path in place.catalogs}
    async with place.opened(read_only=True) as store:
        assert reads(store)[1] == 0
        await assert_all_there(store, 1, 2)
    assert {path: path.read_bytes() for path in place.catalogs} == catalogs
    shutil.rmtree(place.disk / "catalogs")
    async with place.opened(read_only=True) as store:
        await assert_all_there(store, 1, 2)
    assert place.catalogs == []


async def test_there_are_few_catalogs_written_a_few_times_and_none_of_what_has_gone(place: Place) -> None:
    written: dict[Path, int] = {}
    for step in range(1, 18):
        await place.trained(step)
        assert len(place.catalogs) <= 5
        written |= {path: path.stat().st_size for path in place.catalogs}
    size = sum(path.stat().st_size for path in place.catalogs)
    assert sum(written.values()) < 5 * size
    async with place.opened() as store:
        assert tier_of(store, "disk").steps.catalogued.nbytes == size
        for step in range(1, 15):
            await store.evict(step, "disk")
    assert sum(path.stat().st_size for path in place.catalogs) < size / 2
    async with place.opened() as store:
        assert reads(store)[1] == 0
        await assert_all_there(store, 15, 16, 17)


async def test_steps_with_more_metrics_than_one_catalog_may_have_are_divided_among_several(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(catalog_write, "_STEP_BYTES_EACH", 6 << 10)
    monkeypatch.setattr(catalog_read, "MAX_CATALOG", 16 << 10)
    steps = range(1, 9)
    async with place.opened() as store:
        for step in steps:
            metrics = {f"metric {number} of many": float(step) for number in range(100)}
            await (await store.save(step, state(step), metrics=metrics)).reached("disk")
            await store._life.loop.call(catalogue(tier_of(store, "disk")))
    assert len(place.catalogs) > 1
    async with place.opened() as store:
        assert sum(each.whole for each in tier_of(store, "disk").steps.held.values()) == 1  # the newest alone is read
        await assert_all_there(store, *steps)


@pytest.mark.usefixtures("faults")
async def test_a_tier_that_takes_no_catalog_loses_nothing(place: Place, faults: FaultyTiers) -> None:
    async with place.opened() as store:
        faults["disk"].fail("put", NoSpace("full"), key="catalogs/*", times=None)
        await (await store.save(1, state(1))).reached("disk")
    assert place.catalogs == []
    async with place.opened() as store:
        await assert_all_there(store, 1)


async def test_a_step_that_leaves_while_its_record_is_read_does_not_come_back(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    load_index = step_index.load

    async def leave(tier: Tier, step: StepId) -> StepIndex:
        index = await load_index(tier, step)
        if step.step == 1:
            await commit_file.retract(tier, step)
        return index

    await place.trained(1, 2, 3)
    monkeypatch.setattr(step_index, "load", leave)
    async with place.opened() as store:
        with pytest.raises(NotFound):
            await store.restore(1)
        await assert_all_there(store, 2, 3)


async def test_a_step_that_leaves_while_a_catalog_is_made_keeps_no_other_out_of_it(
    place: Place, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    list_chunks = ChunkIndex.listed
    begun, gone = threading.Event(), threading.Event()

    def wait(index: ChunkIndex, *arguments: Any) -> Any:
        begun.set()
        gone.wait(SOON)
        return list_chunks(index, *arguments)

    async with place.opened() as store:
        heard = Heard(store)
        for step in (1, 2):
            await (await store.save(step, state(step))).reached("disk")
        monkeypatch.setattr(ChunkIndex, "listed", wait)
        writing = asyncio.create_task(store._life.loop.call(catalogue(tier_of(store, "disk"))))
        assert await asyncio.to_thread(begun.wait, SOON)
        evicting = asyncio.create_task(store.evict(1, "disk"))
        await heard.first(StepEvicted)
        gone.set()
        await writing
        await evicting
        assert len(place.catalogs) == 1
    assert "unexpected failure" not in caplog.text
    async with place.opened() as store:
        await assert_all_there(store, 2)


async def test_where_a_store_tells_no_times_packs_are_believed_and_steps_are_read(shared_memory: Path) -> None:
    class Timeless(MemoryBlobs):
        async def list(self, prefix: str) -> Any:
            async for info in super().list(prefix):
                yield type(info)(info.key, info.size, 0.0)

        async def stat(self, key: str) -> Any:
            info = await super().stat(key)
            return type(info)(info.key, info.size, 0.0)

    objects = Objects()
    far = {"kind": "kvstore", "spec": "memory://", "survives": "node", "retries": 0, "retain": "all"}
    both = config({"ram": ram(shared_memory, on_close="release"), "disk": far})
    with slow_stores(lambda: Timeless(objects, pieces=None, survives=Survives.NODE)):
        async with CheckpointStore.open(both) as store:
            for step in (1, 2):
                await (await store.save(step, state(step))).reached("disk")
        assert any(key.startswith(layout.CATALOGS) for key in objects.data)
        async with CheckpointStore.open(both) as store:
            assert reads(store)[1] == 0
            assert all(each.whole for each in tier_of(store, "disk").steps.held.values())
            await assert_all_there(store, 1, 2)


async def test_bytes_that_a_catalog_lists_are_read_before_anything_refers_to_them(place: Place) -> None:
    await place.trained(*range(1, 9))
    async with place.opened() as store:
        await flip_chunk(store, "disk", 1, "new")  # of an old step, which is not asked
    async with place.opened() as store:
        await (await store.save(9, {"new": state(1)["new"]})).reached("disk")
        assert [each.problem for each in await store.verify(9)] == [""] * 2


class CatalogMachine(RuleBasedStateMachine):
    """A store is worked with and opened anew, with catalogs of any age: it knows what it would know without them."""

    def __init__(self) -> None:
        super().__init__()
        self._root = new_shared_folder()
        self.place = Place(self._root, self._root / "disk")
        self._older: list[dict[str, bytes]] = [{}]
        self.step = 0

    @initialize()
    def begin(self) -> None:
        self.open()

    def open(self) -> None:
        self.store = self.place.opened().sync()
        self.store.__enter__()

    def teardown(self) -> None:
        self.store.close()
        shutil.rmtree(self._root)

    @rule(count=st.integers(1, 3), back=st.booleans())
    def save(self, count: int, back: bool) -> None:
        if back:
            with suppress(NotFound):
                self.store.restore()
        for _ in range(count):
            self.step += 1
            self.store.save(self.step, state(self.step), metrics={"loss": self.step}).reached("disk")

    @rule(which=st.integers(0, 9))
    def evict(self, which: int) -> None:
        steps = self.store.steps()
        if steps:
            with suppress(Conflict, NotFound):
                self.store.evict(steps[which % len(steps)].step, "disk")

    @rule()
    def collect(self) -> None:
        self.store.collect()

    @rule(which=st.integers(0, 9), bring_back=st.booleans())
    def reopen(self, which: int, bring_back: bool) -> None:
        self.store.close()
        self._older.append({path.name: path.read_bytes() for path in self.place.catalogs})
        if bring_back:  # as from a backup
            shutil.rmtree(self.place.disk / "catalogs", ignore_errors=True)
            (self.place.disk / "catalogs").mkdir(exist_ok=True, parents=True)
            for name, data in self._older[which % len(self._older)].items():
                (self.place.disk / "catalogs" / name).write_bytes(data)
        found = self._known(self.place)
        bare = Place(self._root / "bare-ram", self._root / "bare")
        shutil.copytree(self.place.disk, bare.disk)  # with the times of change
        shutil.rmtree(bare.disk / "catalogs", ignore_errors=True)
        assert found == self._known(bare)
        shutil.rmtree(bare.disk)
        self.open()

    @staticmethod
    def _known(place: Place) -> dict[str, Any]:
        with place.opened(read_only=True).sync() as store:
            return known(tier_of(store._store, "disk"))


def test_whatever_catalogs_there_are_a_store_knows_what_it_would_know_without_them() -> None:
    run_state_machine_as_test(CatalogMachine, settings=settings(max_examples=8, stateful_step_count=12))
