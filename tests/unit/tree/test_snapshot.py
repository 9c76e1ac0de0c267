"""What is copied of a piece: every cell in row-major order and full size, zeros where the array ends."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tieredckpt.format.boxes import Box
from tieredckpt.format.digest import digest
from tieredckpt.format.grid import cell_box, cells
from tieredckpt.tree import Place, flatten
from tieredckpt.tree.snapshot import Snapshot


@st.composite
def leaves(draw: st.DrawFn) -> Any:
    """A piece of an array under a grid that need not divide it, in any memory layout."""
    shape = tuple(draw(st.lists(st.integers(1, 40), min_size=1, max_size=3)))
    cell = tuple(draw(st.integers(1, full + 3)) for full in shape)
    dtype = draw(st.sampled_from(["u1", "<f4", ">f8", "<M8[ns]"]))
    array = np.arange(1, np.prod(shape) + 1).astype(np.int64).astype(dtype).reshape(shape)
    (leaf,) = flatten({"w": np.asfortranarray(array) if draw(st.booleans()) else array}).arrays
    return dataclasses.replace(leaf, place=Place("w", tuple(2 * n for n in shape), shape, cell=cell))


@given(leaf=leaves())
def test_a_cell_is_the_bytes_that_zarr_has_of_it(leaf: Any) -> None:
    snapshot = Snapshot.of([leaf], 1 << 20, {})
    (grid,) = snapshot.grids
    found = dict(snapshot.inline)
    for cell in snapshot.pending:
        memory = np.full(cell.nbytes, 0xFF, np.uint8)
        assert cell.copy_to(memory) == digest(memory)
        found[cell.ordinal] = memory.tobytes()
    assert len(found) == grid.size
    for ordinal, cell in enumerate(cells(grid)):
        expected = np.zeros(grid.cell_nbytes, np.uint8).view(leaf.dtype).reshape(grid.cell)
        box: Box = cell_box(grid, cell.index)
        expected[tuple(map(slice, box.shape))] = leaf.source[box.slices()]
        assert found[ordinal] == expected.tobytes()
