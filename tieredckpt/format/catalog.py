"""A catalog: the chunk lists of some packs and the records of some steps of a tier in one file, to save reading these.

::

    0         magic "tckcat\n" and a zero (8) version 3 (4) zero (4)
    16        a MessagePack array
    size-4    CRC-32C of all before it (4)

The array: the store's UUID; of each pack the identity (16 bytes), the file's size (8) and the number of its chunks
(4), as three binary columns; the records of those chunks as the packs' footers have them (32 bytes each), pack after
pack, binary; and the steps, each an array of the fields of `CatalogStep`. Integers in columns are little-endian.

A catalog may be out of date: `tieredckpt.engine.tier.catalog_cache` compares it with the tier.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from tieredckpt._decoders import from_msgpack
from tieredckpt.errors import Corrupt
from tieredckpt.format import layout
from tieredckpt.format.crc import crc32c
from tieredckpt.format.manifest import BEGAN_AFTER, RUN, StepId, StepRecord, Uuid, is_line
from tieredckpt.format.pack import RECORD, TRAILER_BLOCK
from tieredckpt.format.structure import NoneNode

__all__ = ["MAX_CATALOG", "Catalog", "CatalogStep", "decode_catalog", "encode_catalog"]

MAX_CATALOG: Final = 256 << 20
"""Bytes of the largest catalog that is read."""

_HEAD = b"tckcat\n\0" + (3).to_bytes(4, "little") + bytes(4)
_CRC_SIZE = 4
_ID_SIZE = 16

_Number = Annotated[int, msgspec.Meta(ge=0, le=layout.MAX_NUMBER)]
_Serial = Annotated[int, msgspec.Meta(ge=1, le=layout.MAX_NUMBER)]


class CatalogStep(msgspec.Struct, frozen=True, array_like=True):
    """A step: the files that it was read from, by which it is known to be the same, and the record without what is
    large and rarely asked for: structure, policy, and most of the provenance.
    """

    step: _Number
    serial: _Serial
    manifest_nbytes: _Number
    manifest_modified: float
    """Time of change in the tier's listing, seconds since the epoch."""
    btree: str
    """Name of the file of index nodes in the step's folder."""
    btree_nbytes: _Number
    btree_modified: float
    line: tuple[tuple[_Serial, _Serial], ...]
    restored_from: _Serial | None
    saved_at: float
    nbytes: _Number
    metrics: dict[str, float | str]
    ranks: Annotated[int, msgspec.Meta(ge=1)]
    store: Uuid
    """The store that saved it: an earlier one's, where this is a copy or a fork. Version 1 did not say it."""
    run: str
    """The run that saved it; empty where the step does not say. Version 2 said nothing of runs."""
    began_after: _Number | None
    """The serial after which all saves of its branch are of that run; None where the step does not say."""

    @property
    def id(self) -> StepId:
        return StepId(self.serial, self.step)

    @property
    def record(self) -> StepRecord:
        """As much of the step's record as there is."""
        return StepRecord(
            store=self.store,
            step=self.step,
            serial=self.serial,
            line=self.line,
            restored_from=self.restored_from,
            saved_at=self.saved_at,
            nbytes=self.nbytes,
            metrics=self.metrics,
            provenance=self._provenance(),
            policy={},
            structure=NoneNode(),
            ranks=self.ranks,
        )

    def _provenance(self) -> dict[str, str]:
        said = {RUN: self.run} if self.run else {}
        return said if self.began_after is None else {**said, BEGAN_AFTER: str(self.began_after)}


@dataclass(frozen=True, slots=True)
class Catalog:
    """Content of a catalog."""

    store: str
    packs: Sequence[str]
    """Files of packs."""
    sizes: NDArray[np.uint64]
    """Bytes of each."""
    counts: NDArray[np.uint32]
    """Chunks of each."""
    chunks: NDArray[Any]
    """Chunks of all packs, one after the other, of dtype `RECORD`."""
    steps: Sequence[CatalogStep]


class _Body(msgspec.Struct, frozen=True, array_like=True):
    store: str
    packs: memoryview
    sizes: memoryview
    counts: memoryview
    chunks: memoryview
    steps: list[CatalogStep]


def encode_catalog(catalog: Catalog) -> bytes:
    """The bytes of the file."""
    body = _Body(
        catalog.store,
        memoryview(b"".join([bytes.fromhex(layout.parse_pack_key(key) or "") for key in catalog.packs])),
        memoryview(catalog.sizes.astype("<u8").tobytes()),
        memoryview(catalog.counts.astype("<u4").tobytes()),
        memoryview(catalog.chunks.tobytes()),
        list(catalog.steps),
    )
    data = _HEAD + msgspec.msgpack.encode(body)
    return data + crc32c(data).to_bytes(_CRC_SIZE, "little")


def decode_catalog(data: bytes, where: str) -> Catalog:
    """Decode a catalog; its chunks are views of ``data``. Raises `Corrupt` if the bytes are not a valid catalog."""
    view = memoryview(data)
    if len(view) < len(_HEAD) + _CRC_SIZE or view[: len(_HEAD)] != _HEAD:
        raise Corrupt(f"{where} is no catalog of version 3")
    if crc32c(view[:-_CRC_SIZE]) != int.from_bytes(view[-_CRC_SIZE:], "little"):
        raise Corrupt(f"{where} does not match its CRC-32C")
    body = from_msgpack(view[len(_HEAD) : -_CRC_SIZE], _Body, f"{where} is no catalog")
    count, rest = divmod(len(body.packs), _ID_SIZE)
    if rest or len(body.sizes) != 8 * count or len(body.counts) != 4 * count or len(body.chunks) % RECORD.itemsize:
        raise Corrupt(f"{where}: its columns are not equally long")
    sizes, counts = np.frombuffer(body.sizes, "<u8"), np.frombuffer(body.counts, "<u4")
    chunks = np.frombuffer(body.chunks, RECORD)
    if int(counts.sum(dtype=np.uint64)) != len(chunks):
        raise Corrupt(f"{where}: its packs have {counts.sum(dtype=np.uint64)} chunks, and it lists {len(chunks)}")
    limit = np.repeat(sizes, counts)
    offset, length = chunks["offset"], chunks["length"]
    # Compared as differences: a sum could wrap around.
    if ((offset % TRAILER_BLOCK != 0) | (length == 0) | (offset > limit) | (length > limit - offset)).any():
        raise Corrupt(f"{where}: it has a chunk that does not lie in its pack")
    if (sizes > np.uint64(layout.MAX_NUMBER)).any():
        raise Corrupt(f"{where}: it has a pack that no store can hold")
    names = body.packs.hex()
    packs = [layout.pack_key(names[at : at + 2 * _ID_SIZE]) for at in range(0, len(names), 2 * _ID_SIZE)]
    for step in body.steps:
        if not is_line(step.line, step.serial) or not math.isfinite(step.saved_at):
            raise Corrupt(f"{where}: {step.id} has a line that does not end with it, or was saved at no time")
    return Catalog(body.store, packs, sizes, counts, chunks, body.steps)
