"""Stock TensorStore reads what ranks stored together as the arrays that they cut, whichever way they cut them."""

from __future__ import annotations

import json
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import tensorstore as ts
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from support.cuts import boxes_between, cuts, meshes
from support.records import first_record

from tieredckpt.engine.restoring.tensorstore_spec import spec_of
from tieredckpt.format import layout
from tieredckpt.format.boxes import Box
from tieredckpt.format.crc import crc32c
from tieredckpt.format.digest import digest
from tieredckpt.format.encoding import CRC32C
from tieredckpt.format.grid import cell_box, cells, plan_block
from tieredckpt.format.manifest import StepIndex, decode_step, encode_step
from tieredckpt.format.merging import merge
from tieredckpt.format.ocdbt import Extent
from tieredckpt.format.part import Part, PartArray, PartChunk, decode_part, encode_part
from tieredckpt.format.structure import ArrayNode, DictNode
from tieredckpt.format.zarr import dtype_name

Array = NDArray[Any]
KEY = "params/größe"


class Ranks:
    """Ranks that commit one array to a directory, each with a pack and a part of its own."""

    def __init__(self, root: Path, array: Array, target: int) -> None:
        self.root, self.array, self.target = root, array, target
        self.parts: list[Part] = []
        node = ArrayNode(KEY, dtype_name(array.dtype), array.shape, "numpy")
        self.structure = DictNode(["params"], [DictNode(["größe"], [node])])
        self.store = str(uuid.uuid4())

    def add(self, boxes: Sequence[Box], ranks: int, cut: tuple[int, ...] | None) -> None:
        """The next rank, which has ``boxes`` of the array."""
        rank = len(self.parts)
        pack = layout.pack_key(f"{rank:032x}")
        data = bytearray()
        arrays = {}
        for box in boxes:
            grid = plan_block(box, self.array.shape, self.array.itemsize, self.target, cut)
            block = self.array[box.slices()]
            chunks: list[PartChunk] = []
            for cell in cells(grid):
                inside = block[cell_box(grid, cell.index).slices()]
                padded = np.zeros(grid.cell, self.array.dtype)
                padded[tuple(map(slice, inside.shape))] = inside
                raw = padded.tobytes()
                stored = raw + crc32c(raw).to_bytes(4, "little")
                chunks.append((digest(raw), Extent(pack, len(data), len(stored))))
                data += stored + bytes(-len(stored) % layout.ALIGNMENT)
            arrays[layout.block_key(KEY, box.offset)] = PartArray(grid, self.array.dtype, chunks)
        path = self.root / pack
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        record = first_record(self.structure, store=self.store, step=7, rank=rank, ranks=ranks)
        self.parts.append(decode_part(encode_part(Part(record, arrays)), f"parts/{rank}"))

    def commit(self) -> StepIndex:
        """What rank 0 does; the step as it is read again."""
        whole = merge(reversed(self.parts))
        path = layout.btree_key(7, 1)
        files = encode_step(whole.record, whole.arrays, btree_path=path, encoding=CRC32C)
        folder = self.root / layout.step_folder(7, 1)
        folder.mkdir(parents=True)
        (self.root / path).write_bytes(files.btree)
        (self.root / layout.manifest_key(7, 1)).write_bytes(files.manifest)
        found = decode_step(files.manifest, files.btree, path)
        assert found.arrays == whole.arrays
        assert found.record == whole.record
        assert found.record.rank is None
        return found


def opened(index: StepIndex, root: Path) -> ts.TensorStore:
    kvstore = {
        "driver": "ocdbt",
        "base": {"driver": "file", "path": f"{root}/"},
        "manifest": {"driver": "file", "path": f"{root}/{layout.step_folder(7, 1)}"},
    }
    spec = json.loads(json.dumps(spec_of(index, KEY, kvstore)))
    return ts.open(spec, context=ts.Context(), open=True, read=True).result()


def stored(
    root: Path, array: Array, boxes: Sequence[Box], *, target: int, cut: tuple[int, ...] | None = None, world: int = 0
) -> StepIndex:
    """Commit ``array``, whose boxes go round ``world`` ranks, and see stock TensorStore read it as it is."""
    world = world or len(boxes)
    ranks = Ranks(root, array, target)
    for rank in range(world):
        ranks.add(boxes[rank::world], world, cut)
    index = ranks.commit()
    found = opened(index, root)
    assert found.shape == array.shape
    assert found.origin == (0,) * array.ndim
    # TensorStore gives the order of this machine, and times as the integers that zarr knows.
    expected = array.astype(array.dtype.newbyteorder("="))
    assert np.ascontiguousarray(found.read().result()).tobytes() == expected.tobytes()
    return index


def numbers(shape: tuple[int, ...], dtype: Any = np.float32) -> Array:
    return np.arange(1, int(np.prod(shape)) + 1).reshape(shape).astype(dtype)


def mesh(shape: tuple[int, ...], cut: tuple[int, ...]) -> list[Box]:
    return boxes_between([[*range(0, full, part), full] for full, part in zip(shape, cut, strict=True)])


@pytest.mark.parametrize(
    ("shape", "cut"),
    [
        pytest.param((64, 48), (16, 48), id="rows"),
        pytest.param((64, 48), (64, 12), id="columns"),
        pytest.param((64, 48), (16, 24), id="a mesh of two axes"),
        pytest.param((8, 6, 10, 4), (4, 6, 5, 2), id="a mesh of four axes"),
        pytest.param((61, 48), (16, 48), id="rows, the last block short"),
        pytest.param((64, 45), (64, 12), id="columns, the last block short"),
        pytest.param((61, 45), (16, 12), id="a mesh, both ends short"),
        pytest.param((97,), (13,), id="one axis of prime length"),
    ],
)
@pytest.mark.parametrize("dtype", ["<f4", ">f8", ml_dtypes.bfloat16, np.complex64, bool])
def test_the_blocks_of_a_mesh_are_joined_into_one_zarr_array(
    tmp_path: Path, shape: tuple[int, ...], cut: tuple[int, ...], dtype: Any
) -> None:
    index = stored(tmp_path, numbers(shape, dtype), mesh(shape, cut), target=600, cut=cut)
    assert list(index.arrays) == [KEY]


@pytest.mark.parametrize(
    ("bounds", "joined"),
    [
        pytest.param([[0, 23, 37, 64], [0, 48]], False, id="rows cut anywhere"),
        pytest.param([[0, 64], [0, 5, 11, 48]], False, id="columns cut anywhere"),
        pytest.param([[0, 23, 64], [0, 11, 31, 48]], False, id="both"),
        pytest.param([[0, 48, 64], [0, 48]], True, id="two blocks that meet at the size of the first"),
    ],
)
def test_blocks_of_any_cut_are_stacked(tmp_path: Path, bounds: list[list[int]], joined: bool) -> None:
    boxes = boxes_between(bounds)
    index = stored(tmp_path, numbers((64, 48)), boxes, target=4096)
    assert list(index.arrays) == ([KEY] if joined else sorted(layout.block_key(KEY, box.offset) for box in boxes))
    assert [box for box, _ in index.blocks(KEY)] == ([Box((0, 0), (64, 48))] if joined else sorted(boxes))


def test_boxes_that_lie_in_no_mesh_are_stacked(tmp_path: Path) -> None:
    # A windmill: no line cuts it through.
    boxes = [Box((0, 0), (2, 5)), Box((2, 0), (5, 2)), Box((0, 5), (5, 2)), Box((5, 2), (2, 5)), Box((2, 2), (3, 3))]
    index = stored(tmp_path, numbers((7, 7)), boxes, target=4096, world=3)
    assert len(index.arrays) == 5


def test_times_in_blocks_keep_their_unit(tmp_path: Path) -> None:
    array = numbers((6, 4), np.int64).astype("<M8[s]")
    index = stored(tmp_path, array, boxes_between([[0, 5, 6], [0, 3, 4]]), target=64)
    assert {found.dtype for found in index.arrays.values()} == {np.dtype("<M8[s]")}


@settings(max_examples=30, deadline=None)
@given(found=meshes(), world=st.integers(1, 5), target=st.integers(4, 400))
def test_any_mesh_on_any_number_of_ranks_is_read_as_numpy_has_it(
    tmp_path_factory: pytest.TempPathFactory,
    found: tuple[tuple[int, ...], tuple[int, ...], list[Box]],
    world: int,
    target: int,
) -> None:
    shape, cut, boxes = found
    stored(tmp_path_factory.mktemp("mesh"), numbers(shape), boxes, target=target, cut=cut, world=world)


@settings(max_examples=30, deadline=None)
@given(found=cuts(), world=st.integers(1, 5), target=st.integers(4, 400))
def test_any_cut_on_any_number_of_ranks_is_read_as_numpy_has_it(
    tmp_path_factory: pytest.TempPathFactory, found: tuple[tuple[int, ...], list[Box]], world: int, target: int
) -> None:
    shape, boxes = found
    stored(tmp_path_factory.mktemp("cut"), numbers(shape), boxes, target=target, world=world)
