"""What is copied of a piece: every cell in row-major order and full size, zeros where the array ends."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tieredckpt.engine.saving.plan import Plan
from tieredckpt.engine.saving.snapshot import NO_SMALL, Snapshot
from tieredckpt.format.boxes import Box
from tieredckpt.format.digest import SIZE, digest
from tieredckpt.format.grid import cell_box, cells
from tieredckpt.format.manifest import INLINE_MAX, Chunk
from tieredckpt.format.ocdbt import Extent
from tieredckpt.tree import Place, Shard, flatten


@st.composite
def leaves(draw: st.DrawFn) -> Any:
    """A piece of an array under a grid that need not divide it, in any memory layout."""
    shape = tuple(draw(st.lists(st.integers(1, 40), min_size=1, max_size=3)))
    cell = tuple(draw(st.integers(1, full + 3)) for full in shape)
    dtype = draw(st.sampled_from(["u1", "<f4", ">f8", "<M8[ns]"]))
    array = np.arange(1, np.prod(shape) + 1).astype(np.int64).astype(dtype).reshape(shape)
    (leaf,) = flatten({"w": np.asfortranarray(array) if draw(st.booleans()) else array}).arrays
    return msgspec.structs.replace(leaf, place=Place("w", tuple(2 * n for n in shape), shape, cell=cell))


@given(leaf=leaves(), inline_max=st.sampled_from([0, INLINE_MAX]))
def test_a_cell_is_the_bytes_that_zarr_has_of_it(leaf: Any, inline_max: int) -> None:
    planned = Snapshot.of([leaf], 1 << 20, {}, Plan.of([leaf], 1 << 20, inline_max))
    (grid,) = planned.grids
    found = dict(enumerate(planned.inline.get(0, planned.gathered)))
    for cell in planned.pending:
        memory = np.full(cell.nbytes, 0xFF, np.uint8)
        assert cell.copy_to(memory) == digest(memory)
        found[cell.ordinal] = memory.tobytes()
    assert len(found) == grid.size
    for ordinal, place in enumerate(cells(grid)):
        expected = np.zeros(grid.cell_nbytes, np.uint8).view(leaf.dtype).reshape(grid.cell)
        box: Box = cell_box(grid, place.index)
        expected[tuple(map(slice, box.shape))] = leaf.source[box.slices()]
        assert found[ordinal] == expected.tobytes()


@given(leaf=leaves())
def test_of_small_arrays_only_digests_are_kept_and_padding_is_not_counted(leaf: Any) -> None:
    plan = Plan.of([leaf], 1 << 20, inline_max=1 << 30)
    planned, again = (Snapshot.of([leaf], 1 << 20, {}, plan) for _ in range(2))
    planned.compare_small(NO_SMALL)
    assert planned.new_small == leaf.source.nbytes
    assert list(map(len, planned.small.digests)) == [SIZE * planned.grids[0].size]
    again.compare_small(planned.small)
    assert again.new_small == 0


def test_small_arrays_are_compared_by_key_where_the_tree_is_another_one() -> None:
    """Some are gathered, some (of bools) are not; ``b`` has moved, and only ``c`` and ``new`` are new."""
    before = {"a": np.ones(3), "b": np.zeros(4, np.bool_), "c": np.zeros(2), "gone": np.ones(1)}
    after = {"b": before["b"], "new": np.zeros(5), "c": np.ones(2), "a": before["a"]}
    first, second = (Snapshot.of(flatten(tree).arrays, 1 << 20, {}) for tree in (before, after))
    first.compare_small(NO_SMALL)
    second.compare_small(first.small)
    assert second.new_small == after["new"].nbytes + after["c"].nbytes


@pytest.mark.parametrize(("first", "rows"), [(4, 3), (110, 100), (550, 500), (5500, 5000)])
def test_small_cells_take_no_pages_of_their_own(first: int, rows: int) -> None:
    """Cells that join with those of blocks before and after would be rows of 32 bytes, or some of these."""
    shard = Shard(np.zeros((rows, 8), np.float32), (first + 2 * rows, 8), (first, 0))
    planned = Snapshot.of(flatten({"w": shard}).arrays, 16 << 20, {})
    paged = [cell.nbytes for cell in planned.pending]
    assert min(paged, default=4096) >= 4096
    lies_at = {(cell.array, cell.ordinal): Chunk(b"", Extent("", 0, cell.nbytes)) for cell in planned.pending}
    planned.index(lies_at)
    planned.compare_small(NO_SMALL)
    assert sum(paged) + planned.new_small == shard.array.nbytes
