"""No new commit refers to bytes that a crash may have torn or that are known twice, once damaged."""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from reliability.journal import Journal, Made, Put
from reliability.life import slow_stores
from reliability.memory import MemoryBlobs, Objects
from support.cohort import cohort
from support.insight import index_of
from support.limits import limit
from support.scenes import CHUNK, assert_restored, config, crash, ram, save_steps, tree

from tieredckpt import CheckpointStore
from tieredckpt.blobs.base import Survives
from tieredckpt.engine.promoting import dedupe
from tieredckpt.errors import TierUnavailable
from tieredckpt.format import layout
from tieredckpt.format.ocdbt import Extent


@pytest.fixture
def objects() -> Objects:
    return Objects()


@pytest.fixture(params=[None, 64 << 10], ids=["whole objects", "pieces"])
def slow(request: pytest.FixtureRequest, objects: Objects) -> Iterator[None]:
    """The slower tier is in memory, and puts whole objects or pieces."""
    with slow_stores(lambda: MemoryBlobs(objects, pieces=request.param, survives=Survives.NODE)):
        yield


@pytest.fixture
def in_pieces(objects: Objects) -> Iterator[None]:
    with slow_stores(lambda: MemoryBlobs(objects, pieces=64 << 10, survives=Survives.NODE)):
        yield


def opened(shared_memory: Path, codec: str = "none", **settings: Any) -> CheckpointStore:
    far = {"kind": "kvstore", "spec": "memory://", "survives": "node", "retries": 0, "retain": "all", "codec": codec}
    return CheckpointStore.open(config({"ram": ram(shared_memory), "far": far}, **settings))


def packs(objects: Objects) -> list[str]:
    return [key for key in objects.data if key.startswith(layout.PACKS)]


async def place_of(store: CheckpointStore, step: int, key: str, ordinal: int = 0) -> Extent:
    where = (await index_of(store, "far", step))[key].chunks[ordinal].where
    assert isinstance(where, Extent)
    return where


async def repaired(store: CheckpointStore, objects: Objects) -> Extent:
    """Where a chunk of step 1 lay until it was damaged, and repaired in another place."""
    damaged = await place_of(store, 1, "params/w0")
    objects.data[damaged.path][damaged.offset] ^= 1
    (found,) = await store.verify(1, "far", repair=True)
    assert found.repaired
    return damaged


async def unexpected(*_: Any) -> None:
    pytest.fail("a chunk was read")


async def assert_intact(store: CheckpointStore) -> None:
    for info in await store.steps():
        assert [found.problem for found in await store.verify(info.step)] == [""] * len(info.tiers)


async def test_a_pack_whose_footer_came_before_its_chunks_lends_none(
    shared_memory: Path, objects: Objects, in_pieces: None
) -> None:
    store = await opened(shared_memory)
    await save_steps(store, 1)
    await crash(store)
    (pack,) = packs(objects)
    # As a crash between the pieces of its put leaves it: the step was never committed.
    objects.data[pack][:CHUNK] = bytes(CHUNK)
    for key in [key for key in objects.data if key.startswith(layout.STEPS)]:
        del objects.data[key]
    async with opened(shared_memory) as store:
        await store.flush()
        assert await store.where(1) == ("ram", "far")
        await assert_intact(store)


async def test_of_several_ranks_too_such_a_pack_lends_none(
    shared_memory: Path, objects: Objects, in_pieces: None
) -> None:
    far = {"kind": "kvstore", "spec": "memory://", "survives": "node", "retries": 0}
    tiers = {"ram": ram(shared_memory, on_close="keep"), "far": far}
    async with cohort(2, shared_memory, shared_memory, tiers=tiers, crashing=True) as ranks:
        await ranks.reached(await ranks.save(1), "far")
    for pack in packs(objects):
        objects.data[pack][:CHUNK] = bytes(CHUNK)
    for key in [key for key in objects.data if key.startswith(layout.STEPS)]:
        del objects.data[key]
    async with cohort(2, shared_memory, shared_memory, tiers=tiers) as ranks:
        await ranks.flush()
        assert await ranks[0].where(1) == ("ram", "far")
        (found,) = await ranks[0].verify(1, "far")
        assert not found.problem


@pytest.mark.parametrize("first", [sorted, lambda keys: sorted(keys, reverse=True)], ids=["one way", "the other"])
async def test_of_two_copies_of_a_repaired_chunk_the_next_process_refers_to_the_good_one(
    shared_memory: Path,
    objects: Objects,
    slow: None,
    monkeypatch: pytest.MonkeyPatch,
    first: Callable[[list[str]], list[str]],
) -> None:
    store = await opened(shared_memory)
    await save_steps(store, 1)
    damaged = await repaired(store, objects)
    assert (await place_of(store, 1, "params/w0")).path != damaged.path
    assert damaged.path in packs(objects), "its other chunks are in use"
    await crash(store)
    for key in first(packs(objects)):  # what is listed first
        objects.data[key] = objects.data.pop(key)
    async with opened(shared_memory) as store:
        await store.save(2, tree(1) | {"epoch": 2})
        await store.flush()
        assert (await place_of(store, 2, "params/w0")).path != damaged.path
        await assert_intact(store)
        monkeypatch.setattr(dedupe, "read_chunk", unexpected)  # as each is read once
        await store.save(3, tree(1) | {"epoch": 3})
        await store.flush()
        assert "far" in await store.where(3)


async def test_a_damaged_copy_that_outlived_the_good_one_is_not_referred_to(
    shared_memory: Path, objects: Objects, slow: None
) -> None:
    """The repaired step is evicted, and a crash comes when of the packs that go only the good one has gone."""
    store = await opened(shared_memory)
    await save_steps(store, 1)
    await repaired(store, objects)
    good = await place_of(store, 1, "params/w0")
    await crash(store)
    for key in [key for key in objects.data if key.startswith(layout.STEPS)] + [good.path]:
        del objects.data[key]
    async with opened(shared_memory) as store:
        await store.flush()
        assert await store.where(1) == ("ram", "far")
        await assert_intact(store)


async def test_what_a_committed_step_refers_to_is_not_read_to_be_referred_to_again(
    shared_memory: Path, objects: Objects, slow: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(shared_memory) as store:
        await save_steps(store, 1)
    monkeypatch.setattr(dedupe, "read_chunk", unexpected)
    async with opened(shared_memory) as store:
        await store.save(2, tree(1) | {"epoch": 2})
        await store.flush()
        assert "far" in await store.where(2)
        assert len(packs(objects)) == 1


async def test_a_pack_that_another_writer_has_deleted_lends_none(
    shared_memory: Path, objects: Objects, slow: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit(monkeypatch, steps_asked=0)  # or they would vouch for it
    async with opened(shared_memory) as store:
        await save_steps(store, 1)
    async with opened(shared_memory) as store:
        (pack,) = packs(objects)
        del objects.data[pack]
        await store.save(2, tree(1))
        await store.flush()
        (found,) = await store.verify(2, "far")
        assert not found.problem


@pytest.mark.parametrize("torn", [True, False], ids=["torn", "gone"])
@pytest.mark.parametrize("codec", ["none", "small"])
@pytest.mark.usefixtures("slow")
async def test_a_step_whose_index_is_lost_keeps_no_newer_one_from_the_tier(
    shared_memory: Path, objects: Objects, torn: bool, codec: str
) -> None:
    async with opened(shared_memory, codec) as store:
        await save_steps(store, 1)
    async with opened(shared_memory, codec) as store:
        for key in [key for key in objects.data if "/btree" in key]:
            if torn:
                objects.data[key] = objects.data[key][:-1]
            else:
                del objects.data[key]
        await store.save(2, tree(1))
        await store.flush()
        assert await store.where(2) == ("ram", "far")
        (found,) = await store.verify(2, "far")
        assert not found.problem


async def test_a_step_that_is_committed_anew_brings_no_damaged_copy_back(
    shared_memory: Path, objects: Objects, slow: None
) -> None:
    """Two steps share a chunk, one of them was repaired; the other is rewritten for another pack's sake."""
    others = tree(2)["params"]
    async with opened(shared_memory, repack_below=0.5) as store:
        for step, more in ((1, {}), (2, {"other": others}), (3, {"other": {"w0": others["w0"]}})):
            await store.save(step, tree(1) | more)
            await store.flush()
        await store.evict(2, "far")
        damaged = await repaired(store, objects)
        assert await place_of(store, 3, "params/w0") == damaged
        sparse = await place_of(store, 3, "other/w0")
        await store.collect()
        assert await place_of(store, 3, "other/w0") != sparse
        await store.save(4, tree(1) | {"epoch": 4})
        await store.flush()
        for step in (3, 4):
            (found,) = await store.verify(step, "far")
            assert not found.problem


async def test_a_marker_that_the_first_crash_has_torn_is_written_anew(
    shared_memory: Path, objects: Objects, in_pieces: None
) -> None:
    objects.data[layout.MARKER] = bytearray(b'{"sto')
    objects.modified[layout.MARKER] = 0.0
    async with opened(shared_memory) as store:
        assert await store.restore() is None
        await (await store.save(1, tree(1))).reached("far")
    shutil.rmtree(shared_memory / "of-test")
    async with opened(shared_memory) as store:
        assert [info.tiers for info in await store.steps()] == [("far",)]


async def test_a_damaged_marker_beside_steps_is_no_new_store(
    shared_memory: Path, objects: Objects, in_pieces: None
) -> None:
    async with opened(shared_memory) as store:
        await save_steps(store, 1)
    del objects.data[layout.MARKER][5:]
    shutil.rmtree(shared_memory / "of-test", ignore_errors=True)
    async with opened(shared_memory) as store:
        with suppress(TierUnavailable):  # a store that says that it cannot be read will do
            assert_restored(await store.restore(), tree(1))


async def test_a_commit_that_takes_the_place_of_a_longer_one_is_never_half_there(
    shared_memory: Path, objects: Objects, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where nothing is renamed, the old manifest or the new one is there at every moment of a repair."""
    journal = Journal()
    names = iter(["0123456789abcdef" * 3])
    token_hex = secrets.token_hex
    monkeypatch.setattr(secrets, "token_hex", lambda n: next(names, token_hex(n)) if n == 4 else token_hex(n))
    with slow_stores(lambda: MemoryBlobs(objects, pieces=64 << 10, survives=Survives.NODE, journal=journal)):
        async with opened(shared_memory) as store:
            await save_steps(store, 1)
            for _ in range(2):  # the second name of the nodes, which the manifest holds, is the shorter one
                where = await place_of(store, 1, "params/w0")
                objects.data[where.path][where.offset] ^= 1
                (found,) = await store.verify(1, "far", repair=True)
                assert found.repaired
            await assert_intact(store)
    changes = [entry for entry in journal.entries if getattr(entry, "path", "").endswith("manifest.ocdbt")]
    assert [type(change) for change in changes] == [Made, Put, Put]
