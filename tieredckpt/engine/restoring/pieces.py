"""Which chunks of a step a restore needs, and where in the arrays that it fills their bytes go."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tieredckpt.errors import Corrupt, NotFound
from tieredckpt.format import grid as grids
from tieredckpt.format.boxes import Box, Boxes
from tieredckpt.format.digest import digest_each
from tieredckpt.format.encoding import Encoding
from tieredckpt.format.grid import cells
from tieredckpt.format.layout import array_key, parse_block_key
from tieredckpt.format.manifest import Chunk, StepIndex
from tieredckpt.format.ocdbt import Extent

__all__ = ["NOTHING", "Form", "Overlap", "Piece", "box_of", "deliver", "pieces_of", "put_small"]

Bytes = npt.NDArray[np.uint8]

NOTHING: Bytes = np.empty(0, dtype=np.uint8)
"""Where nothing of a chunk goes."""


class Form(NamedTuple):
    """What an array is that is asked for, whole or as a box of one."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]


@dataclass(frozen=True, slots=True)
class Overlap:
    """Some items of a chunk, and where they go."""

    cell: tuple[int, ...]
    """Shape of the chunk's cell."""
    items: tuple[slice, ...]
    target: npt.NDArray[Any]

    def copy(self, memory: Bytes) -> None:
        """Take them from the chunk, all of which is in ``memory``."""
        np.copyto(self.target, memory.view(self.target.dtype).reshape(self.cell)[self.items])


@dataclass(frozen=True, slots=True)
class Piece:
    """A chunk that is to be read, once, and everything that its bytes are for."""

    key: str
    """Under which its array, or block, is stored."""
    ordinal: int
    nbytes: int
    chunk: Chunk
    target: Bytes
    """Memory that takes the start of the chunk as it is; empty if there is none."""
    overlaps: tuple[Overlap, ...] = ()

    @property
    def extent(self) -> Extent:
        """Where it lies, outside the index."""
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
            nbytes += overlap.target.nbytes
        return nbytes

    def put(self, memory: Bytes) -> None:
        """Copy from the chunk, all of which is in ``memory``, to where its bytes go."""
        np.copyto(self.target, memory[: self.target.size])
        for overlap in self.overlaps:
            overlap.copy(memory)


def deliver(piece: Piece, frame: Bytes, encoding: Encoding) -> bool:
    """Decode a chunk that was read, verify it and put its bytes where they go; False if it is not intact.

    The start of a cell is copied to the target in the pass that verifies all of it: what is verified is the copy.
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
    """The array of which an array of ``shape`` that is stored, or asked for, as ``name`` is a box, and that box."""
    key, offset = parse_block_key(name) or (name, (0,) * len(shape))
    return key, Box(offset, shape)


def put_small(index: StepIndex, targets: Mapping[str, npt.NDArray[Any]]) -> tuple[dict[str, npt.NDArray[Any]], int]:
    """Fill the targets that are one intact chunk which lies in the index; the others, and the bytes that were filled.

    ``index`` and ``targets`` are those of `pieces_of`.
    """
    small: list[tuple[str, npt.NDArray[Any], Chunk, bytes]] = []
    for name, target in targets.items():
        array = index.arrays.get(name)
        if array is None or len(array.chunks) != 1 or array.grid.cell != target.shape:
            continue
        chunk = array.chunks[0]
        if isinstance(chunk.where, bytes) and len(chunk.where) == target.nbytes and array.grid.shape == target.shape:
            small.append((name, target, chunk, chunk.where))
    filled, nbytes = set(), 0
    for found, (name, target, chunk, value) in zip(digest_each([each[3] for each in small]), small, strict=True):
        if found == chunk.digest:
            np.copyto(target, np.frombuffer(value, target.dtype).reshape(target.shape))
            filled.add(name)
            nbytes += len(value)
    return {name: target for name, target in targets.items() if name not in filled} if filled else dict(targets), nbytes


def pieces_of(index: StepIndex, targets: Mapping[str, npt.NDArray[Any]]) -> list[Piece]:
    """The chunks of a step that overlap ``targets``, each once.

    Args:
        index: of the step, whose arrays may be stored in other blocks than those that are wanted.
        targets: C-contiguous writable arrays of the stored dtypes: whole arrays by key, boxes of arrays by
            `tieredckpt.format.layout.block_key`.

    Raises:
        NotFound: the step does not have all of a target.
    """
    pieces: list[Piece] = []
    overlapping: list[Piece] = []
    stored: dict[str, _Stored] = {}
    for name, target in targets.items():
        array = index.arrays.get(name)
        if array is not None and array.grid.shape == target.shape and array.grid.contiguous:
            flat = _flat(target)
            nbytes = array.grid.cell_nbytes
            for ordinal, (cell, chunk) in enumerate(zip(cells(array.grid), array.chunks, strict=True)):
                pieces.append(Piece(name, ordinal, nbytes, chunk, flat[cell.start : cell.start + cell.nbytes]))
        elif target.size:
            key, box = box_of(name, target.shape)
            if key not in stored:
                stored[key] = _Stored(index, key)
            overlapping += _overlapping(index, stored[key], box, target)
    # Boxes that are wanted of one array have no item in common, but may share chunks.
    return pieces + _each_once(overlapping)


class _Stored:
    """The blocks in which a step has an array."""

    def __init__(self, index: StepIndex, key: str) -> None:
        self.key = key
        self._blocks = index.blocks(key)
        self._boxes = Boxes([box for box, _ in self._blocks])

    def meeting(self, box: Box) -> Iterator[tuple[Box, str, Box]]:
        """Those that have items of ``box``: each one's box, its storage key, and the box of these items."""
        for place in self._boxes.meeting(box):
            block, name = self._blocks[place]
            shared = block.intersection(box)
            assert shared is not None
            yield block, name, shared


def _overlapping(index: StepIndex, of: _Stored, box: Box, target: npt.NDArray[Any]) -> Iterator[Piece]:
    flat = _flat(target)
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
            if shared == cell and _is_range(cell.shape, grid.cell) and _is_range(cell.shape, target.shape):
                start = _start(there.offset, target.shape) * grid.itemsize
                memory = flat[start : start + cell.size * grid.itemsize]
                yield Piece(stored, ordinal, grid.cell_nbytes, array.chunks[ordinal], memory)
            else:
                overlap = Overlap(grid.cell, shared.within(cell).slices(), target[there.slices()])
                yield Piece(stored, ordinal, grid.cell_nbytes, array.chunks[ordinal], NOTHING, (overlap,))
    if found != target.size:
        raise NotFound(
            f"step {index.record.step}: array {of.key!r} is there in part only: {found} of the {target.size} items at "
            f"{list(box.offset)} of shape {list(box.shape)}"
        )


def _each_once(pieces: Iterable[Piece]) -> list[Piece]:
    """Pieces of one chunk as one."""
    found: dict[tuple[str, int], Piece] = {}
    for piece in pieces:
        place = piece.key, piece.ordinal
        same = found.get(place)
        found[place] = piece if same is None else _both(same, piece)
    return list(found.values())


def _both(one: Piece, other: Piece) -> Piece:
    direct, second = (one, other) if one.target.size else (other, one)
    overlaps = direct.overlaps + second.overlaps
    if second.target.size:
        overlaps += (Overlap((second.nbytes,), (slice(second.target.size),), second.target),)
    return Piece(one.key, one.ordinal, one.nbytes, one.chunk, direct.target, overlaps)


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
