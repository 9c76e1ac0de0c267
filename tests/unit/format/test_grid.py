"""Grids: every byte of an array lies in exactly one cell, and every cell is one range of the array."""

from __future__ import annotations

import time
from collections import deque
from math import prod

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from support.cuts import cuts, meshes

from tieredckpt.errors import Invalid
from tieredckpt.format.boxes import Box, tile
from tieredckpt.format.grid import MAX_RANK, Cell, Grid, cell_box, cell_key, cells, check, overlapping, plan, plan_block
from tieredckpt.format.layout import ALIGNMENT

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


@given(axes=st.lists(st.integers(1, 5).flatmap(lambda n: st.tuples(st.just(n), st.integers(1, n))), max_size=4))
def test_a_grid_is_contiguous_if_each_of_its_cells_is_one_range(axes: list[tuple[int, int]]) -> None:
    grid = Grid(tuple(full for full, _ in axes), tuple(part for _, part in axes), 1)
    numbers = np.arange(prod(grid.shape)).reshape(grid.shape)
    of_each = [numbers[cell_box(grid, cell.index).slices()].reshape(-1) for cell in cells(grid)]
    assert grid.contiguous is all(bool((np.diff(found) == 1).all()) for found in of_each)
    assert Grid((), (), 1).contiguous


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


@given(
    outer=st.integers(1, 3),
    rows=st.integers(1, 5000),
    row=st.integers(1, 300),
    pages=st.integers(1, 30),
    itemsize=itemsizes,
)
def test_cells_fill_pages_where_that_takes_little_padding_and_not_many_more_of_them(
    outer: int, rows: int, row: int, pages: int, itemsize: int
) -> None:
    target, nbytes = pages * ALIGNMENT + itemsize, row * itemsize
    grid = plan((outer, rows, row), itemsize, target)
    assert grid.cell_nbytes <= max(target, itemsize)
    if grid.cell[0] != 1 or grid.cell[2] != row:
        return  # cut along another axis
    fewest = -(-rows // (target // nbytes))
    even = -(-rows // fewest)
    assert grid.cell[1] == even or grid.cell_nbytes % ALIGNMENT == 0
    count = -(-rows // grid.cell[1])
    if grid.cell[1] != even:
        assert all(cell.start % ALIGNMENT == 0 for cell in cells(grid))
        assert fewest <= count <= 3 * fewest
        assert (count * grid.cell[1] - rows) * 64 <= rows
    elif fewest > 1 and even * nbytes % ALIGNMENT and (outer == 1 or rows * nbytes % ALIGNMENT == 0):
        for height in range(even, even // 3, -1):  # none would have done, by a count of its own
            wasted = -rows % height
            in_pages = height * nbytes % ALIGNMENT == 0 and height * nbytes <= target
            assert not in_pages or wasted * 64 > rows or -(-rows // height) > min(3 * fewest, fewest + 16)


def test_known_grids() -> None:
    assert plan((), 4, 1) == Grid((), (), 4)
    assert plan((10,), 4, 1 << 24) == Grid((10,), (10,), 4)
    assert plan((10, 3), 4, 48) == Grid((10, 3), (4, 3), 4)
    assert plan((2, 5, 100), 1, 60) == Grid((2, 5, 100), (1, 1, 50), 1)
    assert plan((5,), 16, 8).cell == (1,)
    assert plan((3, 0), 4, 100).size == 0
    assert plan((50257, 1600), 4, 16 << 20).cell == (2528, 1600)  # evenly, 2513 rows each would end within pages
    assert plan((1784, 5352), 4, 16 << 20).cell == (256, 5352)  # of 3 to 6 cells, padding would be 7 percent and more
    assert plan((999, 1001, 3), 4, 1 << 20).cell == (84, 1001, 3)  # no number of rows does


def test_the_largest_arrays_have_a_grid() -> None:
    assert plan((1,) * MAX_RANK, 1, 1).size == 1
    assert check(plan(((1 << 63) - 1,), 1, 1 << 40)).size == 1 << 23


def test_an_array_without_axes_is_one_cell() -> None:
    grid = plan((), 8, 16 << 20)
    assert list(cells(grid)) == [Cell((), 0, 8)]
    assert cell_key(()) == b"c"
    assert (grid.size, grid.cell_nbytes, grid.nbytes) == (1, 8, 8)


def test_cell_keys_are_the_default_chunk_keys_of_zarr() -> None:
    assert cell_key((0,)) == b"c/0"
    assert cell_key((1, 23, 0)) == b"c/1/23/0"


@pytest.mark.parametrize(
    ("shape", "itemsize", "target"),
    [((-1,), 4, 10), ((3, -1), 4, 10), ((2,), 0, 10), ((2,), 4, 0), ((1,) * (MAX_RANK + 1), 1, 1), ((1 << 60,), 8, 10)],
)
def test_impossible_arrays_are_refused(shape: tuple[int, ...], itemsize: int, target: int) -> None:
    with pytest.raises(Invalid, match="no grid"):
        plan(shape, itemsize, target)


@given(
    shape=st.lists(st.integers(0, 6), max_size=3).map(tuple),
    cell=st.lists(st.integers(1, 7), min_size=3, max_size=3),
)
def test_a_grid_is_contiguous_only_if_its_cells_are_ranges_padded_at_their_end(
    shape: tuple[int, ...], cell: list[int]
) -> None:
    grid = check(Grid(shape, tuple(cell[: len(shape)]), 2))
    numbers = np.arange(prod(shape)).reshape(shape)
    found = list(cells(grid))
    assert [position.index for position in found] == list(np.ndindex(*grid.counts))
    for position in found:
        box = cell_box(grid, position.index)
        inside = numbers[box.slices()]
        assert position.nbytes == inside.size * 2
        assert position.start == inside.reshape(-1)[0] * 2
        if grid.contiguous:
            assert not np.any(np.diff(inside.reshape(-1)) != 1)
            padded = np.full(grid.cell, -1)
            padded[tuple(map(slice, inside.shape))] = inside
            assert np.array_equal(padded.reshape(-1)[: inside.size], inside.reshape(-1))


@given(
    shape=st.lists(st.integers(0, 6), min_size=1, max_size=3).map(tuple),
    cell=st.lists(st.integers(1, 7), min_size=3, max_size=3),
    corners=st.lists(st.tuples(st.integers(0, 7), st.integers(0, 7)), min_size=3, max_size=3),
)
def test_the_cells_that_overlap_a_box_are_those_that_share_items_with_it(
    shape: tuple[int, ...], cell: list[int], corners: list[tuple[int, int]]
) -> None:
    grid = Grid(shape, tuple(cell[: len(shape)]), 1)
    pairs = corners[: len(shape)]
    box = Box(tuple(min(pair) for pair in pairs), tuple(abs(b - a) for a, b in pairs))
    boxes = [cell_box(grid, position.index) for position in cells(grid)]
    expected = [(ordinal, found) for ordinal, found in enumerate(boxes) if found.intersection(box)]
    assert list(overlapping(grid, box)) == expected


@pytest.mark.parametrize(
    "grid",
    [
        Grid((4, 4), (4,), 4),
        Grid((4,), (0,), 4),
        Grid((-1,), (1,), 4),
        Grid((0, 1 << 62), (1, 1 << 62), 4),
        Grid((4,), (2,), 0),
        Grid((1 << 62,), (1,), 4),
        Grid((4,), (1 << 62,), 4),
        Grid((1,) * 33, (1,) * 33, 1),
    ],
)
def test_grids_from_disk_that_are_none_are_refused(grid: Grid) -> None:
    with pytest.raises(Invalid, match="do not divide"):
        check(grid)


def test_an_empty_array_of_any_shape_has_no_cells() -> None:
    assert not list(cells(Grid((1 << 62, 0), (1, 1), 1)))
    assert not list(cells(Grid((1 << 62, 0), (2, 2), 1)))


def test_counting_an_enormous_grid_costs_nothing_until_its_cells_are_asked_for() -> None:
    grid = check(Grid((1 << 60,), (1,), 1))
    assert grid.size == 1 << 60
    assert next(iter(cells(grid))) == Cell((0,), 0, 1)


@pytest.mark.benchmark
def test_a_million_cells_and_ten_thousand_tiny_arrays_are_planned_in_a_blink() -> None:
    began = time.process_time()
    assert deque(cells(plan((1_000_000, 4), 4, 16)), 1).pop() == Cell((999_999, 0), 15_999_984, 16)
    for _ in range(10_000):
        list(cells(plan((768,), 4, 16 << 20)))
    # Measured: 0.4 s for the cells, 30 ms for the arrays; the bound only catches a change of order.
    assert time.process_time() - began < 20


@given(mesh=meshes(), itemsize=itemsizes, target=st.integers(1, 3000))
def test_the_blocks_of_a_mesh_are_cut_into_cells_of_one_grid_or_all_by_themselves(
    mesh: tuple[tuple[int, ...], tuple[int, ...], list[Box]], itemsize: int, target: int
) -> None:
    shape, cut, boxes = mesh
    grids = [plan_block(box, shape, itemsize, target, cut) for box in boxes]
    for box, grid in zip(boxes, grids, strict=True):
        assert check(grid).shape == box.shape
        assert grid.cell_nbytes <= max(target, itemsize)
    # Blocks of full size agree; only a short last one may be too small for cells of its siblings to make sense.
    assert len({grid.cell for box, grid in zip(boxes, grids, strict=True) if box.shape == cut}) <= 1
    cell = grids[0].cell
    for box, grid in zip(boxes, grids, strict=True):
        if grid.cell == cell and all(c == 0 or o % c == 0 for o, c in zip(box.offset, cell, strict=True)):
            continue
        alone = plan(box.shape, itemsize, target)
        assert grid == alone


@given(cut=cuts(), itemsize=itemsizes, target=st.integers(1, 3000))
def test_a_block_of_any_cut_is_covered_by_its_own_grid(
    cut: tuple[tuple[int, ...], list[Box]], itemsize: int, target: int
) -> None:
    shape, boxes = cut
    for box in boxes:
        grid = check(plan_block(box, shape, itemsize, target))
        assert tile(box.shape, [cell_box(grid, position.index) for position in cells(grid)])


@pytest.mark.parametrize(
    ("box", "shape", "cut", "cell"),
    [
        # Rows over ranks, whole rows in a cell.
        (Box((4096, 0), (4096, 1024)), (32768, 1024), None, (4096, 1024)),
        (Box((8192, 0), (8192, 1024)), (32768, 1024), None, (4096, 1024)),
        # Columns over ranks: cells of columns.
        (Box((0, 512), (8192, 512)), (8192, 1024), None, (8192, 512)),
        # The last block of a vocabulary over eight ranks is shorter, and is cut like the others.
        (Box((0, 0), (6283, 1600)), (50257, 1600), (6283, 1600), (6283, 534)),
        (Box((43981, 0), (6276, 1600)), (50257, 1600), (6283, 1600), (6283, 534)),
        # Two unequal halves meet where one ends and the other begins.
        (Box((0,), (9,)), (13,), None, (9,)),
        (Box((9,), (4,)), (13,), None, (9,)),
        # A prime length in one axis cannot join above the smallest share.
        (Box((0,), (16777259,)), (3 * 16777259,), None, (8392704,)),
    ],
)
def test_known_blocks(box: Box, shape: tuple[int, ...], cut: tuple[int, ...] | None, cell: tuple[int, ...]) -> None:
    assert plan_block(box, shape, 4 if len(shape) > 1 else 1, 16 << 20, cut).cell == cell


def test_a_block_outside_its_array_is_refused() -> None:
    with pytest.raises(Invalid, match="no block"):
        plan_block(Box((3,), (2,)), (4,), 4, 64)


@pytest.mark.parametrize("size", [(1 << 61) - 1, 1 << 60])
def test_the_largest_blocks_are_planned_in_a_blink(size: int) -> None:
    began = time.process_time()
    assert plan_block(Box((0,), (size,)), (3 * size,), 1, 1 << 50).size > 1
    assert time.process_time() - began < 5


AXES = st.integers(1, 60).flatmap(
    lambda full: st.integers(0, full - 1).flatmap(
        lambda start: st.tuples(st.just(full), st.just(start), st.integers(1, full - start), st.integers(0, full))
    )
)


@given(axes=st.lists(AXES, min_size=1, max_size=3), itemsize=itemsizes, target=st.integers(1, 40_000))
@example(axes=[(60, 4, 4, 3)], itemsize=8, target=64)
@example(axes=[(60, 3, 4, 3)], itemsize=8, target=64)
@example(axes=[(60, 7, 30, 0), (60, 0, 60, 0)], itemsize=8, target=4096)
def test_cells_of_a_block_are_cells_of_the_array_and_not_too_small_or_it_is_planned_by_itself(
    axes: list[tuple[int, int, int, int]], itemsize: int, target: int
) -> None:
    shape, offset, sizes, cut = zip(*axes, strict=True)
    grid, alone = plan_block(Box(offset, sizes), shape, itemsize, target, cut), plan(sizes, itemsize, target)
    if grid == alone:
        return
    for (full, start, size, _), part in zip(axes, grid.cell, strict=True):
        assert start % part == 0
        assert size % part == 0 or start + size == full
    large = grid.cell_nbytes >= max(alone.nbytes / 16, ALIGNMENT if alone.nbytes > ALIGNMENT else 0)
    assert large or grid.cell_nbytes >= target / 16


@given(parts=st.integers(2, 6), size=st.integers(1, 60), columns=st.integers(1, 60), itemsize=itemsizes, target=targets)
def test_equal_blocks_have_one_cell_though_nobody_says_how_the_array_is_cut(
    parts: int, size: int, columns: int, itemsize: int, target: int
) -> None:
    shape = (parts * size, columns)
    boxes = [Box((i * size, 0), (size, columns)) for i in range(parts)]
    assert len({plan_block(box, shape, itemsize, target).cell for box in boxes}) == 1
