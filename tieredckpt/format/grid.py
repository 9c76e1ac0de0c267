"""Grids that divide an array into cells which are contiguous ranges of its row-major bytes.

Such a cell has the shape ``(1, ..., 1, r, full, ...)``: one index on the outer axes, ``r`` rows on the cut
axis, and everything on the inner ones. A chunk is thus one slice of the leaf's memory and, at the same time,
a chunk of a regular zarr version 3 grid (https://zarr-specs.readthedocs.io, "Regular grids").
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Final, NamedTuple

from tieredckpt.errors import Invalid

__all__ = ["MAX_RANK", "Cell", "Grid", "cell_key", "cells", "check", "plan"]

MAX_RANK: Final = 32
"""Axes of an array at most; TensorStore opens no more."""

_MAX_BYTES = (1 << 63) - 1


@dataclass(frozen=True, slots=True)
class Grid:
    """An array of ``shape``, with items of ``itemsize`` bytes, divided into cells of shape ``cell``."""

    shape: tuple[int, ...]
    cell: tuple[int, ...]
    itemsize: int

    @property
    def counts(self) -> tuple[int, ...]:
        """Cells along each axis; 0 where the array is empty."""
        return tuple([-(-full // part) for full, part in zip(self.shape, self.cell, strict=True)])

    @property
    def size(self) -> int:
        """Number of cells; 1 for an array without axes."""
        return prod(self.counts)

    @property
    def cell_nbytes(self) -> int:
        """Bytes of one cell, and so of every chunk, padding included."""
        return prod(self.cell) * self.itemsize

    @property
    def nbytes(self) -> int:
        """Bytes of the array."""
        return prod(self.shape) * self.itemsize


class Cell(NamedTuple):
    """One cell: its grid index, where its bytes start in the row-major array, and how many are the array's.

    The remaining ``cell_nbytes - nbytes`` bytes of the chunk are zero padding.
    """

    index: tuple[int, ...]  # type: ignore[assignment]  # hides tuple.index, which no cell needs
    start: int
    nbytes: int


def plan(shape: tuple[int, ...], itemsize: int, target: int) -> Grid:
    """The grid for an array: the largest cells of at most ``target`` bytes, of equal height.

    The cut axis is the outermost one whose rows fit into ``target``. Its rows are spread evenly, so the last
    cell is short by less than one row per cell along that axis. A single item larger than ``target`` is a
    cell of its own. An empty array gets cells of one item, of which there are none.

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
    return Grid(shape, (1,) * axis + (height,) + shape[axis + 1 :], itemsize)


def cells(grid: Grid) -> Iterator[Cell]:
    """Every cell in row-major order of its index, which is also the order of its bytes.

    ``grid`` must be one that `plan` made or `check` accepted.
    """
    if not grid.shape:
        yield Cell((), 0, grid.itemsize)
        return
    axis = _cut_axis(grid)
    row = prod(grid.shape[axis + 1 :]) * grid.itemsize
    rows, height = grid.shape[axis], grid.cell[axis]
    inner = (0,) * (len(grid.shape) - axis - 1)
    for plane, outer in enumerate(product(*map(range, grid.shape[:axis]))):
        base = plane * rows * row
        for i, first in enumerate(range(0, rows, height)):
            yield Cell((*outer, i, *inner), base + first * row, min(height, rows - first) * row)


def cell_key(index: tuple[int, ...]) -> str:
    """Key of a cell below its array: zarr's default chunk key encoding, ``c/0/1``, or ``c`` without axes."""
    return "/".join(("c", *map(str, index)))


def check(grid: Grid) -> Grid:
    """``grid`` itself if it has the form that `plan` makes; for grids that were read from somewhere.

    Raises:
        Invalid: axes out of range, cells that are no contiguous range or exceed the array, or sizes of 2**63
            bytes and more.
    """
    shape, cell = grid.shape, grid.cell
    fine = len(shape) == len(cell) <= MAX_RANK and grid.itemsize >= 1
    fine = fine and min(shape, default=0) >= 0
    fine = fine and all(1 <= part <= max(1, full) for full, part in zip(shape, cell, strict=True))
    fine = fine and grid.nbytes <= _MAX_BYTES and grid.cell_nbytes <= _MAX_BYTES
    if fine:
        axis = _cut_axis(grid)
        fine = cell[axis + 1 :] == shape[axis + 1 :]
    if not fine:
        raise Invalid(
            f"cells of shape {cell} do not divide an array of shape {shape} with items of {grid.itemsize} "
            "bytes into contiguous ranges"
        )
    return grid


def _cut_axis(grid: Grid) -> int:
    """The first axis along which a cell is longer than one, or the last axis."""
    for axis, part in enumerate(grid.cell):
        if part > 1:
            return axis
    return len(grid.cell) - 1
