"""Restores from a store that digests what it reads: every byte once, straight to where it goes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from reliability.tiers import FaultyTiers
from support.insight import flip_chunk, tier_of
from support.limits import limit
from support.overdue import only_held_calls_are_late
from support.scenes import CHUNK, Heard, assert_restored, config, files_below, folder, ram, tree

from tieredckpt import CheckpointStore, Shard
from tieredckpt.blobs.base import GetDigested, Stretch
from tieredckpt.engine.restoring import reader
from tieredckpt.engine.restoring.pieces import NOTHING, Piece
from tieredckpt.engine.scratch import Scratch
from tieredckpt.errors import NotFound
from tieredckpt.events import ChunkRepaired
from tieredckpt.format.encoding import CRC32C
from tieredckpt.format.manifest import Chunk
from tieredckpt.format.ocdbt import Extent

RUN = 4 * CHUNK


class Watching:
    """Notes what is read of a tier's packs, and how much of it is under way at most."""

    def __init__(self, store: CheckpointStore, patch: pytest.MonkeyPatch, tier: str = "disk") -> None:
        self.read: list[tuple[str, int, int]] = []
        self.under_way = self.most = 0
        self.most_scratch = 0
        self._scratch: Scratch = store._life.engine.state.scratch
        blobs = tier_of(store, tier).store
        assert isinstance(blobs, GetDigested)
        self._get_digested = blobs.get_digested
        self.digested_reads = blobs.traits.digested_reads
        patch.setattr(blobs, "get_digested", self.get_digested)

    async def get_digested(self, key: str, stretches: Sequence[Stretch]) -> Sequence[bytes]:
        self.read += ((key, stretch.offset, stretch.nbytes) for stretch in stretches)
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        self.most_scratch = max(self.most_scratch, self._scratch.slab.used)
        try:
            return await self._get_digested(key, stretches)
        finally:
            self.under_way -= 1

    def assert_nothing_was_read_twice(self) -> None:
        ends: dict[str, int] = {}
        for key, offset, nbytes in sorted(self.read):
            assert offset >= ends.get(key, 0)
            ends[key] = offset + nbytes


async def restored(saved: dict[str, Any], path: Path, patch: pytest.MonkeyPatch, **settings: Any) -> Watching:
    """Save a tree on a disk and restore it; what was read for that."""
    async with CheckpointStore.open(config({"disk": folder(path / "disk", **settings)})) as store:
        await store.save(1, saved)
        watching = Watching(store, patch)
        found = await store.restore()
    assert_restored(found, saved)
    return watching


@pytest.mark.parametrize("failure", ["hangs", "is damaged"])
async def test_what_the_nearest_tier_does_not_deliver_is_read_from_the_next_as_fast_as_that_can(
    tmp_path: Path, faults: FaultyTiers, monkeypatch: pytest.MonkeyPatch, failure: str
) -> None:
    """Neighbours together, several runs at a time, and nothing of it twice."""
    limit(monkeypatch, read_run=RUN)
    only_held_calls_are_late(monkeypatch)
    saved = tree(1, arrays=20)
    settings = config({name: folder(tmp_path / name, retries=100) for name in ("near", "far")})
    async with CheckpointStore.open(settings) as store:
        await (await store.save(1, saved)).reached("far")
        if failure == "hangs":
            faults["near"].hold("get_into", key="packs/*", times=None)
        else:
            faults["near"].fail("get_into", NotFound("gone"), key="packs/*", times=None)
        faults["far"].delay("get_into", 0.05, times=None)
        watching = Watching(store, monkeypatch, "far")
        before = len(faults["far"].calls)
        found = await store.restore()
        asked = sum(call.verb == "get_into" for call in faults["far"].calls[before:])
        faults["near"].clear()
    assert_restored(found, saved)
    assert found.sources["far"] > 20 * 2 * CHUNK
    watching.assert_nothing_was_read_twice()
    assert 1 < watching.most <= watching.digested_reads
    assert asked <= len(watching.read) // 2  # runs, not chunks


async def test_a_copy_that_has_left_hides_no_intact_one_behind_it(
    shared_memory: Path, tmp_path: Path, faults: FaultyTiers
) -> None:
    saved = tree(1)
    slower = {name: folder(tmp_path / name) for name in ("near", "far")}
    async with CheckpointStore.open(config({"ram": ram(shared_memory), **slower})) as store:
        await (await store.save(1, saved)).reached("far")
        (manifest,) = (path for path in files_below(shared_memory) if path.name == "manifest.ocdbt")
        manifest.unlink()  # as another process does that evicts it
        faults["near"].fail("get_into", NotFound("gone"), key="packs/*", times=None)
        found = await store.restore(1)
        faults["near"].clear()
    assert_restored(found, saved)
    assert "far" in found.sources


async def test_every_byte_is_read_once_and_straight_to_where_it_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit(monkeypatch, read_run=RUN)
    saved = tree(arrays=20)
    watching = await restored(saved, tmp_path, monkeypatch, direct=None)
    watching.assert_nothing_was_read_twice()
    assert 1 < watching.most <= watching.digested_reads
    assert watching.most_scratch == 0
    assert sum(nbytes for _, _, nbytes in watching.read) >= 20 * 3 * CHUNK


async def test_a_chunk_that_is_wanted_in_several_places_is_read_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = {
        "zeros": np.zeros(5 * CHUNK, np.uint8),
        "fewer": np.zeros(2 * CHUNK - 100, np.uint8),  # its last chunk is filled up
        "other": np.arange(CHUNK, dtype=np.uint8),
    }
    watching = await restored(saved, tmp_path, monkeypatch)
    watching.assert_nothing_was_read_twice()


async def test_few_runs_are_in_memory_where_boxes_are_wanted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limit(monkeypatch, read_run=RUN)
    whole = np.random.default_rng(0).random((512, 512))
    async with CheckpointStore.open(config({"disk": folder(tmp_path / "disk")}, chunk_size=CHUNK)) as store:
        await store.save(1, {"w": whole})
        watching = Watching(store, monkeypatch)
        right = np.zeros((512, 200))
        restored = await store.restore(into={"w": Shard(right, shape=(512, 512), offset=(0, 312))})
    assert restored is not None
    np.testing.assert_array_equal(right, whole[:, 312:])
    watching.assert_nothing_was_read_twice()
    assert 0 < watching.most_scratch <= reader._SCRATCH_RUNS * RUN


async def test_large_chunks_are_read_few_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or each would share the bandwidth of a slow tier with so many others that its deadline passes."""
    limit(monkeypatch, reads_under_way=2 * CHUNK, read_run=CHUNK)
    saved = tree(arrays=20)
    watching = await restored(saved, tmp_path, monkeypatch)
    assert watching.most == 2


@pytest.mark.parametrize("content", ["random", "zeros"])
async def test_of_a_pack_that_ends_too_soon_is_read_what_is_there(tmp_path: Path, content: str) -> None:
    array = bytes(6 * CHUNK) if content == "zeros" else np.random.default_rng(0).bytes(6 * CHUNK)
    saved = {"a": np.frombuffer(array, np.uint8), "b": np.random.default_rng(1).random(CHUNK)}
    async with CheckpointStore.open(
        config({"disk": folder(tmp_path / "disk"), "far": folder(tmp_path / "far")})
    ) as store:
        await (await store.save(1, saved)).reached("far")
        for pack in (tmp_path / "disk" / "packs").rglob("*.pack"):
            with pack.open("r+b") as file:
                file.truncate(pack.stat().st_size // 2)
        restored = await store.restore()
    assert_restored(restored, saved)
    assert set(restored.sources) == {"disk", "far"}


@pytest.mark.parametrize("content", ["random", "zeros"])
async def test_a_damaged_chunk_comes_from_another_tier_and_those_beside_it_from_this_one(
    tmp_path: Path, content: str
) -> None:
    array = np.zeros(6 * CHUNK, np.uint8) if content == "zeros" else np.random.default_rng(0).bytes(6 * CHUNK)
    saved = {"a": np.frombuffer(array, np.uint8), "b": np.arange(3 * CHUNK, dtype=np.uint8)}
    tiers = {"disk": folder(tmp_path / "disk"), "far": folder(tmp_path / "far")}
    async with CheckpointStore.open(config(tiers)) as store:
        checkpoint = await store.save(1, saved)
        await checkpoint.reached("far")
        await flip_chunk(store, "disk", 1, "a", 1)
        restored = await store.restore()
    assert_restored(restored, saved)
    assert set(restored.sources) == {"disk", "far"}


@pytest.mark.parametrize("codec", ["none", "small"])
@pytest.mark.parametrize("read_only", [False, True])
async def test_bytes_that_came_wrong_once_are_read_again_before_their_array_counts_as_lost(
    tmp_path: Path, faults: FaultyTiers, codec: str, read_only: bool
) -> None:
    settings = config({"disk": folder(tmp_path / "disk", codec=codec)})
    async with CheckpointStore.open(settings) as store:
        await (await store.save(1, tree(1))).reached("disk")
    async with CheckpointStore.open(settings, read_only=read_only) as store:
        faults["disk"].flip("get_into", 7, key="packs/*")
        assert_restored(await store.restore(), tree(1))
        for found in await store.verify(1):
            assert found.intact


async def test_bytes_that_came_wrong_once_do_not_count_as_damage(
    tmp_path: Path, faults: FaultyTiers, caplog: pytest.LogCaptureFixture
) -> None:
    """The step counted as no good copy, and its array was told to be lost."""
    settings = config({"disk": folder(tmp_path / "disk")})
    async with CheckpointStore.open(settings) as store:
        await (await store.save(1, tree(1))).reached("disk")
    async with CheckpointStore.open(settings) as store:
        heard = Heard(store)
        faults["disk"].flip("get_into", 7, key="packs/*")
        assert_restored(await store.restore(), tree(1))
        await store.flush()
        assert not heard.of(ChunkRepaired)
        assert not tier_of(store, "disk").steps.impaired
        assert not any("could not be repaired" in record.getMessage() for record in caplog.records)


@pytest.mark.parametrize("codec", ["none", "small"])
async def test_bytes_that_a_verification_gets_wrong_once_are_not_told_as_lost(
    tmp_path: Path, faults: FaultyTiers, codec: str
) -> None:
    """The copy may be the only one; it is written anew, for where it lies may give wrong bytes again."""
    settings = config({"disk": folder(tmp_path / "disk", codec=codec)})
    async with CheckpointStore.open(settings) as store:
        await (await store.save(1, tree(1))).reached("disk")
    async with CheckpointStore.open(settings) as store:
        faults["disk"].flip("get_into", 7, key="packs/*")
        (found,) = await store.verify(1, repair=True)
        assert found.damaged
        assert found.repaired
        assert not found.lost
        assert not tier_of(store, "disk").steps.impaired
        assert all(each.intact for each in await store.verify(1))
        assert_restored(await store.restore(), tree(1))


def test_extents_that_overlap_are_read_one_after_the_other() -> None:
    """As a crafted index may have them; a store reads no byte for two stretches."""

    def piece(offset: int, nbytes: int, digest: bytes) -> Piece:
        return Piece("key", 0, nbytes, Chunk(digest, Extent("pack", offset, nbytes + 4)), NOTHING)

    same = [piece(0, 4096, b"a"), piece(0, 4096, b"a")]
    assert [len(run.pieces) for run in reader._runs([*same, piece(4096, 4096, b"b")], CRC32C)] == [3]
    assert [len(run.pieces) for run in reader._runs([piece(0, 8192, b"a"), piece(4096, 4096, b"b")], CRC32C)] == [1, 1]
    assert [len(run.pieces) for run in reader._runs([piece(0, 4096, b"a"), piece(0, 4096, b"b")], CRC32C)] == [1, 1]
    assert [len(run.pieces) for run in reader._runs([piece(0, 4096, b"a"), piece(0, 8192, b"a")], CRC32C)] == [1, 1]
