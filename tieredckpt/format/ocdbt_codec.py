"""The parts that OCDBT manifests and B+tree nodes are made of: frame, varint columns, data file table.

Written after the published format, https://google.github.io/tensorstore/kvstore/ocdbt/ ("Storage format").
A *frame* is magic, total length, version, compression and, at the end, a CRC-32C of it all. A *column* is one
field of all entries, one after the other; integers are ULEB128 varints. Columns are coded with numpy, because
a step index may have a million entries.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from tieredckpt.errors import Corrupt
from tieredckpt.format.crc import crc32c

__all__ = [
    "MANIFEST_MAGIC",
    "MAX_ARITY",
    "MAX_ENTRIES",
    "MAX_EXPANDED",
    "MAX_INLINE",
    "MAX_KEY",
    "MAX_LENGTH",
    "MAX_NODE_EXPANDED",
    "MAX_PATH",
    "MAX_UINT64",
    "NODE_MAGIC",
    "Cursor",
    "DataFile",
    "Extent",
    "Value",
    "column",
    "file_table",
    "frame",
    "is_data_path",
    "open_frame",
    "shared_prefix",
    "varint",
]

MANIFEST_MAGIC: Final = 0x0CDB3A2A
NODE_MAGIC: Final = 0x0CDB20DE

MAX_UINT64: Final = (1 << 64) - 1
MAX_LENGTH: Final = (1 << 63) - 1
"""Offsets and lengths, and the end of every range."""
MAX_KEY: Final = 65535
MAX_ARITY: Final = 1 << 20
"""Entries of one node."""
MAX_PATH: Final = 4096
"""Bytes of a data file's path; OCDBT allows 65535, file systems do not."""
MAX_INLINE: Final = 1 << 20
"""Bytes of a value that lies in the index itself."""
MAX_ENTRIES: Final = 1 << 24
"""Keys of one index: 256 TiB in chunks of 16 MiB."""
MAX_EXPANDED: Final = 1 << 30
"""Bytes of all keys: prefix compression lets few bytes stand for many."""
MAX_NODE_EXPANDED: Final = 64 << 20
"""Bytes of the keys, or of the data file paths, of one node. Writers end a node long before."""

_HEADER = struct.Struct(">I")
_LENGTH = struct.Struct("<Q")
_FRAME_MIN = 18
_CRC_SIZE = 4
_VARINT_MAX = 10
_FEW = 16
"""From this many numbers in a column on, NumPy codes and reads it faster."""
_PATH = re.compile(r"[A-Za-z0-9._-]+(?:/[A-Za-z0-9._-]+)*")


class Extent(msgspec.Struct, frozen=True, gc=False):
    """A range of bytes in a file: path relative to the tier's root, offset and length in bytes.

    A step may have a million of them, and none can be in a cycle: the garbage collector does not track them.
    """

    path: str
    offset: int
    length: int


Value: TypeAlias = bytes | Extent
"""Value of a key: bytes in the index, or the place of the bytes."""


@dataclass(frozen=True, slots=True)
class DataFile:
    """An entry of a data file table: the whole path, and the part of it that child nodes inherit."""

    path: str
    base: str


def is_data_path(path: str) -> bool:
    """Whether a path stays below the root: components of ``[A-Za-z0-9._-]``, none of them ``.`` or ``..``."""
    return len(path) <= MAX_PATH and _PATH.fullmatch(path) is not None and not {".", ".."}.intersection(path.split("/"))


def frame(magic: int, *body: bytes) -> bytes:
    """The pieces of a body with header and checksum: version 0, not compressed."""
    return b"".join(framed(magic, *body))


def framed(magic: int, *body: bytes) -> tuple[bytes, bytes]:
    """As `frame`, but returns the checksum apart, which saves a copy."""
    head = _HEADER.pack(magic) + _LENGTH.pack(sum(map(len, body)) + _FRAME_MIN) + b"\0\0"
    checked = b"".join((head, *body))
    return checked, crc32c(checked).to_bytes(_CRC_SIZE, "little")


def open_frame(data: bytes | memoryview, magic: int, what: str) -> Cursor:
    """A cursor over the body of a frame. Raises `Corrupt` unless magic, length, version and checksum fit."""
    if len(data) < _FRAME_MIN:
        raise Corrupt(f"{what}: {len(data)} bytes are too few")
    found, length = _HEADER.unpack_from(data)[0], _LENGTH.unpack_from(data, 4)[0]
    if found != magic or length != len(data):
        raise Corrupt(f"{what}: magic {found:#010x} and length {length}, not {magic:#010x} and {len(data)}")
    if crc32c(memoryview(data)[:-_CRC_SIZE]) != int.from_bytes(data[-_CRC_SIZE:], "little"):
        raise Corrupt(f"{what}: does not match its CRC-32C")
    cursor = Cursor(data, _LENGTH.size + _HEADER.size, len(data) - _CRC_SIZE, what)
    version, compression = cursor.varint(MAX_UINT64), cursor.varint(MAX_UINT64)
    if version or compression:
        raise Corrupt(f"{what}: version {version} with compression {compression}; only 0 and 0 are read")
    return cursor


def varint(value: int) -> bytes:
    """ULEB128 of an integer in ``[0, 2**64)``."""
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def column(values: Sequence[int] | NDArray[Any]) -> bytes:
    """ULEB128 of each integer in ``[0, 2**64)``, one after the other."""
    numbers = np.asarray(values, np.uint64)
    if numbers.size < _FEW:
        return b"".join(map(varint, numbers.tolist()))
    longest = max(1, -(-int(numbers.max()).bit_length() // 7))
    if longest == 1:
        return numbers.astype(np.uint8).tobytes()
    sizes = np.ones(numbers.size, np.int64)
    for septet in range(1, longest):
        sizes += numbers >= np.uint64(1 << 7 * septet)
    starts = np.cumsum(sizes) - sizes
    out = np.empty(int(starts[-1] + sizes[-1]), np.uint8)
    out[starts] = numbers & 0x7F | (sizes > 1) * np.uint64(0x80)
    for septet in range(1, longest):
        rest = np.flatnonzero(sizes > septet)
        more = (sizes[rest] > septet + 1) * np.uint64(0x80)
        out[starts[rest] + septet] = numbers[rest] >> np.uint64(7 * septet) & 0x7F | more
    return out.tobytes()


def shared_prefix(one: bytes, other: bytes) -> int:
    """Length of the common prefix of two byte strings."""
    length = min(len(one), len(other))
    difference = int.from_bytes(one[:length], "big") ^ int.from_bytes(other[:length], "big")
    return length - (difference.bit_length() + 7) // 8


def file_table(paths: Sequence[str]) -> bytes:
    """A data file table of ascending paths, which pass no base path on to child nodes."""
    encoded = [path.encode() for path in paths]
    shared = [shared_prefix(one, other) for one, other in pairwise(encoded)]
    suffixes = encoded[:1] + [path[skip:] for path, skip in zip(encoded[1:], shared, strict=True)]
    lengths = column([len(suffix) for suffix in suffixes])
    return varint(len(encoded)) + column(shared) + lengths + bytes(len(encoded)) + b"".join(suffixes)


class Cursor:
    """Reads the fields of a frame's body in order; raises `Corrupt` for a missing or malformed field.

    A count is not trusted for an allocation: each entry needs a byte, and the bytes are counted first.
    """

    __slots__ = ("_array", "_data", "_end", "_position", "what")

    def __init__(self, data: bytes | memoryview, position: int, end: int, what: str) -> None:
        self._data = memoryview(data)
        self._array = np.frombuffer(data, np.uint8)
        self._position = position
        self._end = end
        self.what = what

    def take(self, length: int) -> bytes:
        """The next ``length`` bytes."""
        if not 0 <= length <= self._end - self._position:
            raise Corrupt(f"{self.what}: ends within a field of {length} bytes")
        self._position += length
        return bytes(self._data[self._position - length : self._position])

    def byte(self) -> int:
        return self.take(1)[0]

    def varint(self, limit: int) -> int:
        """The next integer, at most ``limit``."""
        value = 0
        for place, byte in enumerate(self._data[self._position : min(self._end, self._position + _VARINT_MAX - 1)]):
            value |= (byte & 0x7F) << 7 * place
            if byte < 0x80:
                if value > limit or (place and not byte):
                    break
                self._position += place + 1
                return value
        return int(self._many(1, limit)[0])  # a longer one, or none: its error

    def column(self, count: int, limit: int) -> NDArray[np.uint64]:
        """The next ``count`` integers, each at most ``limit``; uint64."""
        if count < _FEW:
            return np.array([self.varint(limit) for _ in range(count)], np.uint64)
        return self._many(count, limit)

    def _many(self, count: int, limit: int) -> NDArray[np.uint64]:
        window = self._array[self._position : min(self._end, self._position + _VARINT_MAX * count)]
        head = window[:count]
        if head.size == count and bool((head < 0x80).all()):
            self._position += count
            values = head.astype(np.uint64)
        else:
            last = np.flatnonzero(window < 0x80)[:count]
            if last.size < count:
                raise Corrupt(f"{self.what}: ends within {count} integers")
            self._position += int(last[-1]) + 1
            values = self._join(window, last)
        if count and (largest := int(values.max())) > limit:
            raise Corrupt(f"{self.what}: an integer {largest} is larger than {limit}")
        return values

    def _join(self, window: NDArray[np.uint8], last: NDArray[np.int64]) -> NDArray[np.uint64]:
        starts = np.empty_like(last)
        starts[0] = 0
        starts[1:] = last[:-1] + 1
        sizes = last - starts + 1
        final = window[last]
        longest = int(sizes.max())
        if longest > _VARINT_MAX or bool(((final == 0) & (sizes > 1)).any()):
            raise Corrupt(f"{self.what}: an integer is not in its shortest form")
        if longest == _VARINT_MAX and int(final[sizes == _VARINT_MAX].max()) > 1:
            raise Corrupt(f"{self.what}: an integer does not fit into 64 bits")
        values = (window[starts] & 0x7F).astype(np.uint64)
        for septet in range(1, longest):
            rest = np.flatnonzero(sizes > septet)
            values[rest] |= (window[starts[rest] + septet] & 0x7F).astype(np.uint64) << np.uint64(7 * septet)
        return values

    def files(self, base: str) -> list[DataFile]:
        """The next data file table, of a node that was reached through a path with transitive part ``base``.

        A path is empty (in the table of an empty index) or one that `is_data_path` accepts.
        """
        count = self.varint(self._end)
        shared = [0, *self.column(max(count - 1, 0), MAX_PATH).tolist()]
        lengths = self.column(count, MAX_PATH).tolist()
        bases = self.column(count, MAX_PATH).tolist()
        files: list[DataFile] = []
        previous, expanded = "", 0
        for skip, length, inherited in zip(shared[:count], lengths, bases, strict=True):
            expanded += skip + length
            if skip > len(previous) or inherited > skip + length or expanded > MAX_NODE_EXPANDED:
                raise Corrupt(f"{self.what}: a data file's path has impossible lengths")
            suffix = self.take(length)
            previous = previous[:skip] + suffix.decode("ascii", "replace")
            path = base + previous
            if path and not is_data_path(path):
                raise Corrupt(f"{self.what}: {path[:200]!r} is no path below the root")
            files.append(DataFile(path, base + previous[:inherited]))
        return files

    def finish(self) -> None:
        """Check that the body ends here; raises `Corrupt` otherwise."""
        if self._position != self._end:
            raise Corrupt(f"{self.what}: {self._end - self._position} bytes too many")
