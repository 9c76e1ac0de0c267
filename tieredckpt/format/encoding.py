"""Encode chunks into the bytes that a tier stores; only this module knows their size, parts and codecs.

A stored chunk is its *frame* and, with some encodings, a checksum of the frame. Only the extent records its length.
Codecs that call a library build their `Encoding` elsewhere, and add it to `ENCODINGS`.

A compressed chunk is a frame of Blosc 1 (https://github.com/Blosc/c-blosc, README_CHUNK_FORMAT.rst)::

    0   version (2) 1   version of the compressor's format (1) 1   flags 1   bytes of an item 1
    4   bytes of the chunk (uint32)   bytes of a block (uint32)   bytes of the frame (uint32)
    16  the chunk as it is, if the flags say so; else where each block begins (int32), and the blocks

Decoders of other libraries crash on forged frames: `check_frame` is called first.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from tieredckpt.errors import Corrupt
from tieredckpt.format.crc import crc32c
from tieredckpt.format.digest import copy_start_and_digest, digest_and_checksum, digest_array
from tieredckpt.format.layout import ALIGNMENT, aligned

__all__ = ["CRC32C", "ENCODINGS", "FRAME_HEADER", "PLAIN", "Encoded", "Encoding", "check_frame", "stored_header"]

Bytes: TypeAlias = NDArray[np.uint8]
Size = TypeVar("Size", int, NDArray[np.uint64])

FRAME_HEADER: Final = 16
"""Bytes before the content of a frame of Blosc 1."""

_CHECKSUM_SIZE = 4
_HEADER = struct.Struct("<BBBBIII")
_VERSIONS = 2, 1
_IS_STORED = 2
_COMPRESSORS = 1, 4
"""LZ4 and Zstandard, in the upper three bits of the flags."""
_RESERVED = 8
_TYPESIZES = 1, 2, 4, 8


class Encoded(NamedTuple):
    """A chunk as it is stored."""

    digest: bytes
    """Digest of the chunk's bytes before they are encoded."""
    length: int
    """Bytes of the frame and its checksum: those of its extent."""
    parts: list[Bytes]
    """``length`` bytes in whole pages; what follows them in the last page means nothing."""


@dataclass(frozen=True, slots=True, eq=False)
class Encoding:
    """One way to store chunks. All functions are pure, and run on any thread."""

    name: str
    raw: bool
    """Whether the frame is the chunk's own bytes, so that they can be read, seen and sent as they lie."""
    overhead: int
    """Most bytes by which a stored chunk is longer than the chunk; exactly so many if it is ``raw``."""
    checksum_size: int
    """Bytes behind the frame for readers that know no digests; other readers need not read them."""
    codecs: Callable[[int], list[dict[str, Any]]]
    """The zarr codecs behind ``bytes``, for items of so many bytes."""
    encode: Callable[[Bytes, int, int, Bytes | None], Encoded]
    """Encode a chunk.

    The arguments: page-aligned memory that begins with the chunk; bytes of the chunk; bytes of an item; and memory
    of `room` bytes, or None where these are 0: then a raw encoding writes behind the chunk.
    """
    decode: Callable[[Bytes, int, Bytes], bytes]
    """Fill memory with the start of a chunk, all of which is verified; the digest of all of it.

    The arguments: the frame; bytes of the chunk; and the memory, at most as long as the chunk. Raises `Corrupt` for a
    frame that is not one of such a chunk.
    """

    def bounds(self, nbytes: Size) -> tuple[Size, Size]:
        """The least and the most stored bytes of a chunk of ``nbytes``; for an array, of each chunk."""
        most = nbytes + self.overhead
        return (most if self.raw else 0 * nbytes + FRAME_HEADER + 1 + self.checksum_size), most

    def fits(self, length: int, nbytes: int) -> bool:
        """Whether a chunk of ``nbytes`` may be stored in ``length`` bytes.

        Below RAM no length fits both a raw and another encoding: a stored chunk as long as the chunk and its checksum
        is raw.
        """
        least, most = self.bounds(nbytes)
        return least <= length <= most and (self.raw or length != nbytes + self.checksum_size)

    def stored_size(self, nbytes: int) -> int:
        """Bytes that a chunk of ``nbytes`` takes in a pack at most: up to the next page."""
        return -(-(nbytes + self.overhead) // ALIGNMENT) * ALIGNMENT  # `aligned`, without a call for every chunk

    def room(self, nbytes: int, *, behind: bool) -> int:
        """Bytes of memory that `encode` needs besides the chunk's own.

        ``behind`` is whether it may write behind the chunk, up to its `stored_size`. Then a raw encoding needs no more.
        Otherwise it needs a new last page, and another, since the checksum may begin on one page and end on the next.
        """
        if not self.raw:
            return self.stored_size(nbytes)
        return 0 if behind or not self.overhead else self.stored_size(nbytes) - _whole_pages(nbytes)

    def encode_inline(self, chunk: bytes, itemsize: int) -> bytes:
        """Encode a chunk that lies in the index itself."""
        if self.raw:
            return chunk + crc32c(chunk).to_bytes(_CHECKSUM_SIZE, "little") if self.checksum_size else chunk
        room = np.empty(self.room(len(chunk), behind=False), np.uint8)
        _, length, parts = self.encode(np.frombuffer(chunk, np.uint8), len(chunk), itemsize, room)
        return b"".join(parts)[:length]

    def decode_inline(self, stored: bytes, nbytes: int, where: str) -> bytes:
        """The chunk of ``nbytes`` that the index at ``where`` holds as ``stored``, not verified. Raises `Corrupt`."""
        if self.raw:
            if len(stored) != nbytes + self.overhead:
                raise Corrupt(f"{where}: a chunk of {nbytes} bytes is stored with {len(stored)}")
            return stored[:nbytes]
        chunk = np.empty(nbytes, np.uint8)
        try:
            self.decode(np.frombuffer(stored, np.uint8)[: len(stored) - self.checksum_size], nbytes, chunk)
        except Corrupt as error:
            raise Corrupt(f"{where}: {error}") from error
        return chunk.tobytes()


def stored_header(nbytes: int, typesize: int) -> bytes:
    """The header of a frame that stores a chunk of ``nbytes`` uncompressed, of items of 1, 2, 4 or 8 bytes."""
    flags = _IS_STORED | _COMPRESSORS[-1] << 5
    return _HEADER.pack(*_VERSIONS, flags, typesize, nbytes, nbytes, nbytes + FRAME_HEADER)


def check_frame(frame: Bytes, nbytes: int) -> bool:
    """Whether a frame stores its chunk of ``nbytes`` uncompressed. Raises `Corrupt` for a malformed frame."""
    if frame.size < FRAME_HEADER:
        raise Corrupt(f"a chunk of {nbytes} bytes is stored in a frame of {frame.size}")
    *versions, flags, typesize, chunk, block, length = _HEADER.unpack_from(frame)
    fine = tuple(versions) == _VERSIONS and not flags & _RESERVED and typesize in _TYPESIZES and 0 < block <= chunk
    if not fine or chunk != nbytes or length != frame.size:
        raise Corrupt(f"a chunk of {nbytes} bytes has no frame of Blosc 1: {frame[:FRAME_HEADER].tobytes().hex()}")
    if flags & _IS_STORED:
        if length != nbytes + FRAME_HEADER:
            raise Corrupt(f"a chunk of {nbytes} bytes lies as it is in a frame of {length}")
        return True
    starts = FRAME_HEADER + 4 * -(-chunk // block)
    if flags >> 5 not in _COMPRESSORS or block % typesize or not starts < length < nbytes:
        raise Corrupt(f"a chunk of {nbytes} bytes has a frame of {length} that nothing here has written")
    blocks = frame[FRAME_HEADER:starts].view("<u4")
    if int(blocks.min()) < starts or int(blocks.max()) > length - 4:
        raise Corrupt(f"a chunk of {nbytes} bytes has a frame with blocks outside of it")
    return False


def _whole_pages(nbytes: int) -> int:
    return nbytes // ALIGNMENT * ALIGNMENT


def _encode_plain(memory: Bytes, nbytes: int, itemsize: int, room: Bytes | None) -> Encoded:
    return Encoded(digest_array(memory[:nbytes]), nbytes, [memory[: aligned(nbytes)]])


def _encode_crc32c(memory: Bytes, nbytes: int, itemsize: int, room: Bytes | None) -> Encoded:
    digest, crc = digest_and_checksum(memory[:nbytes])
    full, last = 0, memory[: aligned(nbytes + _CHECKSUM_SIZE)]
    if room is not None:
        full, last = _whole_pages(nbytes), room
        last[: nbytes - full] = memory[full:nbytes]
    end = nbytes - full
    last[end : end + _CHECKSUM_SIZE] = np.frombuffer(crc.to_bytes(_CHECKSUM_SIZE, "little"), dtype=np.uint8)
    return Encoded(digest, nbytes + _CHECKSUM_SIZE, [memory[:full], last] if full else [last])


def _decode_raw(frame: Bytes, nbytes: int, into: Bytes) -> bytes:
    if frame.size != nbytes:
        raise Corrupt(f"a chunk of {nbytes} bytes is stored with {frame.size}")
    return copy_start_and_digest(frame, into)


PLAIN: Final = Encoding(
    "plain", raw=True, overhead=0, checksum_size=0, codecs=lambda _: [], encode=_encode_plain, decode=_decode_raw
)
"""Raw bytes: in RAM, which is mapped and compared."""

CRC32C: Final = Encoding(
    "crc32c",
    raw=True,
    overhead=_CHECKSUM_SIZE,
    checksum_size=_CHECKSUM_SIZE,
    codecs=lambda _: [{"name": "crc32c"}],
    encode=_encode_crc32c,
    decode=_decode_raw,
)
"""Followed by its CRC-32C, so that stock readers of zarr notice damage: on every tier below RAM."""

ENCODINGS: Final = {encoding.name: encoding for encoding in (PLAIN, CRC32C)}
"""Encodings of chunks, by name."""
