"""Content of a commit: the record of a step, its arrays' chunks, and their place in one index.

A step's key space is, in TensorStore's OCDBT format (`tieredckpt.format.ocdbt`):

- ``<array>/zarr.json`` and ``<array>/c/i/j`` for every array, as zarr version 3 has them;
- the same below ``tieredckpt/blocks/<array>/<offset>`` for each block of an array that is stored in blocks;
- ``tieredckpt/step.json``, a `StepRecord`;
- ``tieredckpt/chunks``, the digests of all chunks: arrays and blocks in ascending byte order of their keys,
  cells in row-major order, 16 bytes each.

The last two are inline values, so that the CRC-32C of the index nodes covers them; one longer than OCDBT's
limit for those goes on under ``tieredckpt/step.json.1``, ``.2`` and so on.
"""

from __future__ import annotations

import math
import operator
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Annotated, Any, Final, NamedTuple

import msgspec
import numpy as np

from tieredckpt._decoders import from_json
from tieredckpt.errors import Corrupt, Invalid, TieredCkptError
from tieredckpt.format import digest as digests
from tieredckpt.format import layout, ocdbt, zarr
from tieredckpt.format.boxes import Box, tile
from tieredckpt.format.derivation import Derivation
from tieredckpt.format.encoding import Encoding
from tieredckpt.format.grid import Grid, cell_key, cells
from tieredckpt.format.ocdbt import Extent
from tieredckpt.format.step_keys import entries_of, in_parts, join_parts
from tieredckpt.format.structure import MAX_STRUCTURE_BYTES, ArrayNode, Node, array_nodes, check_structure

__all__ = [
    "BEGAN_AFTER",
    "INLINE_MAX",
    "MAX_CHUNK",
    "RUN",
    "ArrayIndex",
    "Chunk",
    "StepId",
    "StepIndex",
    "StepRecord",
    "Uuid",
    "decode_record",
    "decode_step",
    "encode_step",
    "find_record",
    "is_line",
]

RUN = "run"
"""In the provenance of a step: the run that saved it, of all ranks. Several runs may give one serial to one step."""
BEGAN_AFTER = "began_after"
"""In the provenance of a step: the serial after which all saves of its branch are of the run that saved it."""

INLINE_MAX = 4096
"""The chunks of an array up to this size, in bytes, lie in the index itself: an extent would be padded to a page."""

MAX_CHUNK: Final = 1 << 30
"""Bytes of the largest chunk that a configuration allows, so that memory can hold every chunk that is read."""

_MAX_RECORD = MAX_STRUCTURE_BYTES + (16 << 20)
_MAX_POLICY_DEPTH = 100  # what is shown to people is walked by recursion

Uuid = Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}\Z")]
_Step = Annotated[int, msgspec.Meta(ge=0, le=layout.MAX_NUMBER)]
_Serial = Annotated[int, msgspec.Meta(ge=1, le=layout.MAX_NUMBER)]
_Size = Annotated[int, msgspec.Meta(ge=0, le=layout.MAX_NUMBER)]


class StepId(NamedTuple):
    """Identity of a save: its serial in the store's life, and the trainer's step number. Sorts by age."""

    serial: int
    step: int

    def __str__(self) -> str:
        return f"step {self.step} (serial {self.serial})"

    @property
    def folder(self) -> str:
        """Its folder on a tier. Raises `Invalid` as `layout.step_folder` does."""
        return layout.step_folder(self.step, self.serial)

    @property
    def manifest_key(self) -> str:
        """Key of its commit file. Raises `Invalid` as `layout.step_folder` does."""
        return layout.manifest_key(self.step, self.serial)

    @property
    def first_btree_key(self) -> str:
        """Key of the index nodes of its first commit. Raises `Invalid` as `layout.step_folder` does."""
        return layout.btree_key(self.step, self.serial)

    @property
    def pin_key(self) -> str:
        """Key of the object that keeps it on a tier. Raises `Invalid` as `layout.step_folder` does."""
        return layout.pin_key(self.step, self.serial)

    def part_key(self, rank: int) -> str:
        """Key of a rank's part of it while it is being committed. Raises `Invalid` as `layout.part_key` does."""
        return layout.part_key(self.step, self.serial, rank)


class StepRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Metadata of a step; stored as ``tieredckpt/step.json``."""

    store: Uuid
    """Identity of the store, a UUID."""
    step: _Step
    serial: _Serial
    line: tuple[tuple[_Serial, _Serial], ...]
    """Serials of this step's history, as inclusive ranges: a rollback ends one and begins the next."""
    restored_from: _Serial | None
    """Serial of the step that this run was restored from."""
    saved_at: float
    """Seconds since the epoch."""
    nbytes: _Size
    """Bytes of all arrays."""
    metrics: dict[str, float | str]
    """Finite numbers as they are; ``"nan"``, ``"inf"`` and ``"-inf"`` as text, since JSON has no such numbers."""
    provenance: dict[str, str]
    policy: dict[str, Any]
    """The policies in force, as ``StoreConfig.recorded_policies`` has them; earlier versions wrote all settings."""
    structure: Node
    rank: int | None = None
    """The rank whose part of the step this is; its arrays may be incomplete. None for a whole step."""
    ranks: int = 1
    """How many ranks saved the step together."""
    derived: Derivation | msgspec.UnsetType = msgspec.UNSET
    """Origin of a derived step, with its rules; unset for an exact one."""
    format_version: int = layout.FORMAT_VERSION
    digest: str = digests.NAME

    @property
    def id(self) -> StepId:
        return StepId(self.serial, self.step)

    @property
    def run(self) -> str:
        """The run that saved it; empty if earlier versions did."""
        return self.provenance.get(RUN, "")

    @property
    def began_after(self) -> float:
        """The serial after which all saves of its branch are of its run; infinite if it does not say."""
        try:
            serial = int(self.provenance[BEGAN_AFTER])
        except (KeyError, ValueError):
            return math.inf
        return serial if 0 <= serial <= layout.MAX_NUMBER else math.inf


class Chunk(msgspec.Struct, frozen=True, gc=False):
    """One cell of an array: its digest, and where its bytes are (an extent, or the bytes themselves).

    As for an `Extent`, the garbage collector does not track the many chunks of a step.
    """

    digest: bytes
    where: Extent | bytes

    def __iter__(self) -> Iterator[Any]:
        return iter((self.digest, self.where))


class ArrayIndex(msgspec.Struct, frozen=True, gc=False):
    """The chunks of one array, in row-major order of its grid."""

    grid: Grid
    dtype: np.dtype[Any]
    chunks: Sequence[Chunk]


_GRID, _DTYPE, _CHUNKS = map(operator.attrgetter, ArrayIndex.__struct_fields__)
_DIGEST, _WHERE = map(operator.attrgetter, Chunk.__struct_fields__)


@dataclass(frozen=True, slots=True)
class StepIndex:
    """A committed step: its record, and its arrays by storage key: whole ones by their key, blocks by `block_key`."""

    record: StepRecord
    arrays: dict[str, ArrayIndex]
    _blocks: dict[str, list[tuple[Box, str]]] = field(default_factory=dict, init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        for name in [name for name in self.arrays if name.startswith(layout.BLOCKS)]:
            if (block := layout.parse_block_key(name)) is not None:
                key, offset = block
                array = self.arrays[name]
                self._blocks.setdefault(key, []).append((Box(offset, array.grid.shape), name))

    def blocks(self, key: str) -> list[tuple[Box, str]]:
        """Blocks of an array: boxes of it, by offset, each with its storage key; one for an array stored whole.

        Empty for an array that is not there. In the part of a rank the boxes may leave some of the array out.
        """
        if (array := self.arrays.get(key)) is not None:
            return [(Box.whole(array.grid.shape), key)]
        return sorted(self._blocks.get(key, ()))


def encode_step(
    record: StepRecord,
    arrays: Mapping[str, ArrayIndex],
    *,
    btree_path: str,
    encoding: Encoding,
    others: Callable[[ArrayIndex], Encoding] | None = None,
) -> ocdbt.Index:
    """The two files that commit a step: the index nodes (``btree_path``) and the manifest.

    Args:
        record: of the step.
        arrays: every array; extents are relative to the tier's root.
        btree_path: where the nodes will be, relative to the tier's root.
        encoding: of the tier.
        others: gives the encoding of each array, for a tier that has had another encoding.

    Raises:
        Invalid: readers would refuse the step: its record is too large, or a policy is nested too deeply.
    """
    found = list(arrays.values())
    record_parts = in_parts(_encode_record(record))
    entries = entries_of(tuple(arrays), tuple(map(_GRID, found)), len(record_parts))
    if list(map(len, map(_CHUNKS, found))) != entries.counts:
        raise ValueError("arrays have other numbers of chunks than of cells")
    chunks = list(chain.from_iterable(map(_CHUNKS, found)))
    own = list(map(others, found)) if others is not None else [encoding] * len(found)
    described = {each: entries.metadata(list(map(_DTYPE, found)), each) for each in {*own}}
    values: list[bytes | Extent] = [described[each][i] for i, each in enumerate(own)]
    if encoding.raw and not encoding.overhead:
        values += map(_WHERE, chunks)
    else:
        values += [
            each.encode_inline(where, array.grid.itemsize) if isinstance(where := chunk.where, bytes) else where
            for array, each in zip(found, own, strict=True)
            for chunk in array.chunks
        ]
    table = entries.chunks_in_name_order(list(map(_DIGEST, chunks)))
    values += record_parts + in_parts(b"".join(table))
    return ocdbt.encode_values(
        entries.keys,
        entries.in_key_order(values),
        btree_path,
        uuid=bytes.fromhex(record.store.replace("-", "")),
        commit_time_ns=time.time_ns(),
    )


def find_record(manifest: bytes, btree: bytes, btree_path: str) -> StepRecord:
    """The record alone, without decoding the chunks. Raises `Corrupt`."""
    data = join_parts(layout.STEP_RECORD, ocdbt.find(manifest, btree, btree_path), btree_path)
    return decode_record(data, btree_path)


def decode_step(manifest: bytes, btree: bytes, btree_path: str) -> StepIndex:
    """Everything about a step, from its two files. Raises `Corrupt` for anything that does not fit together."""
    values = dict(ocdbt.decode(manifest, btree, btree_path))
    record = decode_record(join_parts(layout.STEP_RECORD, lambda k: values.pop(k, None), btree_path), btree_path)
    table = join_parts(layout.CHUNK_DIGESTS, lambda k: values.pop(k, None), btree_path)
    arrays: dict[str, ArrayIndex] = {}
    packs: set[str] = set()
    taken = 0
    # By the keys alone: with the suffix, "a-b" would come before "a".
    prefixes = sorted(name.removesuffix(b"/zarr.json") for name in values if name.endswith(b"/zarr.json"))
    for prefix in prefixes:
        name = prefix + b"/zarr.json"
        where = f"{btree_path}: array {prefix!r}"
        metadata = values[name]
        if not isinstance(metadata, bytes):
            raise Corrupt(f"{where} has metadata outside the index")
        try:
            key = prefix.decode()
            grid, dtype, encoding = zarr.parse_array_metadata(metadata)
        except (UnicodeDecodeError, TieredCkptError) as error:
            raise Corrupt(f"{where} has unreadable metadata: {error}") from error
        if grid.cell_nbytes > MAX_CHUNK:
            raise Corrupt(f"{where} has chunks of {grid.cell_nbytes} bytes; {MAX_CHUNK} are the most")
        end = taken + grid.size * digests.SIZE
        if end > len(table):
            raise Corrupt(f"{where} has {grid.size} chunks, more than there are digests")
        chunks = []
        bounds = encoding.bounds(grid.cell_nbytes)
        for position in cells(grid):
            value = values.get(prefix + b"/" + cell_key(position.index))
            digest = table[taken : taken + digests.SIZE]
            taken += digests.SIZE
            if isinstance(value, bytes):
                if not encoding.raw and grid.cell_nbytes > INLINE_MAX:  # a few bytes might make any number of these
                    raise Corrupt(f"{where} has {grid.cell_nbytes} bytes in the index; {INLINE_MAX} are the most")
                chunks.append(Chunk(digest, encoding.decode_inline(value, grid.cell_nbytes, where)))
            else:
                chunks.append(Chunk(digest, _chunk_extent(value, grid.cell_nbytes, bounds, packs, where)))
        arrays[key] = ArrayIndex(grid, dtype, chunks)
    if taken != len(table) or len(values) != len(arrays) + taken // digests.SIZE:
        raise Corrupt(f"{btree_path}: arrays, chunks and digests do not match in number")
    index = StepIndex(record, arrays)
    known = sum(_fit_array(index, node, btree_path) for node in array_nodes(record.structure))
    if known != len(arrays):
        raise Corrupt(f"{btree_path}: {len(arrays) - known} arrays or blocks are not those of the tree")
    return index


def _fit_array(index: StepIndex, node: ArrayNode, where: str) -> int:
    """Check that an array fits the tree, and give it the tree's dtype; returns the number of its boxes."""
    dtype = zarr.dtype_from_name(node.dtype)
    arrays, blocks = index.arrays, index.blocks(node.key)
    boxes = [box for box, _ in blocks]
    if any(arrays[name].dtype != zarr.stored_as(dtype) for _, name in blocks):
        raise Corrupt(f"{where}: array {node.key!r} is not of the dtype in the tree")
    if node.key in arrays:
        fine = boxes[0].shape == node.shape
    elif index.record.rank is None:
        fine = bool(boxes) and tile(node.shape, boxes)
    else:
        # A rank may have any part of an array, or nothing.
        fine = all(map(Box.whole(node.shape).contains, boxes))
    if not fine:
        raise Corrupt(f"{where}: array {node.key!r} is missing, or its blocks are not the array of the tree")
    for _, name in blocks:
        arrays[name] = ArrayIndex(arrays[name].grid, dtype, arrays[name].chunks)
    return len(blocks)


def _chunk_extent(value: Extent | None, nbytes: int, bounds: tuple[int, int], packs: set[str], where: str) -> Extent:
    """Decode and check the place of a chunk; ``packs`` remembers the paths that were seen to be packs."""
    if value is None:
        raise Corrupt(f"{where}: a chunk of {nbytes} bytes is missing")
    if not bounds[0] <= value.length <= bounds[1] or value.offset % layout.ALIGNMENT:
        raise Corrupt(f"{where}: a chunk of {nbytes} bytes is stored with {value.length} at {value.offset}")
    if value.path not in packs:
        if layout.parse_pack_key(value.path) is None:
            raise Corrupt(f"{where}: a chunk lies in {value.path!r}, which is no pack")
        packs.add(value.path)
    return value


def _encode_record(record: StepRecord) -> bytes:
    data = msgspec.json.encode(record)
    if len(data) > _MAX_RECORD:
        raise Invalid(f"the record of {record.id} takes {len(data)} bytes, more than {_MAX_RECORD}; join small leaves")
    if _depth(record.policy) > _MAX_POLICY_DEPTH:
        raise Invalid(f"the configuration is nested more than {_MAX_POLICY_DEPTH} deep; simplify its policies")
    return data


def decode_record(data: bytes, where: str) -> StepRecord:
    """The record of a step, or of a rank's part of one. Raises `Corrupt` for a record that no store writes."""
    if len(data) > _MAX_RECORD:
        raise Corrupt(f"{where}: {layout.STEP_RECORD} has {len(data)} bytes; {_MAX_RECORD} are the most")
    record = from_json(data, StepRecord, f"{where}: {layout.STEP_RECORD} cannot be read")
    if record.format_version != layout.FORMAT_VERSION or record.digest != digests.NAME:
        raise Corrupt(f"{where}: a step of format {record.format_version}; use a newer tieredckpt")
    if record.ranks < 1 or not (record.rank is None or 0 <= record.rank < record.ranks):
        raise Corrupt(f"{where}: a step of rank {record.rank} of {record.ranks}")
    if not is_line(record.line, record.serial):
        raise Corrupt(f"{where}: the line {record.line[:8]} does not ascend to serial {record.serial}")
    if _depth(record.policy) > _MAX_POLICY_DEPTH:
        raise Corrupt(f"{where}: the policy is nested more than {_MAX_POLICY_DEPTH} deep")
    check_structure(record.structure)
    return record


def is_line(line: tuple[tuple[int, int], ...], serial: int) -> bool:
    """Whether ranges ascend, and the last ends with the step's own serial."""
    bounds = [bound for pair in line for bound in pair]
    fine = all(first <= last for first, last in line) and all(map(operator.lt, bounds[1::2], bounds[2::2]))
    return fine and bounds[-1:] == [serial]


def _depth(value: object) -> int:
    """The nesting depth of tables and lists; computed without recursion."""
    deepest, pending = 0, [(value, 1)]
    while pending:
        item, depth = pending.pop()
        if isinstance(item, dict | list | tuple):
            deepest = max(deepest, depth)
            pending.extend((inner, depth + 1) for inner in (item.values() if isinstance(item, dict) else item))
    return deepest
