"""The copy of a tree into RAM: what there is to copy, cell by cell, and the threads' loop that does it.

Pure of asyncio: the engine plans a `Snapshot`, runs `Snapshot.work` on several threads, and looks at what
came out. The heavy calls (copy, digest) release the GIL.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from tieredckpt.engine.tier.slab_index import slab_size
from tieredckpt.format.digest import BLOCK, Digester, copy_and_digest, digest, digest_each
from tieredckpt.format.grid import Grid, cell_box, cells, plan, plan_block
from tieredckpt.format.manifest import INLINE_MAX, ArrayIndex, Chunk
from tieredckpt.format.ocdbt import Extent
from tieredckpt.tree.arrays import ArrayLeaf, host_view, row_major_bytes, small_bytes

__all__ = ["Cell", "Copied", "Plan", "Room", "Snapshot", "snapshot_size"]

Bytes = npt.NDArray[np.uint8]


class Room(Protocol):
    """Where copies go: a slab and the index of what lies in it."""

    def allocate(self, nbytes: int) -> tuple[int, Bytes] | None:
        """An extent's offset and memory, or None when the slab is full."""

    def add(self, digest: bytes, offset: int, nbytes: int) -> int:
        """Use what was copied to ``offset``; returns where the chunk lies (elsewhere if it was there already)."""

    def take(self, digest: bytes) -> int | None:
        """Use a chunk that is there already: its offset, or None."""

    def release(self, offset: int, nbytes: int) -> None:
        """Give an extent back that was not used after all."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One cell to copy: the bytes of ``view`` that it covers, as a range (contiguous) or as slices."""

    array: int
    ordinal: int
    nbytes: int
    """Of the whole cell; the source may be shorter, the rest is zero padding."""
    source: Bytes | npt.NDArray[Any]
    shape: tuple[int, ...] | None
    """Of the whole cell, where ``source`` is no range of bytes; the source may be shorter along any axis."""
    expected: bytes | None
    """The digest that this cell had in the last two saves: likely unchanged, so digest before copying."""

    def copy_to(self, target: Bytes) -> bytes:
        """Fill ``target`` (``nbytes`` long) and return its digest."""
        if self.shape is None:
            return copy_and_digest(self.source, target)
        return _gather(self.source, target.view(self.source.dtype).reshape(self.shape))

    def digest(self) -> bytes:
        """What `copy_to` would return."""
        if self.shape is None:
            return digest(self.source, self.nbytes - self.source.nbytes)
        return _gather(self.source, np.empty(self.shape, self.source.dtype))


@dataclass(frozen=True, slots=True)
class Copied:
    """A cell in the slab: its digest and offset."""

    cell: Cell
    digest: bytes
    offset: int


@dataclass(frozen=True, slots=True)
class Plan:
    """How the arrays of a tree are cut; it serves every tree of the same form."""

    grids: list[Grid]
    """By index of the leaf."""
    gathered: list[int]
    """The leaves that lie in the index as one cell, whose bytes are those of the array."""
    inline: list[int]
    """The other leaves that lie in the index."""
    paged: list[int]
    """The leaves whose cells take pages."""

    @classmethod
    def of(cls, leaves: Sequence[ArrayLeaf], chunk_size: int) -> Plan:
        """Cut every array into cells of about ``chunk_size`` bytes."""
        found = cls([_grid(leaf, chunk_size) for leaf in leaves], [], [], [])
        for i, (leaf, grid) in enumerate(zip(leaves, found.grids, strict=True)):
            if grid.size * grid.cell_nbytes > INLINE_MAX:
                found.paged.append(i)
            elif grid.cell == leaf.shape and leaf.part is None and leaf.dtype.kind != "b":
                found.gathered.append(i)
            else:
                found.inline.append(i)
        return found


@dataclass
class Snapshot:
    """A tree on its way into RAM."""

    leaves: Sequence[ArrayLeaf]
    plan: Plan
    pending: deque[Cell]
    gathered: list[bytes]
    """The bytes of the leaves that the plan has gathered."""
    inline: dict[int, list[bytes]]
    """Cells of the other small arrays, by index of the leaf: their bytes, padding included."""
    copied: list[Copied] = field(default_factory=list)
    full: bool = False
    """The slab had no room for the next cell; `work` may go on when some was made."""
    new_bytes: int = 0
    """Bytes of the cells that take pages and were not in the slab before."""
    small: dict[str, bytes] = field(default_factory=dict)
    """The digests of the arrays that lie in the index, by key, after `compare_small`."""
    new_small: int = 0
    """Bytes of those of these arrays that have changed, without padding."""
    error: BaseException | None = None
    _stop: bool = False
    _guards_outcome: threading.Lock = field(default_factory=threading.Lock)

    @classmethod
    def of(
        cls,
        leaves: Sequence[ArrayLeaf],
        chunk_size: int,
        expected: Mapping[str, Sequence[bytes | None]],
        plan: Plan | None = None,
    ) -> Snapshot:
        """Plan the cells of ``leaves``, about ``chunk_size`` bytes each, and copy those that lie in the index.

        Args:
            leaves: of the tree.
            chunk_size: the target, in bytes.
            expected: digests by key of the array, None for chunks that changed lately.
            plan: of a tree of the same form, with the same target.
        """
        plan = plan or Plan.of(leaves, chunk_size)
        gathered = small_bytes([leaves[i] for i in plan.gathered])
        inline = {i: _inline(_in_0_and_1(host_view(leaves[i])), plan.grids[i]) for i in plan.inline}
        pending: deque[Cell] = deque()
        for i in plan.paged:
            leaf, grid = leaves[i], plan.grids[i]
            view = _in_0_and_1(host_view(leaf))
            flat = row_major_bytes(view) if leaf.place is None or grid.contiguous else None
            known = expected.get(leaf.key, ())
            if len(known) != grid.size or flat is None:
                known = (None,) * grid.size
            shape = None if flat is not None else grid.cell
            for ordinal, source in enumerate(_sources(view, flat, grid)):
                pending.append(Cell(i, ordinal, grid.cell_nbytes, source, shape, known[ordinal]))
        return cls(leaves, plan, pending, gathered, inline)

    @property
    def grids(self) -> list[Grid]:
        """By index of the leaf."""
        return self.plan.grids

    def compare_small(self, arrays: Mapping[str, ArrayIndex], before: Mapping[str, bytes]) -> None:
        """Find out which arrays that lie in the index have other digests than ``before``; ``arrays`` are of `index`."""
        keys = [self.leaves[i].key for i in (*self.plan.gathered, *self.plan.inline)]
        self.small = {key: b"".join([chunk.digest for chunk in arrays[key].chunks]) for key in keys}
        self.new_small = sum([arrays[key].grid.nbytes for key in keys if before.get(key) != self.small[key]])

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(grid.nbytes for grid in self.grids)

    def stop(self) -> None:
        """Make `work` return after the cell it is at."""
        self._stop = True

    def work(self, room: Room) -> None:
        """Copy pending cells until none is left, the slab is full, or `stop`. Runs on several threads at once."""
        while not self._stop and not self.full:
            try:
                cell = self.pending.popleft()
            except IndexError:
                return
            try:
                copied = self._copy(cell, room)
            except BaseException as error:
                self.error = error
                self._stop = True
                return
            if copied is None:
                with self._guards_outcome:
                    self.pending.appendleft(cell)
                    self.full = True
                return
            self.copied.append(copied)

    def _copy(self, cell: Cell, room: Room) -> Copied | None:
        if cell.expected is not None:
            now = cell.digest()
            if now == cell.expected and (offset := room.take(now)) is not None:
                return Copied(cell, now, offset)
        extent = room.allocate(cell.nbytes)
        if extent is None:
            return None
        offset, memory = extent
        try:
            now = cell.copy_to(memory[: cell.nbytes])
        except BaseException:
            room.release(offset, cell.nbytes)
            raise
        lies_at = room.add(now, offset, cell.nbytes)
        if lies_at == offset:
            with self._guards_outcome:
                self.new_bytes += cell.nbytes
        return Copied(cell, now, lies_at)

    def index(self, extent_of: dict[tuple[int, int], Chunk]) -> dict[str, ArrayIndex]:
        """The arrays' chunks by key; ``extent_of`` has those of the cells, by leaf and ordinal."""
        small = map(Chunk, digest_each(self.gathered), self.gathered)
        chunks: dict[int, Sequence[Chunk]] = dict(zip(self.plan.gathered, zip(small, strict=True), strict=True))
        for i, values in self.inline.items():
            chunks[i] = list(map(Chunk, digest_each(values), values))
        for i in self.plan.paged:
            chunks[i] = [extent_of[i, ordinal] for ordinal in range(self.grids[i].size)]
        return {
            leaf.key: ArrayIndex(grid, leaf.dtype, chunks[i])
            for i, (leaf, grid) in enumerate(zip(self.leaves, self.grids, strict=True))
        }

    def digests(self, arrays: Mapping[str, ArrayIndex]) -> dict[str, list[bytes]]:
        """The digests of the chunks that take pages, by key; ``arrays`` are those of `index`."""
        keys = [self.leaves[i].key for i in self.plan.paged]
        return {key: [chunk.digest for chunk in arrays[key].chunks] for key in keys}

    def in_slab(self, pack: str) -> dict[tuple[int, int], Chunk]:
        """Where every copied cell lies, as extents of ``pack``."""
        return {
            (done.cell.array, done.cell.ordinal): Chunk(done.digest, Extent(pack, done.offset, done.cell.nbytes))
            for done in self.copied
        }


def snapshot_size(leaves: Iterable[ArrayLeaf], chunk_size: int, ranks_with: Callable[[ArrayLeaf], int]) -> int:
    """Bytes of a slab that a snapshot of these leaves takes, whose data may be absent.

    Of a leaf that several ranks have, as ``ranks_with`` tells, it is this rank's share.
    """
    total = 0
    for leaf in leaves:
        grid = _grid(leaf, chunk_size)
        if grid.size * grid.cell_nbytes > INLINE_MAX:
            total += grid.size * slab_size(grid.cell_nbytes) // ranks_with(leaf)
    return total


def _in_0_and_1(view: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """A bool array of the bytes 0 and 1, which alone other readers take: any other byte is true, as in NumPy."""
    if view.dtype.kind != "b":
        return view
    items = view.view(np.uint8)
    return items != 0 if items.size and items.max() > 1 else view


def _grid(leaf: ArrayLeaf, chunk_size: int) -> Grid:
    """The cells of a leaf: of a piece such that, where possible, they are cells of one grid of its array."""
    if leaf.place is None:
        return plan(leaf.shape, leaf.dtype.itemsize, chunk_size)
    if leaf.place.cell is not None:
        return Grid(leaf.shape, leaf.place.cell, leaf.dtype.itemsize)
    return plan_block(leaf.box, leaf.place.shape, leaf.dtype.itemsize, chunk_size, leaf.place.cut)


def _sources(view: npt.NDArray[Any], flat: Bytes | None, grid: Grid) -> Iterator[Bytes | npt.NDArray[Any]]:
    if flat is not None:
        for cell in cells(grid):
            yield flat[cell.start : cell.start + cell.nbytes]
        return
    for cell in cells(grid):
        yield view[cell_box(grid, cell.index).slices()]


def _inline(view: npt.NDArray[Any], grid: Grid) -> list[bytes]:
    """The bytes of the cells of an array."""
    if view.shape == grid.cell:
        return [view.tobytes()]
    found = []
    for cell in cells(grid):
        memory = np.zeros(grid.cell, view.dtype)
        box = cell_box(grid, cell.index)
        memory[tuple(map(slice, box.shape))] = view[box.slices()]
        found.append(memory.tobytes())
    return found


def _gather(source: npt.NDArray[Any], target: npt.NDArray[Any]) -> bytes:
    """Copy ``source`` to the start of ``target`` along every axis, zero the rest, and return the target's digest.

    What is digested is what was copied just before, while it is in the cache.
    """
    memory = target.reshape(-1).view(np.uint8)
    while target.ndim > 1 and target.shape[0] == 1:
        source, target = source[0], target[0]
    row = target.nbytes // target.shape[0]
    rows = max(1, BLOCK // row)
    digester = Digester()
    for first in range(0, target.shape[0], rows):
        block = memory[first * row : (first + rows) * row]
        part = source[first : first + rows]
        copy = target[first : first + rows]
        if part.shape != copy.shape:
            block[:] = 0
        np.copyto(copy[tuple(map(slice, part.shape))], part)
        digester.update(block)
    return digester.digest()
