"""Which chunks of a step a restore needs, and where in the arrays that it fills their bytes go."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tieredckpt.engine.restoring.inlet import DeviceOverlap, Inlet
from tieredckpt.errors import Corrupt, NotFound
from tieredckpt.format import grid as grids
from tieredckpt.format.boxes import Box, Boxes
from tieredckpt.format.casts import cast
from tieredckpt.format.digest import digest_each
from tieredckpt.format.encoding import Encoding
from tieredckpt.format.grid import cells
from tieredckpt.format.layout import array_key, parse_block_key
from tieredckpt.format.manifest import ArrayIndex, Chunk, StepIndex
from tieredckpt.format.ocdbt import Extent
from tieredckpt.tree.device_target import DeviceTarget

__all__ = ["NOTHING", "CastTarget", "Form", "Overlap", "Piece", "Target", "box_of", "deliver", "pieces_of", "put_small"]

Bytes = npt.NDArray[np.uint8]

NOTHING: Bytes = np.empty(0, dtype=np.uint8)
"""Target of a piece that has only overlaps."""


@dataclass(frozen=True, slots=True)
class CastTarget:
    """An array, or a box of one, in another dtype than the stored one: see `tieredckpt.format.casts.cast`."""

    array: npt.NDArray[Any]
    dtype: np.dtype[Any]
    """As it is stored."""

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape

    @property
    def size(self) -> int:
        """Items."""
        return self.array.size


Target = npt.NDArray[Any] | DeviceTarget | CastTarget
"""Memory that an array of a step is read into."""


class Form(NamedTuple):
    """Shape and dtype of a wanted array, or of a box of one."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]


@dataclass(frozen=True, slots=True)
class Overlap:
    """Some items of a chunk, and their target."""

    key: str
    """Of the array, for people."""
    cell: tuple[int, ...]
    """Shape of the chunk's cell."""
    items: tuple[slice, ...]
    dtype: np.dtype[Any]
    """As they are stored."""
    target: npt.NDArray[Any]

    @property
    def nbytes(self) -> int:
        return self.target.size * self.dtype.itemsize

    def copy(self, memory: Bytes) -> None:
        """Copy the items from the chunk, which is whole in ``memory``. Raises as `cast` where the target is a cast."""
        items = _part(memory.view(self.dtype).reshape(self.cell), self.items)
        if self.dtype == self.target.dtype:
            np.copyto(self.target, items)
        else:
            cast(self.key, items, self.target)


@dataclass(frozen=True, slots=True)
class Piece:
    """A chunk that is read once, and all targets of its bytes."""

    key: str
    """Storage key of its array or block."""
    ordinal: int
    nbytes: int
    chunk: Chunk
    target: Bytes
    """Memory that takes the start of the chunk as it is; empty if there is none."""
    overlaps: tuple[Overlap | DeviceOverlap, ...] = ()

    @property
    def extent(self) -> Extent:
        """Place of the chunk outside the index."""
        assert isinstance(self.chunk.where, Extent)
        return self.chunk.where

    @property
    def array(self) -> str:
        """Key of the array, for people."""
        return array_key(self.key)

    @property
    def wanted(self) -> int:
        """Bytes of it that some array takes."""
        nbytes = self.target.size
        for overlap in self.overlaps:
            nbytes += overlap.nbytes
        return nbytes

    def put(self, memory: Bytes) -> None:
        """Copy the chunk's bytes to their targets; all of it is in ``memory``."""
        np.copyto(self.target, memory[: self.target.size])
        for overlap in self.overlaps:
            overlap.copy(memory)


def deliver(piece: Piece, frame: Bytes, encoding: Encoding) -> bool:
    """Decode and verify a chunk that was read, and put its bytes into their targets; False if it is not intact.

    One pass copies the start of a cell to the target and verifies the whole cell: it verifies the copy itself.
    """
    try:
        if piece.overlaps and not encoding.raw:
            memory = np.empty(piece.nbytes, dtype=np.uint8)
            if encoding.decode(frame, piece.nbytes, memory) == piece.chunk.digest:
                piece.put(memory)
                return True
            return False
        if encoding.decode(frame, piece.nbytes, piece.target) != piece.chunk.digest:
            return False
    except Corrupt:
        return False
    for overlap in piece.overlaps:
        overlap.copy(frame)
    return True


def box_of(name: str, shape: tuple[int, ...]) -> tuple[str, Box]:
    """Key of the array that ``name``, stored or asked for with ``shape``, is a part of; and its box there."""
    key, offset = parse_block_key(name) or (name, (0,) * len(shape))
    return key, Box(offset, shape)


def put_small(index: StepIndex, targets: Mapping[str, Target]) -> tuple[dict[str, Target], int]:
    """Fill host targets whose array is one intact chunk in the index; returns the other targets and the bytes filled.

    ``index`` and ``targets`` are those of `pieces_of`.
    """
    names: list[str] = []
    chunks: list[Chunk] = []
    arrays = map(index.arrays.get, targets)
    for (name, target), array in zip(targets.items(), arrays, strict=True):
        if array is None or len(array.chunks) != 1 or not isinstance(target, np.ndarray):
            continue
        grid, chunk = array.grid, array.chunks[0]
        if type(chunk.where) is bytes and grid.cell == grid.shape == target.shape and array.dtype == target.dtype:
            names.append(name)
            chunks.append(chunk)
    values = [chunk.where for chunk in chunks if isinstance(chunk.where, bytes)]
    filled, nbytes = set(), 0
    for name, value, chunk, found in zip(names, values, chunks, digest_each(values), strict=True):
        if found == chunk.digest and len(value) == index.arrays[name].grid.nbytes:
            _filler(len(value))(targets[name], 0, value)
            filled.add(name)
            nbytes += len(value)
    return {name: target for name, target in targets.items() if name not in filled} if filled else dict(targets), nbytes


@cache
def _filler(nbytes: int) -> Callable[..., None]:
    """Writes so many bytes to a place in a C-contiguous array, with no object made for it."""
    return struct.Struct(f"{nbytes}s").pack_into


def pieces_of(index: StepIndex, targets: Mapping[str, Target], inlet: Inlet) -> list[Piece]:
    """The chunks of a step that overlap ``targets``, each once.

    Args:
        index: of the step; it may store arrays in other blocks than those that are wanted.
        targets: C-contiguous writable arrays of the stored dtypes: whole arrays by key, boxes of arrays by
            `tieredckpt.format.layout.block_key`; or memory of devices.
        inlet: fills memory of devices.

    Raises:
        NotFound: the step does not have all of a target.
    """
    pieces: list[Piece] = []
    overlapping: list[Piece] = []
    stored: dict[str, _Stored] = {}
    for name, target in targets.items():
        array = index.arrays.get(name)
        whole = array if array is not None and array.grid.shape == target.shape and array.grid.contiguous else None
        if whole is not None and isinstance(target, np.ndarray | DeviceTarget):
            pieces += _of_whole(name, whole, target, inlet)
        elif target.size:
            key, box = box_of(name, target.shape)
            if key not in stored:
                stored[key] = _Stored(index, key)
            overlapping += _overlapping(index, stored[key], box, target, inlet)
    # Boxes that are wanted of one array have no item in common, but may share chunks.
    return pieces + _each_once(overlapping)


def _of_whole(name: str, array: ArrayIndex, target: npt.NDArray[Any] | DeviceTarget, inlet: Inlet) -> Iterator[Piece]:
    """The chunks of an array of contiguous cells that ``target`` is all of, without a look for what overlaps."""
    grid = array.grid
    flat = NOTHING if isinstance(target, DeviceTarget) else _flat(target)
    for ordinal, (cell, chunk) in enumerate(zip(cells(grid), array.chunks, strict=True)):
        if isinstance(target, DeviceTarget):
            box = grids.cell_box(grid, cell.index)
            items = tuple(map(slice, box.shape))
            overlap = inlet.overlap(array_key(name), grid.cell, items, target, box.slices(), cell.nbytes)
            yield Piece(name, ordinal, grid.cell_nbytes, chunk, NOTHING, (overlap,))
        else:
            memory = flat[cell.start : cell.start + cell.nbytes]
            yield Piece(name, ordinal, grid.cell_nbytes, chunk, memory)


class _Stored:
    """The blocks in which a step has an array."""

    def __init__(self, index: StepIndex, key: str) -> None:
        self.key = key
        self._blocks = index.blocks(key)
        self._boxes = Boxes([box for box, _ in self._blocks])

    def meeting(self, box: Box) -> Iterator[tuple[Box, str, Box]]:
        """Stored boxes that overlap ``box``: each one's box, its storage key, and the box of the common items."""
        for place in self._boxes.meeting(box):
            block, name = self._blocks[place]
            shared = block.intersection(box)
            assert shared is not None
            yield block, name, shared


def _overlapping(index: StepIndex, of: _Stored, box: Box, target: Target, inlet: Inlet) -> Iterator[Piece]:
    flat = _flat(target) if isinstance(target, np.ndarray) else None
    found = 0
    for block, stored, part in of.meeting(box):
        found += part.size
        array = index.arrays[stored]
        grid = array.grid
        asked = box.within(block)
        for ordinal, cell in grids.overlapping(grid, part.within(block)):
            shared = cell.intersection(asked)
            assert shared is not None
            there = shared.within(asked)
            in_range = shared == cell and _is_range(cell.shape, grid.cell) and _is_range(cell.shape, target.shape)
            if flat is not None and in_range:
                start = _start(there.offset, target.shape) * grid.itemsize
                memory = flat[start : start + cell.size * grid.itemsize]
                yield Piece(stored, ordinal, grid.cell_nbytes, array.chunks[ordinal], memory)
            else:
                items, nbytes = shared.within(cell).slices(), shared.size * grid.itemsize
                overlap: Overlap | DeviceOverlap
                if isinstance(target, DeviceTarget):
                    overlap = inlet.overlap(of.key, grid.cell, items, target, there.slices(), nbytes)
                else:
                    memory = target.array if isinstance(target, CastTarget) else target
                    overlap = Overlap(of.key, grid.cell, items, target.dtype, _part(memory, there.slices()))
                yield Piece(stored, ordinal, grid.cell_nbytes, array.chunks[ordinal], NOTHING, (overlap,))
    if found != target.size:
        raise NotFound(
            f"step {index.record.step}: array {of.key!r} is there in part only: {found} of the {target.size} items at "
            f"{list(box.offset)} of shape {list(box.shape)}"
        )


def _each_once(pieces: Iterable[Piece]) -> list[Piece]:
    """Merge the pieces of each chunk into one."""
    found: dict[tuple[str, int], Piece] = {}
    for piece in pieces:
        place = piece.key, piece.ordinal
        same = found.get(place)
        found[place] = piece if same is None else _both(same, piece)
    return list(found.values())


def _both(one: Piece, other: Piece) -> Piece:
    direct, second = (one, other) if one.target.size else (other, one)
    assert not second.target.size, "two boxes without a common item have not both all of a chunk"
    return Piece(one.key, one.ordinal, one.nbytes, one.chunk, direct.target, direct.overlaps + second.overlaps)


def _part(array: npt.NDArray[Any], items: tuple[slice, ...]) -> npt.NDArray[Any]:
    """Items as an array, also of an array without dimensions."""
    found: npt.NDArray[Any] = array[(*items, ...)]  # type: ignore[arg-type]  # NumPy's stubs know no ellipsis in a tuple
    return found


def _flat(target: npt.NDArray[Any]) -> Bytes:
    return target.reshape(-1).view(np.uint8) if target.size else NOTHING


def _is_range(part: tuple[int, ...], whole: tuple[int, ...]) -> bool:
    """Whether a box of shape ``part`` is one range of a row-major array of shape ``whole``."""
    for axis, size in enumerate(part):
        if size > 1:
            return part[axis + 1 :] == whole[axis + 1 :]
    return True


def _start(offset: tuple[int, ...], shape: tuple[int, ...]) -> int:
    place = 0
    for at, size in zip(offset, shape, strict=True):
        place = place * size + at
    return place
