"""Grids that divide an array into equal cells, the chunks of zarr version 3.

The grid of a whole array has cells of the shape ``(1, ..., 1, r, full, ...)``: one index on the outer axes,
``r`` rows on the cut axis, and everything on the inner ones. A chunk is thus one slice of the leaf's memory
and, at the same time, a chunk of a regular zarr grid (https://zarr-specs.readthedocs.io, "Regular grids").
Where ranks have boxes of an array, `plan_block` cuts each so that all become cells of one grid, which may then
be any boxes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import product
from math import gcd, isqrt, prod
from typing import Final, NamedTuple

import numpy as np

from tieredckpt.errors import Invalid
from tieredckpt.format.boxes import Box
from tieredckpt.format.layout import ALIGNMENT

__all__ = ["MAX_RANK", "Cell", "Grid", "cell_box", "cell_key", "cells", "check", "overlapping", "plan", "plan_block"]

MAX_RANK: Final = 32
"""Axes of an array at most; TensorStore opens no more."""

_MAX_BYTES = (1 << 63) - 1

_MOST_TRIED = 1 << 20
"""For numbers beyond its square, larger divisors are found only as the complement of smaller ones."""

_LEAST_OF_PADDING = 64
"""Cells that fill pages are taken if all their padding is at most this part of the array."""
_MOST_CELLS = 3
"""And if there are at most so many times as many of them as of other cells."""
_COUNTS_TRIED = 16

_SMALLEST_SHARE = 16
"""A block is stored by itself if its cells, to join with others, would be less than this part of the target."""


@dataclass(frozen=True, slots=True)
class Grid:
    """An array of ``shape``, with items of ``itemsize`` bytes, divided into cells of shape ``cell``."""

    shape: tuple[int, ...]
    cell: tuple[int, ...]
    itemsize: int
    counts: tuple[int, ...] = field(init=False, compare=False, repr=False)
    """Cells along each axis; 0 where the array is empty."""
    size: int = field(init=False, compare=False, repr=False)
    """Number of cells; 1 for an array without axes."""
    cell_nbytes: int = field(init=False, compare=False, repr=False)
    """Bytes of one cell, and so of every chunk, padding included."""
    nbytes: int = field(init=False, compare=False, repr=False)
    """Bytes of the array."""

    def __post_init__(self) -> None:
        counts = tuple([-(-full // part) for full, part in zip(self.shape, self.cell, strict=False) if part])
        for name, value in (
            ("counts", counts),
            ("size", prod(counts)),
            ("cell_nbytes", prod(self.cell) * self.itemsize),
            ("nbytes", prod(self.shape) * self.itemsize),
        ):
            object.__setattr__(self, name, value)

    @property
    def contiguous(self) -> bool:
        """Whether every cell is one range of the row-major array, and its padding the end of its chunk."""
        inner = _cut_axis(self) + 1
        return self.cell[inner:] == self.shape[inner:]


class Cell(NamedTuple):
    """One cell: its grid index, where its first item starts in the row-major array, and bytes of the array in it.

    The remaining ``cell_nbytes - nbytes`` bytes of the chunk are zero padding. Only if the grid is
    `Grid.contiguous` are the bytes of the array the range ``start : start + nbytes`` of it, and the start of
    the chunk; of any other grid, `cell_box` tells which items a cell has.
    """

    index: tuple[int, ...]  # type: ignore[assignment]  # hides tuple.index, which no cell needs
    start: int
    nbytes: int


@lru_cache(maxsize=4096)  # every save plans the arrays of the one before
def plan(shape: tuple[int, ...], itemsize: int, target: int) -> Grid:
    """The grid for an array: large cells of at most ``target`` bytes, of equal height.

    The cut axis is the outermost one whose rows fit into ``target``. Its rows are spread evenly, so the last cell is
    short by less than one row per cell along that axis. Cells that fill whole pages are preferred if they take at most
    a 64th more than the array, and are at most three times as many: then the cells of a step in RAM can be mapped to
    read as one array. A single item larger than ``target`` is a cell of its own. An empty array gets a grid of no
    cells, with one item each.

    Args:
        shape: of the array, axes of at least 0.
        itemsize: bytes of an item, at least 1.
        target: bytes of a cell, at least 1.

    Raises:
        Invalid: arguments out of range, or an array of 2**63 bytes and more.
    """
    nbytes = prod(shape) * itemsize
    sane = itemsize >= 1 and target >= 1 and min(shape, default=0) >= 0
    if not sane or len(shape) > MAX_RANK or nbytes > _MAX_BYTES:
        raise Invalid(
            f"no grid for shape {shape} with items of {itemsize} bytes and cells of {target}: "
            f"sizes are at least 1, axes at least 0 and at most {MAX_RANK}, and arrays below 2**63 bytes"
        )
    if nbytes == 0 or not shape:
        return Grid(shape, (1,) * len(shape), itemsize)
    axis = len(shape) - 1
    row = itemsize
    while axis > 0 and row * shape[axis] <= target:
        row *= shape[axis]
        axis -= 1
    rows = shape[axis]
    count = -(-rows // max(1, target // row))
    height = -(-rows // count)
    if count > 1 and (prod(shape[:axis]) == 1 or rows * row % ALIGNMENT == 0):  # else cells begin within pages
        height = _in_pages(rows, row, count, target) or height
    return Grid(shape, (1,) * axis + (height,) + shape[axis + 1 :], itemsize)


def _in_pages(rows: int, row: int, fewest: int, target: int) -> int:
    """Rows per cell, for ``fewest`` cells or some more, so that cells fill pages and waste little; 0 if impossible."""
    unit = ALIGNMENT // gcd(row, ALIGNMENT)
    for count in range(fewest, min(_MOST_CELLS * fewest, fewest + _COUNTS_TRIED) + 1):
        height = -(-rows // (count * unit)) * unit
        padding = -rows % height
        if height * row <= target and padding * _LEAST_OF_PADDING <= rows:
            return height
    return 0


def plan_block(
    box: Box, shape: tuple[int, ...], itemsize: int, target: int, cut: tuple[int, ...] | None = None
) -> Grid:
    """The grid of one block of an array, such that its cells are, where possible, cells of a grid of the array.

    They are if the cell divides the block's offset on every axis, and its shape where the block does not end with the
    array. Blocks of one regular mesh get the same cell without knowing of each other, so they join. The cell is the
    largest such cell of at most ``target`` bytes, preferably of whole rows. If this cell is too small, the block is
    planned by itself, as `plan` does. Too small is a cell below a sixteenth of the target and also below a sixteenth of
    the block or, for a block larger than a page, below a page, the least size of an extent.

    Args:
        box: where the block lies in the array.
        shape: of the array.
        itemsize: bytes of an item, at least 1.
        target: bytes of a cell, at least 1.
        cut: every block of the array begins at multiples of it, such as the shape of a full block of a mesh, whose last
            block along an axis may be shorter. Without it, a short last block is planned as if it had a mesh of its
            own, and may not join.

    Returns:
        The grid of an array of ``box.shape``. Its cell may be larger than that.

    Raises:
        Invalid: as `plan` does, or a box that is not inside the array.
    """
    whole = plan(shape, itemsize, target)
    if not Box.whole(shape).contains(box) or min(box.shape, default=0) < 0:
        raise Invalid(f"no block at {box.offset} of shape {box.shape} in an array of shape {shape}")
    if box.shape == shape:
        return whole
    alone = plan(box.shape, itemsize, target)
    if not box.size:
        return alone
    steps = tuple([_step(*axis) for axis in zip(box.offset, box.shape, shape, cut or (0,) * len(shape), strict=True)])
    cell = _largest(steps, box.shape, itemsize, target)
    least = max(alone.nbytes / _SMALLEST_SHARE, ALIGNMENT if alone.nbytes > ALIGNMENT else 0)
    if prod(cell) * itemsize < min(least, target / _SMALLEST_SHARE):
        return alone
    return Grid(box.shape, cell, itemsize)


def _step(start: int, size: int, full: int, cut: int) -> int:
    """Divisor of a cell on an axis so that cells begin and end with the block; 0 if any cell does."""
    if size == full:
        return 0
    last = start + size == full
    if cut >= 1 and start % cut == 0 and (last or size % cut == 0):
        return cut
    # Two blocks of unequal size join: the first is cut by its size, and the last by its offset, which equals that.
    return start if last and start % size else gcd(start, size)


@lru_cache(maxsize=4096)
def _largest(steps: tuple[int, ...], shape: tuple[int, ...], itemsize: int, target: int) -> tuple[int, ...]:
    """The cell whose sides divide ``steps``, of whole rows unless those are too few, else as large as found."""
    room = max(1, target // itemsize)
    inwards = range(len(shape) - 1, -1, -1)
    best = _fitted(steps, shape, room, inwards, rows=True)
    if prod(best) * _SMALLEST_SHARE >= room:
        return best
    for first in inwards:
        cell = _fitted(steps, shape, room, [first, *(axis for axis in inwards if axis != first)], rows=False)
        best = max(best, cell, key=prod)
    return best


def _fitted(
    steps: tuple[int, ...], shape: tuple[int, ...], room: int, axes: Iterable[int], *, rows: bool
) -> tuple[int, ...]:
    """A cell of at most ``room`` items, each axis in turn as long as can be; ``rows``: one range of the block."""
    cell = [1] * len(shape)
    for axis in axes:
        step, full = steps[axis], shape[axis]
        cell[axis] = _longest(step, room) if step else -(-full // -(-full // room))
        room //= cell[axis]
        if rows and cell[axis] != (step or full):
            break
    return tuple(cell)


@lru_cache(maxsize=4096)
def _longest(step: int, room: int) -> int:
    """The largest divisor of ``step`` up to ``room``."""
    small = np.arange(1, min(isqrt(step), _MOST_TRIED) + 1)
    small = small[step % small == 0]
    divisors = np.concatenate([small, step // small])
    return int(divisors[divisors <= room].max())


def cells(grid: Grid) -> Iterator[Cell]:
    """Every cell in row-major order of its index, for a contiguous grid also the order of its bytes.

    ``grid`` must be one that `plan` made or `check` accepted.
    """
    if grid.cell == grid.shape:  # as most arrays are
        return iter((Cell((0,) * len(grid.shape), 0, grid.cell_nbytes),))
    return _cells(grid)


def _cells(grid: Grid) -> Iterator[Cell]:
    if not grid.size:
        return
    axis = _cut_axis(grid)
    if grid.cell[axis + 1 :] != grid.shape[axis + 1 :]:
        yield from _any_cells(grid)
        return
    row = prod(grid.shape[axis + 1 :]) * grid.itemsize
    rows, height = grid.shape[axis], grid.cell[axis]
    inner = (0,) * (len(grid.shape) - axis - 1)
    for plane, outer in enumerate(product(*map(range, grid.shape[:axis]))):
        base = plane * rows * row
        for i, first in enumerate(range(0, rows, height)):
            yield Cell((*outer, i, *inner), base + first * row, min(height, rows - first) * row)


def _any_cells(grid: Grid) -> Iterator[Cell]:
    strides = [prod(grid.shape[axis + 1 :]) * grid.itemsize for axis in range(len(grid.shape))]
    # Of every axis: how far along it a cell starts, in bytes, and how many items of the array it has there.
    starts, sizes = [], []
    for full, part, stride in zip(grid.shape, grid.cell, strides, strict=True):
        firsts = range(0, full, part)
        starts.append([first * stride for first in firsts])
        sizes.append([min(part, full - first) for first in firsts])
    for index, start, size in zip(
        product(*map(range, grid.counts)), map(sum, product(*starts)), map(prod, product(*sizes)), strict=True
    ):
        yield Cell(index, start, size * grid.itemsize)


def cell_box(grid: Grid, index: tuple[int, ...]) -> Box:
    """The items of the array that the cell of that index has; its padding is left out."""
    offset = tuple([i * part for i, part in zip(index, grid.cell, strict=True)])
    sizes = zip(offset, grid.cell, grid.shape, strict=True)
    return Box(offset, tuple([min(part, full - start) for start, part, full in sizes]))


def overlapping(grid: Grid, box: Box) -> Iterator[tuple[int, Box]]:
    """Ordinal and box of every cell that has items of ``box``, in row-major order; a box may be of any size.

    The ordinal is the place in `cells`, the box that of `cell_box`.
    """
    part = Box.whole(grid.shape).intersection(box)
    if part is None:
        return
    spans = [range(a // n, -(-b // n)) for a, b, n in zip(part.offset, part.end, grid.cell, strict=True)]
    counts = grid.counts
    for index in product(*spans):
        ordinal = 0
        for i, count in zip(index, counts, strict=True):
            ordinal = ordinal * count + i
        yield ordinal, cell_box(grid, index)


@lru_cache(maxsize=4096)
def cell_key(index: tuple[int, ...]) -> bytes:
    """Key of a cell below its array: zarr's default chunk key encoding, ``c/0/1``, or ``c`` without axes."""
    return "/".join(("c", *map(str, index))).encode()


def check(grid: Grid) -> Grid:
    """``grid`` itself if it is valid; for grids that were read from somewhere.

    Raises:
        Invalid: axes out of range, cells without items, or sizes of 2**63 bytes and more.
    """
    shape, cell = grid.shape, grid.cell
    fine = len(shape) == len(cell) <= MAX_RANK and grid.itemsize >= 1
    fine = fine and min(shape, default=0) >= 0 and min(cell, default=1) >= 1
    if not (fine and grid.nbytes <= _MAX_BYTES and grid.cell_nbytes <= _MAX_BYTES):
        raise Invalid(
            f"cells of shape {cell} do not divide an array of shape {shape} with items of {grid.itemsize} bytes"
        )
    return grid


def _cut_axis(grid: Grid) -> int:
    """The first axis along which a cell is longer than one, or the last axis."""
    for axis, part in enumerate(grid.cell):
        if part > 1:
            return axis
    return len(grid.cell) - 1
