"""A step saved in pieces comes back in any others, item for item, and no more of it is read than that takes."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import tensorstore as ts
from hypothesis import given, settings
from hypothesis import strategies as st
from support.cuts import boxes_between
from support.insight import flip_chunk, index_of, tier_of
from support.scenes import CHUNK, Heard, config, folder, ram
from support.trees import arrays, indexed

from tieredckpt import CheckpointStore, Shard, Sharded
from tieredckpt.config import StoreConfig
from tieredckpt.errors import Corrupt, Invalid
from tieredckpt.events import ChunkRepaired, StepPromoted, StepSaved
from tieredckpt.format.boxes import Box
from tieredckpt.format.joining import join
from tieredckpt.format.layout import block_key
from tieredckpt.sync import SyncStore
from tieredckpt.testing.faulty import Faulty
from tieredckpt.tree import flatten

Array = np.ndarray[Any, Any]
Boxes = list[Box]


@pytest.fixture(scope="module")
def blocking(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SyncStore]:
    """A store that saves one step after the other, with chunks that small arrays have several of."""
    disk = folder(tmp_path_factory.mktemp("layouts") / "disk", retain="all")
    with CheckpointStore.open(config({"disk": disk}, chunk_size=4096)).sync() as store:
        yield store


@pytest.fixture
def two_tiers(shared_memory: Path, tmp_path: Path) -> StoreConfig:
    return config({"ram": ram(shared_memory, retain="all"), "disk": folder(tmp_path / "disk")}, chunk_size=4096)


def cut_at(shape: tuple[int, ...], bounds: list[list[int]]) -> Boxes:
    """The mesh of boxes between the bounds of every axis."""
    return boxes_between([[0, *sorted(axis), full] for axis, full in zip(bounds, shape, strict=True)])


@st.composite
def meshes(draw: st.DrawFn, shape: tuple[int, ...]) -> Boxes:
    """Even, as ``torch.chunk`` cuts, or anywhere; shards without items are among them."""
    bounds = []
    for full in shape:
        parts = draw(st.integers(1, 5))
        size = -(-full // parts)
        even = [min(i * size, full) for i in range(1, parts)]
        bounds.append(draw(st.one_of(st.just(even), st.lists(st.integers(0, full), max_size=3))))
    return cut_at(shape, bounds)


@st.composite
def irregular(draw: st.DrawFn, shape: tuple[int, ...]) -> Boxes:
    """Boxes that no mesh makes: one is cut again and again."""
    boxes = [Box.whole(shape)]
    for _ in range(draw(st.integers(0, 5))):
        box = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        axis = draw(st.integers(0, len(shape) - 1))
        at = draw(st.integers(0, box.shape[axis]))
        for start, size in ((0, at), (at, box.shape[axis] - at)):
            offset = tuple(o + start * (i == axis) for i, o in enumerate(box.offset))
            boxes.append(Box(offset, tuple(size if i == axis else n for i, n in enumerate(box.shape))))
    return boxes


def cuts(shape: tuple[int, ...]) -> st.SearchStrategy[Boxes]:
    return st.one_of(meshes(shape), irregular(shape)) if shape else st.just([Box((), ())])


def sharded(whole: Array, boxes: Boxes, *, values: bool = True) -> Sharded:
    parts = [whole[(*box.slices(), ...)] if values else np.zeros(box.shape, whole.dtype) for box in boxes]
    return Sharded([Shard(part, whole.shape, box.offset) for part, box in zip(parts, boxes, strict=True)])


def assert_pieces(found: Sharded, whole: Array) -> None:
    for shard in found.shards:
        expected = whole[(*Box(shard.offset, shard.array.shape).slices(), ...)]
        assert (shard.array.dtype, shard.shape) == (whole.dtype, whole.shape)
        assert shard.array.tobytes() == expected.tobytes()


@st.composite
def merged_steps(draw: st.DrawFn) -> Array:
    if draw(st.booleans()):
        return np.asarray(draw(arrays()))
    shape = draw(st.sampled_from([(9000,), (97, 60), (64, 64), (5, 33, 21), (2, 3, 4, 99), (1, 2500)]))
    dtype = np.dtype(draw(st.sampled_from(["<f4", ">i2", "u1", "<c8", ml_dtypes.bfloat16, ml_dtypes.int4, "<M8[s]"])))
    raw = np.random.default_rng(draw(st.integers(0, 3))).bytes(int(np.prod(shape)) * dtype.itemsize)
    return np.frombuffer(raw, dtype).reshape(shape)


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_any_pieces_come_back_as_any_others_and_whole_and_in_stock_tensorstore(
    blocking: SyncStore, data: st.DataObject
) -> None:
    whole = data.draw(merged_steps())
    saved, wanted, filled = (data.draw(cuts(whole.shape)) for _ in range(3))
    some = [box for box in wanted if data.draw(st.booleans())] or wanted
    step = max((info.step for info in blocking.steps()), default=0) + 1
    blocking.save(step, {"w": sharded(whole, saved), "n": step})
    plain = blocking.restore(step)
    assert plain is not None
    assert (plain.tree["w"].dtype, plain.tree["w"].shape) == (whole.dtype, whole.shape)
    assert plain.tree["w"].tobytes() == whole.tobytes()
    for boxes in (wanted, some):
        restored = blocking.restore(step, like={"w": sharded(whole, boxes, values=False), "n": 0})
        assert restored is not None
        assert_pieces(restored.tree["w"], whole)
    into = sharded(whole, filled, values=False)
    blocking.restore(step, into={"w": into, "n": 0})
    assert_pieces(into, whole)
    found = ts.open(json.loads(json.dumps(blocking.spec(step, "w"))), open=True, read=True).result()
    assert found.shape == whole.shape
    values = np.ascontiguousarray(found.read().result())
    assert values.tobytes() == whole.astype(whole.dtype.newbyteorder("=")).tobytes()


def test_even_meshes_are_stored_as_one_array(blocking: SyncStore) -> None:
    whole = np.random.default_rng(0).random((96, 120))
    layouts = {
        "rows": cut_at(whole.shape, [[24, 48, 72], []]),
        "columns": cut_at(whole.shape, [[], [30, 60, 90]]),
        "mesh": cut_at(whole.shape, [[48], [40, 80]]),
    }
    blocking.save(100_000, {name: sharded(whole, boxes) for name, boxes in layouts.items()})
    for name in layouts:
        assert blocking.spec(100_000, name)["driver"] == "zarr3"


@given(rows=st.integers(2, 300), parts=st.integers(2, 6), axis=st.integers(0, 1))
def test_shards_that_know_their_cut_are_stored_as_one_array(rows: int, parts: int, axis: int) -> None:
    """As ``torch.chunk`` cuts: the last are shorter, or empty."""
    shape = (rows, 7) if axis == 0 else (7, rows)
    size = -(-rows // parts)
    bounds: list[list[int]] = [[], []]
    bounds[axis] = [min(i * size, rows) for i in range(1, parts)]
    cut = (size, 7) if axis == 0 else (7, size)
    shards = [Shard(np.zeros(box.shape), shape, box.offset, cut) for box in cut_at(shape, bounds)]
    flat = flatten({"w": Sharded(shards)})
    assert join(flat.structure, indexed(flat, 512)).keys() == {"w"}


def test_what_pieces_leave_out_is_found_before_anything_is_written(blocking: SyncStore) -> None:
    whole = np.zeros((6, 4))
    steps = blocking.steps()
    for boxes in (cut_at(whole.shape, [[2, 4], []])[:2], [Box((6, 0), (0, 4))]):
        with pytest.raises(Invalid, match=r"'w'.*not all of an array of shape \[6, 4\]"):
            blocking.save(200_000, {"w": sharded(whole, boxes), "whole": whole})
    assert blocking.steps() == steps


def listen(store: CheckpointStore) -> Callable[[], list[int]]:
    """Tells the bytes of each read of the disk's packs from now on."""
    tier = tier_of(store, "disk")
    tier.blobs = faulty = Faulty(tier.store)
    return lambda: [call.nbytes for call in faulty.calls if call.verb == "get_into"]


@pytest.mark.parametrize("axis", [0, 1])
async def test_a_restore_of_some_boxes_reads_only_the_chunks_that_overlap_them(tmp_path: Path, axis: int) -> None:
    tiers = {"disk": folder(tmp_path / "disk")}
    whole = np.random.default_rng(0).random((1024, 1024))
    bounds: list[list[int]] = [[], []]
    bounds[axis] = [128 * i for i in range(1, 8)]
    mine = Box((384, 0) if axis == 0 else (0, 384), (256, 1024) if axis == 0 else (1024, 256))
    # A chunk is larger than the gap that a read may pass over: however they lie in the pack, none is read in vain.
    async with CheckpointStore.open(config(tiers, chunk_size=128 << 10)) as store:
        await store.save(1, {"w": sharded(whole, cut_at(whole.shape, bounds))})
        (array,) = (await index_of(store, "disk", 1)).values()
        reads = listen(store)
        restored = await store.restore(like={"w": sharded(whole, [mine], values=False)})
    assert restored is not None
    assert_pieces(restored.tree["w"], whole)
    # Neighbours are read in one go with the pages that the checksum fills up.
    assert mine.size * 8 <= sum(reads()) <= mine.size * 8 * (1 + 4096 / array.grid.cell_nbytes)
    assert restored.sources == {"disk": mine.size * 8}


def test_many_blocks_come_back_as_many_other_boxes_in_time(blocking: SyncStore) -> None:
    """To look at each pair of them in Python would take ten times as long."""
    rng = np.random.default_rng(0)
    whole = rng.random((100_000, 2))
    saved, wanted = (cut_at(whole.shape, [rng.integers(0, 100_000, 1500).tolist(), []]) for _ in range(2))
    blocking.save(300_000, {"w": sharded(whole, saved)})
    like = {"w": sharded(whole, wanted, values=False)}
    begin = time.process_time()
    restored = blocking.restore(300_000, like=like)
    took = time.process_time() - begin
    begin = time.process_time()
    found = [one.intersection(other) for one in saved[:150] for other in wanted[:150]]
    assert took < (time.process_time() - begin) * len(saved) * len(wanted) / len(found) / 2
    assert restored is not None
    assert_pieces(restored.tree["w"], whole)


async def test_a_chunk_that_several_pieces_need_is_read_once(tmp_path: Path) -> None:
    whole = np.random.default_rng(0).random((64, 64))
    async with CheckpointStore.open(config({"disk": folder(tmp_path / "disk")}, chunk_size=1 << 20)) as store:
        await store.save(1, {"w": whole})
        reads = listen(store)
        boxes = cut_at(whole.shape, [[10, 33], [7, 50]])
        restored = await store.restore(like={"w": sharded(whole, boxes, values=False)})
    assert restored is not None
    assert_pieces(restored.tree["w"], whole)
    assert reads() == [whole.nbytes]


async def test_pieces_go_through_every_tier_unchanged_and_an_unchanged_one_is_not_written_again(
    two_tiers: StoreConfig,
) -> None:
    whole = np.random.default_rng(0).random((120, 100))
    boxes = cut_at(whole.shape, [[40, 80], [50]])
    async with CheckpointStore.open(two_tiers) as store:
        heard = Heard(store)
        for step in (1, 2, 3):
            await (await store.save(step, {"w": sharded(whole.copy(), boxes)})).reached("disk")
        new = [event.new_bytes for event in heard.events if isinstance(event, StepSaved)]
        written = [event.written for event in heard.events if isinstance(event, StepPromoted)]
        assert (new[0] >= whole.nbytes, new[1:]) == (True, [0, 0])
        assert (written[0] >= whole.nbytes, written[1:]) == (True, [0, 0])
        for tier in ("ram", "disk"):
            if tier == "disk":
                await store.evict(3, "ram")
            restored = await store.restore(like={"w": sharded(whole, boxes[::-1], values=False)})
            assert restored is not None
            assert set(restored.sources) == {tier}
            assert_pieces(restored.tree["w"], whole)


async def test_pieces_in_ram_are_seen_where_they_lie_and_others_are_copied(shared_memory: Path) -> None:
    whole = np.random.default_rng(0).random((40, 1024)).astype(np.float32)
    columns = cut_at(whole.shape, [[], [512]])
    odd = cut_at(whole.shape, [[13, 24], []])
    async with CheckpointStore.open(config({"ram": ram(shared_memory)}, chunk_size=128 << 10, name="of-test")) as store:
        await store.save(1, {"columns": sharded(whole, columns), "odd": sharded(whole, odd)})
        for boxes, seen in ((odd, 3), (columns, 0), (cut_at(whole.shape, [[11, 24], [512]]), 0)):
            like = {"columns": sharded(whole, columns, values=False), "odd": sharded(whole, boxes, values=False)}
            restored = await store.restore(like=like, copy=False)
            assert restored is not None
            for name in like:
                assert_pieces(restored.tree[name], whole)
                assert not any(shard.array.flags.writeable for shard in restored.tree[name].shards)
            assert sum(shard.array.base is not None for shard in restored.tree["odd"].shards) == seen
            await restored.verified()
        plain = await store.restore(copy=False)
        assert plain is not None
        for name in like:
            assert plain.tree[name].tobytes() == whole.tobytes()
        del restored, plain


async def test_a_damaged_piece_is_read_from_the_next_tier_and_repaired(two_tiers: StoreConfig) -> None:
    whole = np.random.default_rng(0).random((60, 50))
    boxes = cut_at(whole.shape, [[], [10, 20, 30, 40]])
    async with CheckpointStore.open(two_tiers) as store:
        await (await store.save(1, {"w": sharded(whole, boxes)})).reached("disk")
        await flip_chunk(store, "ram", 1, "w", 1)
        restored = await store.restore(like={"w": sharded(whole, [Box((7, 3), (20, 30))], values=False)})
        assert restored is not None
        assert set(restored.sources) == {"ram", "disk"}
        assert_pieces(restored.tree["w"], whole)
        await store.flush()
        (found,) = await store.verify(1, "ram")
        assert not found.damaged


async def test_damage_in_a_block_is_told_by_the_key_of_its_array(two_tiers: StoreConfig) -> None:
    whole = np.random.default_rng(0).random((40, 96))
    odd = [Box((0, 0), (13, 96)), Box((13, 0), (27, 50)), Box((13, 50), (27, 46))]
    like = {"w": sharded(whole, odd, values=False)}
    async with CheckpointStore.open(two_tiers) as store:
        heard = Heard(store)
        await (await store.save(1, {"w": sharded(whole, odd)})).reached("disk")
        block = block_key("w", odd[2].offset)
        await flip_chunk(store, "ram", 1, block, 0)
        (found,) = await store.verify(1, "ram")
        assert (found.damaged, "tieredckpt/blocks" in found.problem) == (("w",), False)
        await store.restore(like=like)
        assert (await heard.first(ChunkRepaired)).key == "w"
        await store.flush()
        for tier in ("ram", "disk"):
            await flip_chunk(store, tier, 1, block, 0)
        with pytest.raises(Corrupt, match="array 'w' of step 1"):
            await store.restore(like=like)


async def test_a_step_in_pieces_is_described_by_its_arrays(two_tiers: StoreConfig) -> None:
    whole = np.random.default_rng(0).random((40, 96))
    odd = [Box((0, 0), (13, 96)), Box((13, 0), (27, 50)), Box((13, 50), (27, 46))]
    async with CheckpointStore.open(two_tiers) as store:
        await store.save(1, {"w": sharded(whole, odd)})
        details = await store.describe(1)
    (array,) = details.arrays
    assert (array.key, array.shape, array.nbytes) == ("w", (40, 96), whole.nbytes)
    assert details.info.nbytes == whole.nbytes


async def test_reads_of_many_ranks_at_once_from_one_process_agree(two_tiers: StoreConfig) -> None:
    """Eight ranks saved; three, each with columns of its own, read at the same time."""
    whole = np.random.default_rng(0).random((128, 90))
    async with CheckpointStore.open(two_tiers) as store:
        await store.save(1, {"w": sharded(whole, cut_at(whole.shape, [[16 * i for i in range(1, 8)], []]))})
        wanted = [[box] for box in cut_at(whole.shape, [[], [30, 60]])]
        likes = [{"w": sharded(whole, boxes, values=False)} for boxes in wanted]
        found = await asyncio.gather(*(store.restore(like=like, resume=False) for like in likes))
    for restored in found:
        assert restored is not None
        assert_pieces(restored.tree["w"], whole)


async def test_a_part_of_a_damaged_compressed_chunk_is_read_from_another_tier(
    tmp_path: Path, shared_memory: Path
) -> None:
    """Its frame is sound, but what is in it has another digest."""
    whole = np.random.default_rng(0).integers(0, 255, CHUNK, np.uint8)
    tiers = {
        "ram": ram(shared_memory),
        "near": folder(tmp_path / "near", codec="fast"),
        "far": folder(tmp_path / "far"),
    }
    async with CheckpointStore.open(config(tiers)) as store:
        await store.save(1, {"w": whole})
        await store.flush()
        await store.evict(1, "ram")
        await flip_chunk(store, "near", 1, "w")
        half = Shard(np.zeros(CHUNK // 2, np.uint8), whole.shape, (CHUNK // 4,))
        restored = await store.restore(like={"w": half})
        assert restored is not None
        assert restored.tree["w"].array.tobytes() == whole[CHUNK // 4 : 3 * CHUNK // 4].tobytes()
        assert restored.sources.keys() == {"far"}
