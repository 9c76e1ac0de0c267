"""Compressed chunks: frames of Blosc 1, which stock readers of zarr open, followed by their CRC-32C.

numcodecs encodes and decodes them where it is installed, else TensorStore does, at half the speed. Both release the
GIL. Block sizes are explicit: the automatic ones mix exponents and mantissas in one block, and gain half as much.
"""

from __future__ import annotations

import logging
import sys
import threading
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any, Final, Literal, NamedTuple, Protocol

import numpy as np

from tieredckpt.errors import Corrupt
from tieredckpt.format.crc import crc32c
from tieredckpt.format.digest import copy_start_and_digest, digest_array
from tieredckpt.format.encoding import (
    CRC32C,
    ENCODINGS,
    FRAME_HEADER,
    Bytes,
    Encoded,
    Encoding,
    check_frame,
    stored_header,
)
from tieredckpt.format.layout import ALIGNMENT, aligned

__all__ = ["BLOSC", "CODECS", "Codec", "encoding_of", "library"]

_log = logging.getLogger("tieredckpt")

Codec = Literal["none", "fast", "small"]

_LEAST_GAIN = 0.03
"""If compression saves less than this share of a chunk, the chunk is stored as it is, which is faster to read."""
_CHECKSUM_SIZE = 4
_WARM = 64 << 20
"""Largest chunk, in bytes, for which a thread keeps its memory: first-touched pages cost more than decoding."""


class _Settings(NamedTuple):
    """Settings of Blosc; each frame records its own, so readers need none."""

    cname: str
    shuffle: Literal["shuffle", "bitshuffle"]
    blocksize: int


_FAST = _Settings("lz4", "bitshuffle", 256 << 10)
_SMALL = _Settings("zstd", "shuffle", 1 << 20)


class _Library(Protocol):
    """Blosc 1, by some package; both functions run on any thread."""

    def encode(self, chunk: Bytes, typesize: int, how: _Settings) -> bytes:
        """The frame of a chunk."""

    def decode(self, frame: Bytes, into: Bytes) -> None:
        """Fill ``into`` with the chunk of a frame whose header was checked. Raises `Corrupt`."""


class _Numcodecs:
    def __init__(self) -> None:
        from numcodecs import blosc

        self._blosc = blosc

    def encode(self, chunk: Bytes, typesize: int, how: _Settings) -> bytes:
        codec = self._blosc.Blosc(how.cname, 1, _shuffle(typesize, how, self._blosc), how.blocksize)
        frame: bytes = codec.encode(chunk.view(f"u{typesize}"))
        return frame

    def decode(self, frame: Bytes, into: Bytes) -> None:
        try:
            self._blosc.decompress(frame, into)
        except (RuntimeError, ValueError) as error:
            raise Corrupt(f"a frame of Blosc cannot be decoded: {error}") from error


def _shuffle(typesize: int, how: _Settings, blosc: Any) -> int:
    if typesize == 1:
        return int(blosc.NOSHUFFLE)
    return int(blosc.SHUFFLE if how.shuffle == "shuffle" else blosc.BITSHUFFLE)


class _TensorStore:
    """Blosc as the codec of a zarr array that is one chunk in memory."""

    def encode(self, chunk: Bytes, typesize: int, how: _Settings) -> bytes:
        array = self._array(chunk.size // typesize, typesize, how)
        array.write(chunk.view(f"u{typesize}")).result()
        frame: bytes = array.kvstore.read("c/0").result().value
        return frame

    def decode(self, frame: Bytes, into: Bytes) -> None:
        array = self._array(into.size, 1, _SMALL)  # frames say how they were made
        try:
            array.kvstore.write("c/0", frame.tobytes()).result()
            np.copyto(into, array.read().result())
        except ValueError as error:
            raise Corrupt(f"a frame of Blosc cannot be decoded: {error}") from error

    @staticmethod
    def _array(items: int, typesize: int, how: _Settings) -> Any:
        import tensorstore as ts

        metadata = {
            "zarr_format": 3,
            "node_type": "array",
            "shape": [items],
            "data_type": f"uint{8 * typesize}",
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [items]}},
            "chunk_key_encoding": {"name": "default"},
            "fill_value": 0,
            "codecs": [{"name": "bytes", "configuration": {"endian": sys.byteorder}}, _zarr_codec(how, typesize)],
        }
        spec = {"driver": "zarr3", "kvstore": {"driver": "memory"}, "metadata": metadata}
        # A chunk of zeros is the fill value, and would not be stored.
        return ts.open(
            {**spec, "store_data_equal_to_fill_value": True}, open=True, assume_metadata=True, context=ts.Context()
        ).result()


@lru_cache(maxsize=1)
def library() -> _Library:
    """The fastest package that is installed."""
    try:
        return _Numcodecs()
    except (ImportError, ValueError):  # numcodecs fails so beside some versions of zfpy
        return _TensorStore()


def _zarr_codec(how: _Settings, itemsize: int) -> dict[str, Any]:
    typesize = _typesize(itemsize)
    return {
        "name": "blosc",
        "configuration": {
            "cname": how.cname,
            "clevel": 1,
            "shuffle": how.shuffle if typesize > 1 else "noshuffle",
            "typesize": typesize,
            "blocksize": how.blocksize,
        },
    }


def _typesize(itemsize: int) -> int:
    """Bytes of the unit that is shuffled: an item, or one of the two parts of a large complex number."""
    return min(itemsize, 8)


def _encode(how: _Settings | None, memory: Bytes, nbytes: int, itemsize: int, room: Bytes | None) -> Encoded:
    """Encode a chunk; without settings, or where little is gained, the frame holds it uncompressed.

    A compressed frame is decompressed and compared first, since the step may be gone from RAM when the frame is read
    for the first time.
    """
    assert room is not None
    chunk, typesize = memory[:nbytes], _typesize(itemsize)
    end, digest = 0, b""
    if how is not None and nbytes >= ALIGNMENT:
        frame = library().encode(chunk, typesize, how)
        if len(frame) <= (1 - _LEAST_GAIN) * nbytes:
            room[: len(frame)] = np.frombuffer(frame, np.uint8)
            digest = digest_array(chunk)
            if _has(room[: len(frame)], nbytes, digest):
                end = len(frame)
            else:
                _tell_of_wrong_frames()
    if not end:
        end = FRAME_HEADER + nbytes
        room[:FRAME_HEADER] = np.frombuffer(stored_header(nbytes, typesize), np.uint8)
        digest = copy_start_and_digest(chunk, room[FRAME_HEADER:end])
    crc = crc32c(room[:end]).to_bytes(_CHECKSUM_SIZE, "little")
    length = end + _CHECKSUM_SIZE
    room[end:length] = np.frombuffer(crc, np.uint8)
    room[length : aligned(length)] = 0  # and not what was there before
    return Encoded(digest, length, [room[: aligned(length)]])


def _has(frame: Bytes, nbytes: int, digest: bytes) -> bool:
    """Whether a frame decodes to the chunk of that digest."""
    try:
        return _decode(frame, nbytes, _memory(nbytes)) == digest
    except Corrupt:
        return False


@lru_cache(maxsize=1)
def _tell_of_wrong_frames() -> None:
    """Log the error once in a process, for there may be many."""
    _log.error(
        "a compressed chunk does not decompress to what it was; such chunks are stored as they are. The library that "
        "compresses (numcodecs or TensorStore), or the processor or memory of this machine, is at fault"
    )


class _Warm(threading.local):
    memory: Bytes = np.empty(0, np.uint8)


_warm = _Warm()


def _memory(nbytes: int) -> Bytes:
    """Memory of this thread, valid until the thread asks again."""
    if nbytes > _WARM:
        return np.empty(nbytes, np.uint8)
    if _warm.memory.size < nbytes:
        _warm.memory = np.empty(nbytes, np.uint8)
    return _warm.memory[:nbytes]


def _decode(frame: Bytes, nbytes: int, into: Bytes) -> bytes:
    if check_frame(frame, nbytes):
        return copy_start_and_digest(frame[FRAME_HEADER:], into)
    if into.size == nbytes:
        library().decode(frame, into)
        return digest_array(into)
    memory = _memory(nbytes)
    library().decode(frame, memory)
    return copy_start_and_digest(memory, into)


BLOSC: Final = Encoding(
    "blosc",
    raw=False,
    overhead=FRAME_HEADER + _CHECKSUM_SIZE,
    checksum_size=_CHECKSUM_SIZE,
    codecs=lambda itemsize: [_zarr_codec(_SMALL, itemsize), {"name": "crc32c"}],
    encode=partial(_encode, None),
    decode=_decode,
)
"""Chunks in Blosc frames. This encoding itself stores chunks uncompressed in their frames."""

CODECS: Final[dict[Codec, Encoding]] = {
    "none": CRC32C,
    "fast": replace(BLOSC, encode=partial(_encode, _FAST)),
    "small": replace(BLOSC, encode=partial(_encode, _SMALL)),
}
"""Encoding of a tier by its `codec`. A tier with either of the last two can refer to chunks of the other."""

ENCODINGS[BLOSC.name] = BLOSC


def encoding_of(length: int, nbytes: int) -> Encoding:
    """The encoding of a chunk of ``nbytes`` that takes ``length`` bytes on a tier below RAM."""
    return CRC32C if length == nbytes + _CHECKSUM_SIZE else BLOSC
