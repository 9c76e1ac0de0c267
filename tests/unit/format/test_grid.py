"""Grids: every byte of an array lies in exactly one cell, and every cell is one range of the array."""

from __future__ import annotations

import time
from collections import deque
from math import prod

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tieredckpt.errors import Invalid
from tieredckpt.format.grid import MAX_RANK, Cell, Grid, cell_key, cells, check, plan

shapes = st.lists(st.integers(0, 9), max_size=5).map(tuple)
itemsizes = st.sampled_from([1, 2, 4, 8, 16])
targets = st.integers(1, 3000)


@given(shape=shapes, itemsize=itemsizes, target=targets)
def test_cells_tile_the_array_in_order_and_each_is_one_range(
    shape: tuple[int, ...], itemsize: int, target: int
) -> None:
    grid = check(plan(shape, itemsize, target))
    found = list(cells(grid))
    assert len(found) == grid.size == prod(grid.counts)
    assert [cell.index for cell in found] == list(np.ndindex(*grid.counts))
    position = 0
    for cell in found:
        assert cell.start == position
        assert 0 < cell.nbytes <= grid.cell_nbytes
        position += cell.nbytes
    assert position == grid.nbytes == prod(shape) * itemsize


@given(shape=shapes, itemsize=itemsizes, target=targets)
def test_a_cell_holds_what_zarr_expects_at_its_index(shape: tuple[int, ...], itemsize: int, target: int) -> None:
    grid = plan(shape, itemsize, target)
    array = np.arange(1, prod(shape) + 1).reshape(shape)
    flat = array.reshape(-1)
    for cell in cells(grid):
        region = tuple(slice(i * part, (i + 1) * part) for i, part in zip(cell.index, grid.cell, strict=True))
        inside = array[region]
        # Padding follows the valid items only if the cell is full on every axis inside the cut one.
        padded = np.zeros(grid.cell, array.dtype)
        padded[tuple(slice(0, size) for size in inside.shape)] = inside
        first, count = cell.start // itemsize, cell.nbytes // itemsize
        assert padded.reshape(-1)[:count].tolist() == flat[first : first + count].tolist()
        assert not padded.reshape(-1)[count:].any()


@given(shape=shapes, itemsize=itemsizes, target=targets)
def test_cells_keep_to_the_target_and_padding_is_less_than_a_row_per_cell(
    shape: tuple[int, ...], itemsize: int, target: int
) -> None:
    grid = plan(shape, itemsize, target)
    assert grid.cell_nbytes <= max(target, itemsize)
    for count, full, part in zip(grid.counts, shape, grid.cell, strict=True):
        assert count * part - full < max(1, count)


@given(shape=shapes.filter(lambda shape: shape and 0 not in shape), itemsize=itemsizes, target=targets)
def test_cells_are_as_large_as_the_target_allows(shape: tuple[int, ...], itemsize: int, target: int) -> None:
    grid = plan(shape, itemsize, target)
    axis = next((i for i, part in enumerate(grid.cell) if part > 1), len(shape) - 1)
    row = prod(shape[axis + 1 :]) * itemsize
    if grid.counts[axis] > 1:
        # One cell less along the cut axis would need cells beyond the target.
        assert -(-shape[axis] // (grid.counts[axis] - 1)) * row > target
    elif prod(shape[:axis]) > 1:
        assert 2 * shape[axis] * row > target


def test_known_grids() -> None:
    assert plan((), 4, 1) == Grid((), (), 4)
    assert plan((10,), 4, 1 << 24) == Grid((10,), (10,), 4)
    assert plan((10, 3), 4, 48) == Grid((10, 3), (4, 3), 4)
    assert plan((2, 5, 100), 1, 60) == Grid((2, 5, 100), (1, 1, 50), 1)
    assert plan((5,), 16, 8).cell == (1,)
    assert plan((3, 0), 4, 100).size == 0
    assert plan((50257, 1600), 4, 16 << 20).cell == (2513, 1600)


def test_the_largest_arrays_have_a_grid() -> None:
    assert plan((1,) * MAX_RANK, 1, 1).size == 1
    assert check(plan(((1 << 63) - 1,), 1, 1 << 40)).size == 1 << 23


def test_an_array_without_axes_is_one_cell() -> None:
    grid = plan((), 8, 16 << 20)
    assert list(cells(grid)) == [Cell((), 0, 8)]
    assert cell_key(()) == "c"
    assert (grid.size, grid.cell_nbytes, grid.nbytes) == (1, 8, 8)


def test_cell_keys_are_the_default_chunk_keys_of_zarr() -> None:
    assert cell_key((0,)) == "c/0"
    assert cell_key((1, 23, 0)) == "c/1/23/0"


@pytest.mark.parametrize(
    ("shape", "itemsize", "target"),
    [((-1,), 4, 10), ((2,), 0, 10), ((2,), 4, 0), ((1,) * (MAX_RANK + 1), 1, 1), ((1 << 60,), 8, 10)],
)
def test_impossible_arrays_are_refused(shape: tuple[int, ...], itemsize: int, target: int) -> None:
    with pytest.raises(Invalid, match="no grid"):
        plan(shape, itemsize, target)


@given(
    shape=st.lists(st.integers(-1, 6), max_size=3).map(tuple),
    cell=st.lists(st.integers(-1, 6), max_size=3).map(tuple),
)
def test_a_grid_passes_the_check_only_if_its_cells_are_ranges(shape: tuple[int, ...], cell: tuple[int, ...]) -> None:
    grid = Grid(shape, cell, 2)
    try:
        check(grid)
    except Invalid:
        if len(shape) != len(cell) or min((*shape, *cell), default=1) < 1:
            return
        # A grid of possible sizes was refused: some cell is no range, or larger than the array.
        numbers = np.arange(prod(shape)).reshape(shape)
        whole = tuple(slice(0, part) for part in cell)
        spread = numbers[whole].reshape(-1)
        assert any(p > s for p, s in zip(cell, shape, strict=True)) or np.any(np.diff(spread) != 1)
    else:
        assert sum(found.nbytes for found in cells(grid)) == grid.nbytes


@pytest.mark.parametrize(
    "grid",
    [
        Grid((4, 4), (2, 2), 4),
        Grid((4, 4), (4,), 4),
        Grid((4,), (0,), 4),
        Grid((-1,), (1,), 4),
        Grid((0, 1 << 62), (1, 1 << 62), 4),
        Grid((4,), (5,), 4),
        Grid((4,), (2,), 0),
        Grid((1 << 62,), (1,), 4),
        Grid((1,) * 33, (1,) * 33, 1),
    ],
)
def test_grids_from_disk_that_are_not_ours_are_refused(grid: Grid) -> None:
    with pytest.raises(Invalid, match="do not divide"):
        check(grid)


def test_counting_an_enormous_grid_costs_nothing_until_its_cells_are_asked_for() -> None:
    grid = check(Grid((1 << 60,), (1,), 1))
    assert grid.size == 1 << 60
    assert next(iter(cells(grid))) == Cell((0,), 0, 1)


@pytest.mark.benchmark
def test_a_million_cells_and_ten_thousand_tiny_arrays_are_planned_in_a_blink() -> None:
    began = time.perf_counter()
    assert deque(cells(plan((1_000_000, 4), 4, 16)), 1).pop() == Cell((999_999, 0), 15_999_984, 16)
    for _ in range(10_000):
        list(cells(plan((768,), 4, 16 << 20)))
    # Measured: 0.4 s for the cells, 30 ms for the arrays; the bound only catches a change of order.
    assert time.perf_counter() - began < 10
