"""Joins the blocks of an array into one array if their cells lie on one grid; no byte of a chunk moves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from tieredckpt.errors import Conflict
from tieredckpt.format import layout
from tieredckpt.format.boxes import Box, tile
from tieredckpt.format.grid import Grid
from tieredckpt.format.manifest import ArrayIndex
from tieredckpt.format.structure import ArrayNode, Node, array_nodes

__all__ = ["join"]

_Block: TypeAlias = tuple[tuple[int, ...], ArrayIndex]
"""Offset of a block in its array, and its chunks."""


def join(structure: Node, arrays: Mapping[str, ArrayIndex]) -> dict[str, ArrayIndex]:
    """The arrays of a step by storage key, joined into as few as possible.

    An array whose blocks have cells of one shape, and offsets and ends that are multiples of it (or the array's
    end), becomes one array with the blocks' own chunks. The blocks of any other stay as they are.

    Args:
        structure: of the whole tree.
        arrays: whole ones and blocks, by storage key, each of the dtype of its array in the structure and inside of it.

    Raises:
        Conflict: an array of the structure is missing, given both whole and in blocks, or not tiled by its blocks.
    """
    blocks: dict[str, list[_Block]] = {}
    joined: dict[str, ArrayIndex] = {}
    for name, array in arrays.items():
        block = layout.parse_block_key(name)
        if block is None:
            joined[name] = array
        else:
            blocks.setdefault(block[0], []).append((block[1], array))
    for node in array_nodes(structure):
        found = blocks.pop(node.key, None)
        if found is None and node.key not in joined:
            raise Conflict(f"no rank saved array {node.key!r}")
        if found is not None and node.key in joined:
            raise Conflict(f"array {node.key!r} was saved whole by one rank, and as shards by another")
        if found is not None:
            joined.update(_array(node, found))
    return joined


def _array(node: ArrayNode, blocks: list[_Block]) -> dict[str, ArrayIndex]:
    if 0 not in node.shape:
        blocks = [block for block in blocks if block[1].chunks]
    whole = _on_one_grid(node.shape, blocks)
    if whole is not None:
        return {node.key: whole}
    if not tile(node.shape, [Box(offset, array.grid.shape) for offset, array in blocks]):
        raise Conflict(
            f"the shards of array {node.key!r} do not add up to its shape {node.shape}: every item must be "
            "in the shard of one rank; check their offsets"
        )
    return {layout.block_key(node.key, offset): array for offset, array in blocks}


def _on_one_grid(shape: tuple[int, ...], blocks: Sequence[_Block]) -> ArrayIndex | None:
    """All blocks as one array, None if their cells are not the cells of one grid, each once."""
    if not blocks:
        return None
    sample = blocks[0][1]
    grid = Grid(shape, sample.grid.cell, sample.grid.itemsize)
    if grid.size == 0:
        return ArrayIndex(grid, sample.dtype, [])
    count = sum(len(array.chunks) for _, array in blocks)
    if any(array.grid.cell != grid.cell for _, array in blocks) or count != grid.size:
        return None
    cell, full = np.array(grid.cell, np.int64), np.array(shape, np.int64)
    offsets = np.array([offset for offset, _ in blocks], np.int64)
    ends = offsets + np.array([array.grid.shape for _, array in blocks], np.int64)
    if not ((offsets % cell == 0) & ((ends % cell == 0) | (ends == full))).all():
        return None
    ordinals = _ordinals(grid, offsets // cell, -(-ends // cell))
    order = np.argsort(ordinals)
    if not np.array_equal(ordinals[order], np.arange(grid.size)):
        return None
    chunks = list(chain.from_iterable(array.chunks for _, array in blocks))
    return ArrayIndex(grid, sample.dtype, [chunks[index] for index in order.tolist()])


def _ordinals(grid: Grid, first: NDArray[np.int64], end: NDArray[np.int64]) -> NDArray[np.int64]:
    """Ordinals of the cells of all blocks, one block after the other; a block has the cells from first to end."""
    ordinals = np.zeros(len(first), np.int64)
    for axis, count in enumerate(grid.counts):
        sizes = end[:, axis] - first[:, axis]
        # Row-major: what was found so far are rows of cells, each of which becomes as many as the block has here.
        begin = np.repeat(np.cumsum(sizes) - sizes, sizes)
        along = np.repeat(first[:, axis], sizes) + np.arange(len(begin)) - begin
        ordinals = np.repeat(ordinals, sizes) * count + along
        first, end = np.repeat(first, sizes, axis=0), np.repeat(end, sizes, axis=0)
    return ordinals
