"""The footer of a pack: which chunks the file holds, and where.

::

    0         chunk, zeros up to the next multiple of 4096, chunk, ...
    end       count records of 32 bytes: digest (16), offset (uint64), length (uint64)
              zeros
    size-40   trailer: magic (8) version (uint32) encoding (uint32) end (uint64) count (uint64)
              zero (uint32) CRC-32C (uint32) of the footer up to here
    size

Version 1 has encoding 0: chunks as they are. Version 2 has encoding 1: chunks in frames of Blosc 1.

Integers are little-endian. ``end`` and the footer's length are multiples of 4096, so that the whole file can
be written with direct I/O, and the last 4096 bytes tell how long the footer is.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from tieredckpt.errors import Corrupt, Invalid
from tieredckpt.format import digest
from tieredckpt.format.crc import crc32c

__all__ = [
    "MAX_CHUNKS",
    "RECORD",
    "TRAILER_BLOCK",
    "PackEntry",
    "decode_footer",
    "decode_table",
    "encode_footer",
    "footer_range",
    "is_compressed",
]

TRAILER_BLOCK: Final = 4096
"""Alignment of chunks and footer in bytes; the last so many bytes of a pack hold its trailer."""

MAX_CHUNKS: Final = 1 << 20
"""Most chunks of a pack, so that memory can hold the footer of every trailer."""

RECORD: Final = np.dtype([("digest", "V16"), ("offset", "<u8"), ("length", "<u8")])
"""One entry of the footer, 32 bytes."""

_MAGIC = b"tckpack\n"
_VERSIONS = {(1, 0): False, (2, 1): True}
"""Whether chunks are compressed, by version and encoding."""
_TRAILER = struct.Struct("<8sIIQQII")
_CRC_SIZE = 4
_MAX_SIZE = (1 << 63) - 1


@dataclass(frozen=True, slots=True)
class PackEntry:
    """A chunk in a pack: its digest (16 bytes), and its offset and length in bytes."""

    digest: bytes
    offset: int
    length: int


def encode_footer(entries: Sequence[PackEntry], end: int, *, compressed: bool = False) -> bytes:
    """The bytes to append to the chunks of a pack.

    Args:
        entries: the chunks, in any order.
        end: length of the data part, a multiple of 4096; the footer's place.
        compressed: whether the chunks are.

    Raises:
        Invalid: an entry that is unaligned, empty, or reaches beyond ``end``, or a digest of another size.
    """
    if not 0 <= end <= _MAX_SIZE or end % TRAILER_BLOCK:
        raise Invalid(f"a pack cannot have {end} bytes of data: pad it to a multiple of {TRAILER_BLOCK}")
    if len(entries) > MAX_CHUNKS:
        raise Invalid(f"a pack cannot hold {len(entries)} chunks; {MAX_CHUNKS} are the most")
    if any(len(entry.digest) != digest.SIZE for entry in entries):
        raise Invalid(f"a pack entry has a digest that is not {digest.SIZE} bytes long")
    table = np.empty(len(entries), RECORD)
    table["digest"] = np.frombuffer(b"".join([entry.digest for entry in entries]), "V16")
    try:
        table["offset"] = [entry.offset for entry in entries]
        table["length"] = [entry.length for entry in entries]
    except OverflowError as error:
        raise Invalid(f"a pack entry has an offset or length out of range: {error}") from error
    if (bad := _first_outside(table, end)) is not None:
        raise Invalid(f"a pack with {end} bytes of data cannot hold {entries[bad]}")
    padding = _footer_length(len(entries)) - table.nbytes - _TRAILER.size
    version = 2 if compressed else 1
    trailer = _TRAILER.pack(_MAGIC, version, version - 1, end, len(entries), 0, 0)[:-_CRC_SIZE]
    footer = table.tobytes() + bytes(padding) + trailer
    return footer + crc32c(footer).to_bytes(_CRC_SIZE, "little")


def footer_range(last_block: bytes, size: int) -> tuple[int, int]:
    """Offset and length of the footer of a pack.

    Args:
        last_block: the last 4096 bytes of the file.
        size: of the file in bytes.

    Raises:
        Corrupt: the file is not a whole pack.
    """
    if len(last_block) != TRAILER_BLOCK or size % TRAILER_BLOCK:
        raise Corrupt(f"a file of {size} bytes is no whole pack: it is no multiple of {TRAILER_BLOCK}")
    end, count = _parse_trailer(last_block)
    length = _footer_length(count)
    if end + length != size:
        raise Corrupt(f"a pack of {size} bytes should have {end} of data and {length} of footer: it is cut")
    return end, length


def decode_footer(footer: bytes, size: int) -> list[PackEntry]:
    """The entries of a footer, in the order in which they were written.

    Args:
        footer: the bytes of `footer_range`.
        size: of the file in bytes.

    Raises:
        Corrupt: damaged, or an entry reaches beyond the data part.
    """
    table = decode_table(footer, size)
    digests = table["digest"].tolist()
    return list(map(PackEntry, digests, table["offset"].tolist(), table["length"].tolist()))


def decode_table(footer: bytes, size: int) -> NDArray[Any]:
    """Decode a footer into one read-only array of dtype `RECORD` over ``footer``; for many entries."""
    if len(footer) < TRAILER_BLOCK:
        raise Corrupt(f"a pack footer of {len(footer)} bytes is cut")
    end, count = _parse_trailer(footer)
    if len(footer) != _footer_length(count) or end + len(footer) != size:
        raise Corrupt(f"a pack footer of {len(footer)} bytes says {count} chunks in {end} of {size} bytes")
    stored = int.from_bytes(footer[-_CRC_SIZE:], "little")
    if crc32c(memoryview(footer)[:-_CRC_SIZE]) != stored:
        raise Corrupt("a pack footer does not match its CRC-32C")
    table = np.frombuffer(footer, RECORD, count)
    if (bad := _first_outside(table, end)) is not None:
        offset, length = int(table["offset"][bad]), int(table["length"][bad])
        raise Corrupt(f"a pack footer has a chunk of {length} bytes at {offset}, with {end} bytes of data")
    return table


def is_compressed(footer: bytes) -> bool:
    """Whether the chunks of a pack are compressed, by its decoded footer."""
    _, version, encoding, *_ = _TRAILER.unpack_from(footer, len(footer) - _TRAILER.size)
    return _VERSIONS[version, encoding]


def _parse_trailer(block: bytes) -> tuple[int, int]:
    magic, version, encoding, end, count, reserved, _ = _TRAILER.unpack_from(block, len(block) - _TRAILER.size)
    if magic != _MAGIC or (version, encoding) not in _VERSIONS or reserved:
        raise Corrupt(
            f"no pack of versions 1 and 2: its trailer begins with {magic!r}, version {version}, encoding {encoding}"
        )
    if end % TRAILER_BLOCK:
        raise Corrupt(f"a pack trailer says {end} bytes of data, which is no multiple of {TRAILER_BLOCK}")
    if count > MAX_CHUNKS:
        raise Corrupt(f"a pack trailer says {count} chunks; {MAX_CHUNKS} are the most")
    return end, count


def _footer_length(count: int) -> int:
    return -(-(count * RECORD.itemsize + _TRAILER.size) // TRAILER_BLOCK) * TRAILER_BLOCK


def _first_outside(table: NDArray[Any], end: int) -> int | None:
    """Index of the first entry that is unaligned, empty, or not wholly inside ``[0, end)``."""
    offset, length = table["offset"], table["length"]
    limit = np.uint64(end)
    # Compared as differences: a sum could wrap around.
    outside = (offset % TRAILER_BLOCK != 0) | (length == 0) | (offset > limit) | (length > limit - offset)
    found = np.flatnonzero(outside)
    return int(found[0]) if found.size else None
