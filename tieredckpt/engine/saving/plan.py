"""How the arrays of a tree are cut into cells, and which of them lie in the index; the same for trees of one form."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tieredckpt.engine.tier.slab_index import slab_size
from tieredckpt.format.grid import Grid, plan, plan_block
from tieredckpt.format.manifest import INLINE_MAX
from tieredckpt.tree.leaf import ArrayLeaf

__all__ = ["Plan", "snapshot_size"]


@dataclass(frozen=True, slots=True)
class Plan:
    """How the arrays of a tree are cut; it serves every tree of the same form."""

    keys: list[str]
    """Storage keys, by index of the leaf as all that follows."""
    grids: list[Grid]
    dtypes: list[np.dtype[Any]]
    gathered: list[int]
    """The leaves that lie in the index as one cell, whose bytes are those of the array."""
    inline: list[int]
    """The other leaves that lie in the index."""
    paged: list[int]
    """The leaves whose cells take pages."""
    small: list[str]
    """Storage keys of the leaves that lie in the index: those of ``gathered``, then those of ``inline``."""
    small_nbytes: list[int]
    """Bytes of their arrays."""
    nbytes: int
    """Bytes of all arrays."""
    largest: int
    """Bytes of the largest cell that takes pages; 1 if none does."""

    @classmethod
    def of(cls, leaves: Sequence[ArrayLeaf], chunk_size: int, inline_max: int = INLINE_MAX) -> Plan:
        """Cut every array into cells of about ``chunk_size`` bytes; up to ``inline_max`` of one lie in the index."""
        grids = [_grid(leaf, chunk_size) for leaf in leaves]
        gathered: list[int] = []
        inline: list[int] = []
        paged: list[int] = []
        for i, (leaf, grid) in enumerate(zip(leaves, grids, strict=True)):
            if _takes_pages(grid, inline_max):
                paged.append(i)
            elif grid.cell == leaf.shape and leaf.part is None and leaf.dtype.kind != "b":
                gathered.append(i)
            else:
                inline.append(i)
        keys, small = [leaf.key for leaf in leaves], gathered + inline
        return cls(
            keys,
            grids,
            [leaf.dtype for leaf in leaves],
            gathered,
            inline,
            paged,
            small=[keys[i] for i in small],
            small_nbytes=[grids[i].nbytes for i in small],
            nbytes=sum([grid.nbytes for grid in grids]),
            largest=max((grids[i].cell_nbytes for i in paged), default=1),
        )


def snapshot_size(leaves: Iterable[ArrayLeaf], chunk_size: int, ranks_with: Callable[[ArrayLeaf], int]) -> int:
    """Bytes of a slab that a snapshot of these leaves takes; their data may be absent.

    A leaf that several ranks have, as ``ranks_with`` tells, counts with this rank's share.
    """
    total = 0
    for leaf in leaves:
        grid = _grid(leaf, chunk_size)
        if _takes_pages(grid):
            total += grid.size * slab_size(grid.cell_nbytes) // ranks_with(leaf)
    return total


def _takes_pages(grid: Grid, inline_max: int = INLINE_MAX) -> bool:
    return grid.size * grid.cell_nbytes > inline_max


def _grid(leaf: ArrayLeaf, chunk_size: int) -> Grid:
    """The grid of a leaf; a piece of an array gets, where possible, cells of one grid of the whole array."""
    if leaf.place is None:
        return plan(leaf.shape, leaf.dtype.itemsize, chunk_size)
    if leaf.place.cell is not None:
        return Grid(leaf.shape, leaf.place.cell, leaf.dtype.itemsize)
    return plan_block(leaf.box, leaf.place.shape, leaf.dtype.itemsize, chunk_size, leaf.place.cut)
