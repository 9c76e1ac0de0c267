"""Replicated leaves: decide, without communication, which part of them each rank stores.

As in FastPersist (https://arxiv.org/abs/2406.13768), the replicas divide the bytes evenly among themselves. The cells
of all leaves that the same ranks hold, one leaf after the other, form a line of bytes. The line is cut into equal
parts, one for each rank. A cell belongs to the part in which its middle lies.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from math import prod
from typing import NamedTuple

import msgspec

from tieredckpt.format.boxes import Box
from tieredckpt.format.grid import Grid, plan_block
from tieredckpt.format.manifest import INLINE_MAX
from tieredckpt.tree.flatten import Flat, Replicated
from tieredckpt.tree.leaf import ArrayLeaf, Place, storage_key
from tieredckpt.tree.select import choose

__all__ = ["split"]

_CELLS_EACH = 8
"""The fewest cells of a group that a rank should have: a rank's excess is at most half a cell."""
_SMALLEST = 256 << 10
"""For `_CELLS_EACH`, cells are not made smaller than so many bytes."""


class _Shares(NamedTuple):
    """Which parts of a line of bytes, cut into ``of`` of them, this rank has."""

    of: int
    mine: range


@dataclasses.dataclass(frozen=True, slots=True)
class _Line:
    """The cells that the same ranks have, one after the other."""

    shares: _Shares
    grids: dict[int, Grid]
    """Of the leaves that are cut, by their index in the tree."""
    nbytes: int


def split(flat: Flat, patterns: Sequence[str], *, rank: int, nodes: Sequence[str], chunk_size: int) -> Flat:
    """``flat`` with what this rank stores of the leaves that other ranks have too.

    These are the leaves that ``patterns`` choose, which all ranks must have alike, and the shards that are known to
    have replicas, on ranks as PyTorch or JAX count them. Every rank gets about the same number of their bytes. Where
    their ranks are on several nodes, equally many on each, the ranks of every node together have everything; rank 0
    decides which holder of a part writes it to the slower tiers. A leaf so small that it lies in a step's index stays
    whole on every rank. `Flat.replicated` has the parts that others store, for comparison.

    Args:
        flat: the whole tree of this rank.
        patterns: paths and patterns as `tieredckpt.tree.select` takes them; some may choose nothing.
        rank: this one.
        nodes: of every rank, by rank.
        chunk_size: the largest chunk, in bytes.
    """
    lines: dict[tuple[int, ...], _Line] = {}
    line_of: dict[int, tuple[int, ...]] = {}
    everyone = tuple(range(len(nodes)))
    plain = [leaf.key for leaf in flat.arrays if leaf.place is None]
    chosen = {key for _, keys in choose(patterns, plain) for key in keys}
    for i, leaf in enumerate(flat.arrays):
        ranks = leaf.place.replicas if leaf.place is not None else everyone if leaf.key in chosen else ()
        if len(ranks) > 1 and rank in ranks and ranks[-1] < len(nodes):
            line_of[i] = ranks
    for ranks in dict.fromkeys(line_of.values()):
        members = [i for i, of in line_of.items() if of == ranks]
        lines[ranks] = _line(flat.arrays, members, _shares(ranks, rank, nodes), chunk_size)
    arrays: list[ArrayLeaf] = []
    here: dict[tuple[int, ...], list[str]] = {ranks: [] for ranks in lines}
    elsewhere: dict[tuple[int, ...], list[ArrayLeaf]] = {ranks: [] for ranks in lines}
    begins = dict.fromkeys(lines, 0)
    for i, leaf in enumerate(flat.arrays):
        found = lines[line_of[i]] if i in line_of else None
        if found is None or i not in found.grids:
            arrays.append(leaf)
            continue
        ranks, grid = line_of[i], found.grids[i]
        for share in _sharing(grid, begins[ranks], found.nbytes, found.shares.of):
            cells = _cells(grid, begins[ranks], found.nbytes, found.shares.of, share)
            pieces = _parts(leaf, grid, cells)
            if share in found.shares.mine:
                arrays += (mine := tuple(pieces))
                here[ranks] += [piece.key for piece in mine]
            else:
                elsewhere[ranks] += pieces
        begins[ranks] += grid.size * grid.cell_nbytes
    groups = tuple(Replicated(ranks, tuple(here[ranks]), tuple(elsewhere[ranks])) for ranks in lines)
    return dataclasses.replace(flat, arrays=tuple(arrays), in_pieces=True, form=None, replicated=groups)


def _shares(ranks: tuple[int, ...], rank: int, nodes: Sequence[str]) -> _Shares:
    by_node: dict[str, list[int]] = {}
    for member in ranks:
        by_node.setdefault(nodes[member], []).append(member)
    sizes = {len(members) for members in by_node.values()}
    if len(sizes) > 1:
        # A rank of a small node would have to hold more than others; so nobody holds anything twice.
        at = ranks.index(rank)
        return _Shares(len(ranks), range(at, at + 1))
    at = by_node[nodes[rank]].index(rank)
    count = len(by_node)
    return _Shares(len(ranks), range(at * count, (at + 1) * count))


def _line(leaves: Sequence[ArrayLeaf], members: Sequence[int], shares: _Shares, chunk_size: int) -> _Line:
    # Sized by values that are equal in all groups: the cells of one group's shards must align with those of the next.
    nominal = sum(_nominal_nbytes(leaves[i]) for i in members)
    target = min(chunk_size, max(_SMALLEST, nominal // (_CELLS_EACH * shares.of)))
    grids = {}
    for i in members:
        leaf = leaves[i]
        place = leaf.place or Place(leaf.key, leaf.shape, (0,) * len(leaf.shape))
        grid = plan_block(leaf.box, place.shape, leaf.dtype.itemsize, target, place.cut)
        if grid.size * grid.cell_nbytes > INLINE_MAX:
            grids[i] = grid
    return _Line(shares, grids, sum(grid.size * grid.cell_nbytes for grid in grids.values()))


def _nominal_nbytes(leaf: ArrayLeaf) -> int:
    cut = leaf.place.cut if leaf.place is not None else None
    return prod(cut or leaf.shape) * leaf.dtype.itemsize


def _sharing(grid: Grid, begin: int, total: int, shares: int) -> range:
    """The shares to which cells of a grid belong, when its first byte is at ``begin`` of ``total``; see `_cells`."""
    nbytes = grid.cell_nbytes
    first, last = (2 * begin + nbytes, 2 * begin + (2 * grid.size - 1) * nbytes)
    return range(first * shares // (2 * total), last * shares // (2 * total) + 1)


def _cells(grid: Grid, begin: int, total: int, shares: int, share: int) -> range:
    """The cells of a grid that belong to a share, when its first byte is at ``begin`` of ``total``."""

    def first_of(share: int) -> int:
        # The first cell c whose middle, begin + (c + 1/2) * nbytes, is not before share / shares of the total.
        nbytes = grid.cell_nbytes
        first = -(-(2 * total * share - (2 * begin + nbytes) * shares) // (2 * nbytes * shares))
        return min(max(first, 0), grid.size)

    return range(first_of(share), first_of(share + 1))


def _parts(leaf: ArrayLeaf, grid: Grid, cells: range) -> Iterator[ArrayLeaf]:
    """The pieces of a leaf that consist of these cells."""
    if len(cells) == grid.size:
        place = leaf.place
        if place is not None:
            place = None if leaf.shape == place.shape else dataclasses.replace(place, cell=grid.cell, replicas=())
        yield msgspec.structs.replace(leaf, place=place)
        return
    key, shape = (leaf.key, leaf.shape) if leaf.place is None else (leaf.place.key, leaf.place.shape)
    for some in _boxes(grid.counts, cells.start, cells.stop):
        starts = [i * n for i, n in zip(some.offset, grid.cell, strict=True)]
        ends = [min(i * n, full) for i, n, full in zip(some.end, grid.cell, grid.shape, strict=True)]
        inner = Box(tuple(starts), tuple([end - start for start, end in zip(starts, ends, strict=True)]))
        box = Box(tuple([a + b for a, b in zip(leaf.box.offset, inner.offset, strict=True)]), inner.shape)
        yield msgspec.structs.replace(
            leaf,
            key=storage_key(key, shape, box),
            shape=box.shape,
            place=Place(key, shape, box.offset, cell=grid.cell),
            part=_within(leaf.part, inner),
        )


def _within(part: tuple[slice, ...] | None, box: Box) -> tuple[slice, ...]:
    if part is None:
        return box.slices()
    return tuple([slice(a.start + b.start, a.start + b.stop) for a, b in zip(part, box.slices(), strict=True)])


def _boxes(counts: tuple[int, ...], first: int, stop: int) -> Iterator[Box]:
    """The fewest boxes of indices that the row-major numbers from ``first`` to before ``stop`` make up."""
    if first >= stop:
        return
    plane = prod(counts[1:])
    low, high = -(-first // plane), stop // plane
    if low > high:
        yield from _in_plane(counts, high, first - high * plane, stop - high * plane)
        return
    yield from _in_plane(counts, low - 1, first - (low - 1) * plane, plane)
    if low < high:
        yield Box((low, *(0 for _ in counts[1:])), (high - low, *counts[1:]))
    yield from _in_plane(counts, high, 0, stop - high * plane)


def _in_plane(counts: tuple[int, ...], at: int, first: int, stop: int) -> Iterator[Box]:
    """Of the plane ``at`` of the first axis; nothing if ``first`` is not before ``stop``."""
    for box in _boxes(counts[1:], first, stop):
        yield Box((at, *box.offset), (1, *box.shape))
