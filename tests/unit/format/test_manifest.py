"""The commit of a step: what is encoded is what is decoded."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.records import first_record

from tieredckpt.blobs.codecs import CODECS
from tieredckpt.errors import Corrupt
from tieredckpt.format import ocdbt
from tieredckpt.format.boxes import Box
from tieredckpt.format.digest import digest
from tieredckpt.format.encoding import CRC32C, PLAIN
from tieredckpt.format.grid import Grid
from tieredckpt.format.keys import child_key
from tieredckpt.format.layout import block_key, btree_key, pack_key
from tieredckpt.format.manifest import ArrayIndex, Chunk, StepIndex, StepRecord, decode_step, encode_step
from tieredckpt.format.ocdbt import Extent
from tieredckpt.format.structure import ArrayNode, DictNode

NAMES = st.text("a.-!%/0", min_size=1, max_size=4) | st.text(st.characters(codec="utf-8"), max_size=6)
"""Many are the start of another, followed by a character that sorts before the slash."""


@given(names=st.sets(NAMES, max_size=12), checksum=st.booleans())
def test_every_array_gets_its_own_digests_back(names: set[str], checksum: bool) -> None:
    grid = Grid((4,), (2,), 1)
    keys = {name: child_key("", name) for name in names}
    arrays = {
        key: ArrayIndex(grid, np.dtype(np.uint8), [_chunk(i, 0), _chunk(i, 1)]) for i, key in enumerate(keys.values())
    }
    nodes = [ArrayNode(key, "uint8", (4,), "numpy") for key in keys.values()]
    record = first_record(DictNode(list(keys), nodes), nbytes=4 * len(arrays))
    path = btree_key(1, 1)
    files = encode_step(record, arrays, btree_path=path, encoding=CRC32C if checksum else PLAIN)
    decoded = decode_step(files.manifest, files.btree, path)
    assert decoded.record == record
    assert decoded.arrays == arrays


def test_an_index_holds_no_large_chunk_in_a_few_bytes() -> None:
    zeros = bytes(1 << 20)
    record = first_record(DictNode(["w"], [ArrayNode("w", "uint8", (1 << 20,), "numpy")]), nbytes=1 << 20)
    array = ArrayIndex(Grid((1 << 20,), (1 << 20,), 1), np.dtype(np.uint8), [Chunk(digest(zeros), zeros)])
    path = btree_key(1, 1)
    files = encode_step(record, {"w": array}, btree_path=path, encoding=CODECS["small"])
    assert len(files.btree) < 10_000
    with pytest.raises(Corrupt, match="1048576 bytes in the index"):
        decode_step(files.manifest, files.btree, path)


@pytest.mark.parametrize(
    ("key", "metadata"),
    [
        (b"\xff/zarr.json", None),
        (b"w/zarr.json", b"{}"),
        (b"w/zarr.json", Extent(pack_key("ab" * 16), 0, 4096)),
    ],
    ids=["a key that is no text", "metadata of no array", "metadata outside the index"],
)
def test_an_array_that_cannot_be_described_makes_the_step_corrupt(key: bytes, metadata: bytes | Extent | None) -> None:
    record = first_record(DictNode(["w"], [ArrayNode("w", "uint8", (2,), "numpy")]), nbytes=2)
    array = ArrayIndex(Grid((2,), (2,), 1), np.dtype(np.uint8), [_chunk(0, 0)])
    path = btree_key(1, 1)
    files = encode_step(record, {"w": array}, btree_path=path, encoding=PLAIN)
    values = dict(ocdbt.decode(files.manifest, files.btree, path))
    values[key] = values[b"w/zarr.json"] if metadata is None else metadata
    forged = ocdbt.encode(sorted(values.items()), path, uuid=bytes(16), commit_time_ns=0)
    with pytest.raises(Corrupt, match=r"array b'.*' has .*metadata"):
        decode_step(forged.manifest, forged.btree, path)


WHOLE = ArrayNode("w", "uint8", (8, 2), "numpy")


def _blocks(record: StepRecord, blocks: dict[str, tuple[int, ...]], dtype: str = "uint8") -> StepIndex:
    """An index with arrays of those storage keys and shapes, read back."""
    arrays = {
        name: ArrayIndex(Grid(shape, (1, 2), 1), np.dtype(dtype), [_chunk(i, n) for n in range(shape[0])])
        for i, (name, shape) in enumerate(blocks.items())
    }
    path = btree_key(1, 1)
    files = encode_step(record, arrays, btree_path=path, encoding=PLAIN)
    return decode_step(files.manifest, files.btree, path)


def _record(rank: int | None, ranks: int = 2) -> StepRecord:
    return first_record(DictNode(["w"], [WHOLE]), nbytes=16, rank=rank, ranks=ranks)


TOP, BOTTOM = block_key("w", (0, 0)), block_key("w", (4, 0))


def test_an_array_in_blocks_is_read_with_the_boxes_that_it_is_in() -> None:
    index = _blocks(_record(None), {TOP: (4, 2), BOTTOM: (4, 2)})
    assert index.blocks("w") == [(Box((0, 0), (4, 2)), TOP), (Box((4, 0), (4, 2)), BOTTOM)]


def test_the_step_of_a_rank_has_what_the_rank_has_of_an_array() -> None:
    assert _blocks(_record(1), {BOTTOM: (4, 2)}).blocks("w") == [(Box((4, 0), (4, 2)), BOTTOM)]
    assert _blocks(_record(0), {}).blocks("w") == []


@pytest.mark.parametrize(
    ("rank", "blocks", "dtype"),
    [
        pytest.param(None, {TOP: (4, 2)}, "uint8", id="a block is missing"),
        pytest.param(None, {TOP: (4, 2), BOTTOM: (2, 2)}, "uint8", id="a block is short"),
        pytest.param(None, {TOP: (6, 2), BOTTOM: (4, 2)}, "uint8", id="blocks overlap"),
        pytest.param(None, {TOP: (4, 2), BOTTOM: (4, 2), "w": (8, 2)}, "uint8", id="whole, and in blocks"),
        pytest.param(None, {TOP: (4, 2), BOTTOM: (4, 2)}, "int8", id="of another dtype"),
        pytest.param(None, {}, "uint8", id="nothing is there"),
        pytest.param(None, {"w": (8, 2), block_key("v", (0, 0)): (4, 2)}, "uint8", id="a block of no array"),
        pytest.param(None, {"w": (6, 2)}, "uint8", id="of another shape"),
        pytest.param(1, {BOTTOM: (6, 2)}, "uint8", id="beyond the array"),
        pytest.param(1, {"w": (6, 2)}, "uint8", id="a whole array of another shape"),
        pytest.param(1, {block_key("w", (0,)): (4, 2)}, "uint8", id="an offset of too few axes"),
        pytest.param(2, {"w": (8, 2)}, "uint8", id="a rank that is none"),
        pytest.param(-1, {"w": (8, 2)}, "uint8", id="a negative rank"),
    ],
)
def test_blocks_that_are_not_the_array_of_the_tree_are_corrupt(
    rank: int | None, blocks: dict[str, tuple[int, ...]], dtype: str
) -> None:
    with pytest.raises(Corrupt, match=f"{btree_key(1, 1)}: .*(in the tree|of the tree|of rank)"):
        _blocks(_record(rank), blocks, dtype)


def _chunk(array: int, ordinal: int) -> Chunk:
    data = bytes([array, ordinal])
    return Chunk(digest(np.frombuffer(data, np.uint8)), data)
