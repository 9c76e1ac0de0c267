"""The file of a rank's contribution to a step: ``steps/…/parts/<rank>``.

::

    0        magic "tckpart\\n" (8) version (uint32) zero (uint32)
    16       msgpack: record (JSON), structure (JSON), packs, arrays, and the columns of all chunks as bytes
    size-4   CRC-32C (uint32) of all before it

The chunks of all arrays follow one another, each array's in row-major order of its grid. Their columns are
digests (16 bytes each), kinds (a byte each: `EXTENT`, `INLINE`, `ELSEWHERE`), and of those with an extent pack
(uint32), offset and length (uint64), of inline ones the bytes. Integers are little-endian.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Annotated, Any, Final, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from tieredckpt._decoders import from_msgpack
from tieredckpt.errors import Corrupt, Invalid, TieredCkptError
from tieredckpt.format import digest as digests
from tieredckpt.format import layout
from tieredckpt.format.boxes import Box
from tieredckpt.format.crc import crc32c
from tieredckpt.format.encoding import ENCODINGS
from tieredckpt.format.grid import Grid, check
from tieredckpt.format.manifest import MAX_CHUNK, Chunk, StepRecord, decode_record
from tieredckpt.format.ocdbt import Extent
from tieredckpt.format.structure import ArrayNode, Node, NoneNode, array_nodes, decode_structure, encode_structure
from tieredckpt.format.zarr import dtype_from_name

__all__ = [
    "ELSEWHERE",
    "EXTENT",
    "INLINE",
    "Part",
    "PartArray",
    "PartChunk",
    "decode_extents",
    "decode_part",
    "encode_part",
]

EXTENT: Final = 0
"""Kind of a chunk that this rank wrote, or that the tier had: its extent is known."""
INLINE: Final = 1
"""Kind of a chunk whose bytes are in the part, and will be in the step index."""
ELSEWHERE: Final = 2
"""Kind of a chunk that another rank writes: the merge finds its extent by its digest."""

PartChunk: TypeAlias = Chunk | tuple[bytes, Extent | bytes | None]
"""Digest of a chunk, and its extent, its bytes, or None where another rank writes it; a `Chunk` is one."""

_MAGIC = b"tckpart\n"
_VERSION = 1
_HEAD = struct.Struct("<8sII")
_CRC_SIZE = 4

_Size = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]


@dataclass(frozen=True, slots=True)
class PartArray:
    """A rank's share of an array: a block of it, or all; the chunks in row-major order of the block's grid."""

    grid: Grid
    dtype: np.dtype[Any]
    chunks: Sequence[PartChunk]


@dataclass(frozen=True, slots=True)
class Part:
    """A rank's contribution to a step.

    The arrays are named by storage key, those of `block_key` included; every array of the record's structure may
    be there whole, in blocks, or (where other ranks have all of it) not at all.
    """

    record: StepRecord
    arrays: Mapping[str, PartArray]


class _Array(msgspec.Struct, array_like=True, frozen=True, gc=False):
    key: str
    shape: tuple[_Size, ...]
    cell: tuple[_Size, ...]


class _Body(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    record: bytes
    structure: bytes
    packs: list[str]
    arrays: list[_Array]
    digests: bytes
    kinds: bytes
    files: bytes
    offsets: bytes
    lengths: bytes
    inline: bytes


def encode_part(part: Part) -> bytes:
    """The file of a part; `decode_part` is the inverse.

    Raises:
        Invalid: a record without rank, or an array whose chunks are not as many as its grid has.
    """
    if part.record.rank is None:
        raise Invalid(f"{part.record.id} has no rank: only the record of a rank's own step makes a part")
    for key, array in part.arrays.items():
        if len(array.chunks) != array.grid.size:
            raise Invalid(f"array {key!r} has {len(array.chunks)} chunks in a grid of {array.grid.size}")
    chunks = [chunk for array in part.arrays.values() for chunk in array.chunks]
    extents = [where for _, where in chunks if isinstance(where, Extent)]
    packs = {path: index for index, path in enumerate(sorted({extent.path for extent in extents}))}
    body = _Body(
        record=msgspec.json.encode(msgspec.structs.replace(part.record, structure=NoneNode())),
        structure=encode_structure(part.record.structure),
        packs=list(packs),
        arrays=[_Array(key, array.grid.shape, array.grid.cell) for key, array in part.arrays.items()],
        digests=b"".join([digest for digest, _ in chunks]),
        kinds=bytes([_kind(where) for _, where in chunks]),
        files=np.fromiter((packs[extent.path] for extent in extents), "<u4").tobytes(),
        offsets=np.fromiter((extent.offset for extent in extents), "<u8").tobytes(),
        lengths=np.fromiter((extent.length for extent in extents), "<u8").tobytes(),
        inline=b"".join([where for _, where in chunks if isinstance(where, bytes)]),
    )
    data = _HEAD.pack(_MAGIC, _VERSION, 0) + msgspec.msgpack.encode(body)
    return data + crc32c(data).to_bytes(_CRC_SIZE, "little")


def decode_part(data: bytes, where: str) -> Part:
    """The part in ``data``, which was read from the file ``where``.

    Raises:
        Corrupt: damaged, of another version, or with anything in it that does not fit together.
    """
    body = _open(data, where)
    record = decode_record(body.record, where)
    if record.rank is None:
        raise Corrupt(f"{where}: a record of no rank")
    try:
        structure, nodes = _structure(body.structure)
    except TieredCkptError as error:
        raise Corrupt(f"{where}: {error}") from error
    kinds = np.frombuffer(body.kinds, np.uint8)
    found: dict[str, tuple[Grid, np.dtype[Any]]] = {}
    sizes: list[int] = []
    for array in body.arrays:
        grid, dtype, size = _place(array, nodes, where)
        found[array.key] = grid, dtype
        sizes.append(size)
    if len(found) != len(sizes) or sum(sizes) != kinds.size:
        raise Corrupt(f"{where}: an array is there twice, or its arrays have {sum(sizes)} chunks and not {kinds.size}")
    cells = np.repeat(np.fromiter((grid.cell_nbytes for grid, _ in found.values()), np.int64, len(found)), sizes)
    wheres = _locations(body, kinds, cells, where)
    if len(body.digests) != digests.SIZE * kinds.size:
        raise Corrupt(f"{where}: {len(body.digests)} bytes of digests for {kinds.size} chunks")
    # tolist() of "V16" gives bytes objects without a Python call for each.
    columns = zip(np.frombuffer(body.digests, "V16").tolist(), wheres, strict=True)
    chunks: list[PartChunk] = [(digest, None) if place is None else Chunk(digest, place) for digest, place in columns]
    ends = accumulate(sizes, initial=0)
    arrays = {
        key: PartArray(grid, dtype, chunks[start:end])
        for (key, (grid, dtype)), (start, end) in zip(found.items(), pairwise(ends), strict=True)
    }
    return Part(msgspec.structs.replace(record, structure=structure), arrays)


def decode_extents(data: bytes, where: str) -> list[tuple[bytes, Extent]]:
    """Digest and extent of every chunk of a part that has one, without its arrays; see `decode_part`.

    Raises:
        Corrupt: as `decode_part` for all that is looked at.
    """
    body = _open(data, where)
    far = np.frombuffer(body.kinds, np.uint8) == EXTENT
    if len(body.digests) != digests.SIZE * far.size:
        raise Corrupt(f"{where}: {len(body.digests)} bytes of digests for {far.size} chunks")
    found: list[bytes] = np.frombuffer(body.digests, f"V{digests.SIZE}")[far].tolist()
    return list(zip(found, _extents(body, len(found), where)[1], strict=True))


def _kind(where: Extent | bytes | None) -> int:
    return EXTENT if isinstance(where, Extent) else ELSEWHERE if where is None else INLINE


def _open(data: bytes, where: str) -> _Body:
    if len(data) < _HEAD.size + _CRC_SIZE:
        raise Corrupt(f"{where}: {len(data)} bytes are no part")
    magic, version, zero = _HEAD.unpack_from(data)
    if magic != _MAGIC or version != _VERSION or zero:
        raise Corrupt(f"{where}: no part of version {_VERSION}: it begins with {magic!r}, version {version}")
    view = memoryview(data)
    if crc32c(view[:-_CRC_SIZE]) != int.from_bytes(view[-_CRC_SIZE:], "little"):
        raise Corrupt(f"{where} does not match its CRC-32C")
    return from_msgpack(view[_HEAD.size : -_CRC_SIZE], _Body, f"{where} is malformed")


@lru_cache(maxsize=4)
def _structure(data: bytes) -> tuple[Node, dict[str, ArrayNode]]:
    """The structure and its arrays by key, decoded once for all ranks that have the same."""
    structure = decode_structure(data)
    return structure, {node.key: node for node in array_nodes(structure)}


def _place(array: _Array, nodes: Mapping[str, ArrayNode], where: str) -> tuple[Grid, np.dtype[Any], int]:
    """Grid, dtype and number of chunks of a part's share of an array, checked against the structure."""
    key, offset = layout.parse_block_key(array.key) or (array.key, None)
    node = nodes.get(key)
    if node is None:
        raise Corrupt(f"{where}: array {array.key!r} is not in the tree of its rank")
    dtype = dtype_from_name(node.dtype)
    try:
        grid, size = _grid(array.shape, array.cell, dtype.itemsize)
    except Invalid as error:
        raise Corrupt(f"{where}: array {array.key!r}: {error}") from error
    fits = grid.shape == node.shape if offset is None else Box.whole(node.shape).contains(Box(offset, grid.shape))
    if not fits:
        raise Corrupt(f"{where}: {array.key!r} of shape {grid.shape} is no part of an array of shape {node.shape}")
    return grid, dtype, size


@lru_cache(maxsize=4096)
def _grid(shape: tuple[int, ...], cell: tuple[int, ...], itemsize: int) -> tuple[Grid, int]:
    """A grid and its size, shared by equal arrays: a step has few kinds of arrays and many arrays."""
    grid = check(Grid(shape, cell, itemsize))
    if grid.cell_nbytes > MAX_CHUNK:
        raise Invalid(f"chunks of {grid.cell_nbytes} bytes; {MAX_CHUNK} are the most")
    return grid, grid.size


def _locations(
    body: _Body, kinds: NDArray[np.uint8], cells: NDArray[np.int64], where: str
) -> Iterator[Extent | bytes | None]:
    """Decode the place of each chunk, given the bytes of its cell; checks all of them before the first is returned."""
    far, inside = kinds == EXTENT, kinds == INLINE
    if kinds.size and kinds.max() > ELSEWHERE:
        raise Corrupt(f"{where}: a chunk of unknown kind {kinds.max()}")
    count = int(far.sum())
    lengths, extents = _extents(body, count, where)
    sizes = cells[far].astype(np.uint64)
    wrong = np.ones(count, bool)
    for encoding in ENCODINGS.values():  # in RAM, or on a tier below it
        least, most = encoding.bounds(sizes)
        wrong &= (lengths < least) | (lengths > most)
    if wrong.any():
        raise Corrupt(f"{where}: an extent is no place of a chunk in a pack")
    if sum(cells[inside].tolist()) != len(body.inline):
        raise Corrupt(f"{where}: {len(body.inline)} bytes are not those of its {int(inside.sum())} inline chunks")
    if count == kinds.size:
        return extents
    pieces = (body.inline[a:b] for a, b in pairwise(accumulate(cells[inside].tolist(), initial=0)))
    return (next(extents) if kind == EXTENT else next(pieces) if kind == INLINE else None for kind in kinds.tolist())


def _extents(body: _Body, count: int, where: str) -> tuple[NDArray[np.uint64], Iterator[Extent]]:
    """The ``count`` extents of a part, and their lengths; everything is checked before the first is given."""
    if (len(body.files), len(body.offsets), len(body.lengths)) != (4 * count, 8 * count, 8 * count):
        raise Corrupt(f"{where}: its columns do not hold {count} extents")
    files = np.frombuffer(body.files, "<u4")
    offsets, lengths = np.frombuffer(body.offsets, "<u8"), np.frombuffer(body.lengths, "<u8")
    # Compared as a difference: a sum could wrap around.
    wrong = (offsets % layout.ALIGNMENT != 0) | (offsets > np.uint64((1 << 63) - 1) - lengths)
    wrong |= lengths > np.uint64((1 << 63) - 1)
    if wrong.any() or (count and int(files.max()) >= len(body.packs)):
        raise Corrupt(f"{where}: an extent is no place of a chunk in a pack")
    if not all(layout.parse_pack_key(path) is not None for path in body.packs):
        raise Corrupt(f"{where}: a chunk lies in a file that is no pack")
    paths = map(body.packs.__getitem__, files.tolist())
    # Most chunks of a step have the same length: they share one int object.
    sizes = lengths.tolist()
    known = dict(zip(sizes, sizes, strict=True))
    return lengths, map(Extent, paths, offsets.tolist(), map(known.__getitem__, sizes))
