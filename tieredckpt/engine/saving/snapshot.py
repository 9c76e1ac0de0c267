"""The copy of a tree into RAM: what there is to copy, cell by cell, and the threads' loop that does it.

Pure of asyncio: the engine plans a `Snapshot`, runs `Snapshot.work` on several threads, and looks at what
came out. The heavy calls (copy, digest) release the GIL.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain, compress, zip_longest
from operator import ne
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from tieredckpt.devices.base import Device
from tieredckpt.devices.link import Link, naming
from tieredckpt.devices.memory import HostMemory
from tieredckpt.engine.saving.cells import Cell, DeviceCell, cells_here, cells_of, cells_on_device, in_0_and_1
from tieredckpt.engine.saving.outlet import Outlet
from tieredckpt.engine.saving.plan import Plan
from tieredckpt.errors import DeviceUnavailable
from tieredckpt.format.digest import digest_each
from tieredckpt.format.grid import Grid, cell_box, cells
from tieredckpt.format.manifest import ArrayIndex, Chunk
from tieredckpt.format.ocdbt import Extent
from tieredckpt.tree.arrays import ArrayLeaf, device_view, host_view, small_bytes

__all__ = ["NO_SMALL", "Cell", "Copied", "Digests", "Located", "Room", "Small", "Snapshot"]

Bytes = npt.NDArray[np.uint8]

Located = dict[tuple[int, int], Chunk]
"""Where the chunk of each cell lies, by index of the leaf and ordinal of the cell."""

Digests = dict[tuple[str, tuple[int, ...], int], bytes]
"""The digest of each cell, by key of the leaf, and the cell's shape and ordinal: ranks may divide a leaf anew."""


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
class Copied:
    """A cell in the slab: its digest and offset."""

    cell: Cell
    digest: bytes
    offset: int


class Small(NamedTuple):
    """The arrays of a tree that lie in the index."""

    keys: list[str]
    digests: list[bytes]
    """Of each array: those of its cells, one after the other."""


NO_SMALL = Small([], [])

_Begun = tuple[DeviceCell, int, Bytes]
"""A cell whose copy was begun, the offset of its extent, and its memory."""


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
    outlet: Outlet
    """By which arrays leave their devices."""
    copied: list[Copied] = field(default_factory=list)
    full: bool = False
    """The slab had no room for the next cell; `work` may go on when some was made."""
    new_bytes: int = 0
    """Bytes of the cells that take pages and were not in the slab before."""
    small: Small = NO_SMALL
    """The arrays that lie in the index, after `compare_small`."""
    new_small: int = 0
    """Bytes of those of them that have changed, without padding."""
    error: BaseException | None = None
    _stop: bool = False
    _guards_outcome: threading.Lock = field(default_factory=threading.Lock)
    _unread: dict[int, list[Cell]] = field(default_factory=dict)
    """Cells of arrays that were not to be read, and were in the end, by index of the leaf."""
    _guards_unread: threading.Lock = field(default_factory=threading.Lock)

    @classmethod
    def of(
        cls,
        leaves: Sequence[ArrayLeaf],
        chunk_size: int,
        expected: Mapping[str, Sequence[bytes | None]],
        plan: Plan | None = None,
        outlet: Outlet | None = None,
        same: Mapping[str, Sequence[bytes]] = MappingProxyType({}),
    ) -> Snapshot:
        """Plan the cells of ``leaves``, about ``chunk_size`` bytes each, and copy those that lie in the index.

        Args:
            leaves: of the tree.
            chunk_size: the target, in bytes.
            expected: digests by key of the array, None for chunks that changed lately.
            plan: of a tree of the same form, with the same target.
            outlet: by which arrays leave their devices; arrays of no device need none.
            same: digests by key of arrays that have not changed, which are not read while the slab has their chunks.

        Raises `DeviceUnavailable`, and `Invalid` as `host_view`.
        """
        plan = plan or Plan.of(leaves, chunk_size)
        outlet = outlet or Outlet(HostMemory(), {})
        brought = outlet.small({i: leaves[i] for i in chain(plan.gathered, plan.inline)})
        here = small_bytes([leaves[i] for i in plan.gathered if i not in brought])
        if brought:
            of_here = iter(here)
            gathered = [brought[i].tobytes() if i in brought else next(of_here) for i in plan.gathered]
        else:
            gathered = here
        inline = {
            i: _inline(in_0_and_1(brought[i] if i in brought else host_view(leaves[i])), plan.grids[i])
            for i in plan.inline
        }
        pending: deque[Cell] = deque()
        on_devices: dict[Device, list[Cell]] = {}
        for i in plan.paged:
            leaf, grid = leaves[i], plan.grids[i]
            if len(known := same.get(leaf.key, ())) == grid.size:
                pending.extend(Cell(i, ordinal, grid.cell_nbytes, None, None, one) for ordinal, one in enumerate(known))
            elif (there := device_view(leaf)) is not None:
                on_devices.setdefault(there[0], []).extend(cells_on_device(i, leaf, grid, *there))
            else:
                pending.extend(cells_here(i, leaf, grid, expected.get(leaf.key, ())))
        # The devices in turn, so that all of their links are in use; then what takes no link.
        first = [cell for some in zip_longest(*on_devices.values()) for cell in some if cell is not None]
        return cls(leaves, plan, deque([*first, *pending]), gathered, inline, outlet)

    @property
    def grids(self) -> list[Grid]:
        """By index of the leaf."""
        return self.plan.grids

    @cached_property
    def _small_digests(self) -> list[list[bytes]]:
        """Of the cells that lie in the index: of all that are gathered, then of each other array."""
        return list(map(digest_each, (self.gathered, *self.inline.values())))

    def compare_small(self, before: Small) -> None:
        """Find out which arrays that lie in the index have other digests than ``before``."""
        gathered, *inline = self._small_digests
        now = self.small = Small(self.plan.small, [*gathered, *map(b"".join, inline)])
        known = before.digests if before.keys == now.keys else map(dict(zip(*before, strict=True)).get, now.keys)
        self.new_small = sum(compress(self.plan.small_nbytes, map(ne, known, now.digests)))

    @property
    def unread(self) -> set[str]:
        """The keys of the arrays that need not be read, and were not, when all cells are copied."""
        unread = {done.cell.array for done in self.copied if done.cell.source is None}
        return {self.leaves[i].key for i in unread}

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return self.plan.nbytes

    def stop(self) -> None:
        """Make `work` return after the cell it is at."""
        self._stop = True

    def work(self, room: Room) -> None:
        """Copy pending cells until none is left, the slab is full, or `stop`. Runs on several threads at once.

        When it returns, nothing reads the arrays and nothing writes to the room any more, devices included.
        """
        with self.outlet.link(self.plan.largest) as link:
            try:
                while not self._stop and not self.full:
                    try:
                        cell = self.pending.popleft()
                    except IndexError:
                        break
                    self._begin(cell, room, link)
                while link:
                    self._land(link, room)
            except BaseException as error:
                self.error = error
                self._stop = True
            finally:
                self._give_up(link, room)

    def _begin(self, cell: Cell, room: Room, link: Link[_Begun]) -> None:
        """Copy a cell, or begin to; it is pending again where there is no room."""
        if cell.source is None:
            assert cell.expected is not None
            if (lies_at := room.take(cell.expected)) is not None:
                self.copied.append(Copied(cell, cell.expected, lies_at))
                return
            cell = self._read(cell)
        if isinstance(cell, DeviceCell):
            if link.is_full:
                self._land(link, room)
            extent = room.allocate(cell.nbytes)
            if extent is not None:
                offset, memory = extent
                target = memory[: cell.nbytes]
                under_way = len(link)
                try:
                    with self._naming(cell):
                        link.copy_out((cell, offset, target), cell.device, cell.source, *cell.goes_to(target))
                except BaseException:
                    if len(link) == under_way:  # else `_give_up` knows of it
                        room.release(offset, cell.nbytes)
                    raise
                return
        elif (copied := self._copy(cell, room)) is not None:
            self.copied.append(copied)
            return
        with self._guards_outcome:
            self.pending.appendleft(cell)
            self.full = True

    def _naming(self, cell: Cell) -> AbstractContextManager[None]:
        return naming(f"array {self.plan.keys[cell.array]!r} was not copied")

    def _land(self, link: Link[_Begun], room: Room) -> None:
        """Digest the oldest cell that a device copies."""
        flight = link.land()
        cell, offset, target = flight.what
        try:
            with self._naming(cell):
                flight.landed.wait()
            now = cell.arrived(flight.buffer, target)
        except BaseException:
            room.release(offset, cell.nbytes)
            raise
        link.done(flight)
        self.copied.append(self._added(cell, now, offset, room))

    def _give_up(self, link: Link[_Begun], room: Room) -> None:
        """Give back the extents of what is still in flight, after an error, once no device writes to them."""
        while link:
            flight = link.land()
            cell, offset, _ = flight.what
            with suppress(DeviceUnavailable):  # it writes no more
                flight.landed.wait()
            room.release(offset, cell.nbytes)

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
        return self._added(cell, now, offset, room)

    def _added(self, cell: Cell, now: bytes, offset: int, room: Room) -> Copied:
        lies_at = room.add(now, offset, cell.nbytes)
        if lies_at == offset:
            with self._guards_outcome:
                self.new_bytes += cell.nbytes
        return Copied(cell, now, lies_at)

    def _read(self, cell: Cell) -> Cell:
        """``cell`` with its bytes, of an array that was not to be read."""
        with self._guards_unread:
            if (found := self._unread.get(cell.array)) is None:
                leaf, grid = self.leaves[cell.array], self.grids[cell.array]
                found = self._unread[cell.array] = list(cells_of(cell.array, leaf, grid))
        return found[cell.ordinal]

    def index(self, extent_of: Located) -> dict[str, ArrayIndex]:
        """The arrays' chunks by key; ``extent_of`` has those of the cells, by leaf and ordinal."""
        plan, (gathered, *inline) = self.plan, self._small_digests
        chunks: list[Sequence[Chunk]] = [()] * len(plan.grids)
        for i, one in zip(plan.gathered, zip(map(Chunk, gathered, self.gathered), strict=True), strict=True):
            chunks[i] = one
        for (i, values), digests in zip(self.inline.items(), inline, strict=True):
            chunks[i] = list(map(Chunk, digests, values))
        for i in plan.paged:
            chunks[i] = [extent_of[i, ordinal] for ordinal in range(plan.grids[i].size)]
        return dict(zip(plan.keys, map(ArrayIndex, plan.grids, plan.dtypes, chunks), strict=True))

    def digests(self, arrays: Mapping[str, ArrayIndex]) -> dict[str, list[bytes]]:
        """The digests of the chunks that take pages, by key; ``arrays`` are those of `index`."""
        keys = map(self.plan.keys.__getitem__, self.plan.paged)
        return {key: [chunk.digest for chunk in arrays[key].chunks] for key in keys}

    def in_slab(self, pack: str) -> Located:
        """Where every copied cell lies, as extents of ``pack``."""
        return {
            (done.cell.array, done.cell.ordinal): Chunk(done.digest, Extent(pack, done.offset, done.cell.nbytes))
            for done in self.copied
        }

    def _digests_in_index(self) -> Digests:
        """Of the cells that lie in the index."""
        gathered, *inline = self._small_digests
        found: Digests = {self._place(i, 0): each for i, each in zip(self.plan.gathered, gathered, strict=True)}
        for i, digests in zip(self.inline, inline, strict=True):
            found.update((self._place(i, n), each) for n, each in enumerate(digests))
        return found

    def _place(self, i: int, ordinal: int) -> tuple[str, tuple[int, ...], int]:
        return self.plan.keys[i], self.grids[i].cell, ordinal

    def digests_now(self) -> Digests:
        """The digest of every cell, without a copy to the slab; arrays of devices come through buffers."""
        found = self._digests_in_index()
        with self.outlet.link(self.plan.largest) as link:
            for cell in self.pending:
                found[self._place(cell.array, cell.ordinal)] = cell.digest_by(link)
        return found

    def digests_copied(self, located: Located) -> Digests:
        """The digest of every cell as it was copied, to ``located`` if it takes pages."""
        found = self._digests_in_index()
        found.update((self._place(i, n), chunk.digest) for (i, n), chunk in located.items())
        return found


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
