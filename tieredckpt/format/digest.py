"""Digests of chunks: XXH3-128, over bytes where they lie or while they are copied.

Where the native code was built and the processor has the vector instructions for it, digests are native and without
the GIL. A copy with its digest is one pass: each byte is loaded once, and written past the caches, since nobody reads
it soon. On warm 16 MiB chunks it took 0.65 of the time of memcpy, which reads every line that it overwrites, and a
digest alone 0.46, which is what reading the memory takes; the functions named ``…_in_blocks`` (numpy's copy, then
xxhash's digest of the block while it is in the cache) took 1.2 to 1.3. Their results are the same, and they serve
everywhere else.

XXH3 is not cryptographic: it finds damage and equal chunks, it does not stand against forgery. The digest of
a chunk is the canonical (big-endian) form of https://github.com/Cyan4973/xxHash, seed 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final, TypeAlias

import numpy as np
import xxhash
from numpy.typing import NDArray

from tieredckpt.errors import Invalid
from tieredckpt.format.crc import crc32c

__all__ = [
    "BLOCK",
    "NAME",
    "NATIVE",
    "SIZE",
    "Bytes",
    "CopyDigester",
    "Digester",
    "copy_and_digest",
    "copy_start_and_digest",
    "digest",
    "digest_and_checksum",
    "digest_array",
    "digest_each",
]

NAME: Final = "xxh3-128"
"""The digest's name as stored with every step."""

SIZE: Final = 16
"""Bytes of a digest."""

BLOCK: Final = 256 << 10
"""Bytes copied and hashed at a time: a block is still in the L2 cache when it is hashed, and large enough
that numpy and xxhash give up the GIL for it. On warm 16 MiB chunks, 256 KiB to 1 MiB were within a tenth of
each other, and copy and digest ran at 0.7 of the speed of a copy alone, with one thread and with two."""

Bytes: TypeAlias = bytes | bytearray | memoryview | NDArray[Any]
"""A C-contiguous buffer."""

_ZEROS = bytes(BLOCK)

Copy: TypeAlias = Callable[[NDArray[np.uint8], NDArray[np.uint8]], bytes]

_native_copy: Copy | None = None
_native_digest: Callable[[Bytes], bytes] | None = None
_native_seal: Callable[[Bytes], tuple[bytes, int]] | None = None
_native_stream: type[Xxh3Stream] | None = None
_SHORTEST = 0
try:
    from tieredckpt._native import XXH3_ACCELERATED, XXH3_SHORTEST, Xxh3Stream, xxh3, xxh3_copy, xxh3_crc32c
except ImportError:
    pass
else:
    if XXH3_ACCELERATED:  # else xxhash's own code for the processor is the faster one
        _native_copy, _native_digest, _native_seal, _SHORTEST = xxh3_copy, xxh3, xxh3_crc32c, XXH3_SHORTEST
        _native_stream = Xxh3Stream

NATIVE: Final = _native_copy is not None
"""Whether digests, and copies with a digest, are native here."""


class Digester:
    """Digests bytes that come in pieces."""

    __slots__ = ("_state",)

    def __init__(self) -> None:
        self._state = xxhash.xxh3_128()

    def update(self, data: Bytes) -> None:
        """Append ``data``; the GIL is released for a large piece, so ``data`` must not change meanwhile."""
        # numpy's stubs know the buffer protocol only from Python 3.12 on.
        buffer: Any = data
        self._state.update(buffer)

    def digest(self) -> bytes:
        """Digest of all bytes so far, 16 bytes."""
        return self._state.digest()


class CopyDigester:
    """Copies bytes that come in pieces, and digests the copy.

    ``nbytes`` is how many will come. On one thread at a time.
    """

    __slots__ = ("_state",)

    def __init__(self, nbytes: int) -> None:
        self._state: Xxh3Stream | _BlockCopier
        if _native_stream is not None and nbytes >= _SHORTEST:
            self._state = _native_stream()
        else:
            self._state = _BlockCopier()

    def copy(self, src: NDArray[np.uint8], dst: NDArray[np.uint8]) -> None:
        """Take ``src`` in, and fill ``dst``, which does not overlap it, with its start.

        Both are one-dimensional, uint8 and contiguous, and ``dst`` is writable; raises `Invalid` for others, and
        where ``dst`` is the longer one.
        """
        _check_start(src, dst)
        self._state.copy(src, dst)

    def digest(self) -> bytes:
        """Digest of all bytes so far, 16 bytes."""
        return self._state.digest()


class _BlockCopier(Digester):
    __slots__ = ()

    def copy(self, src: NDArray[np.uint8], dst: NDArray[np.uint8]) -> None:
        """Take ``src`` in, and fill ``dst`` with its start."""
        for start in range(0, src.size, BLOCK):
            block = src[start : start + BLOCK]
            copy = dst[start : start + BLOCK]
            np.copyto(copy, block[: copy.size])
            self.update(copy)
            if copy.size < block.size:
                self.update(block[copy.size :])


def digest(data: Bytes, padding: int = 0) -> bytes:
    """Digest of ``data`` followed by ``padding`` zero bytes, which are never allocated.

    Raises:
        Invalid: ``padding`` is negative.
    """
    if padding < 0:
        raise Invalid(f"cannot digest {padding} bytes of padding: it must not be negative")
    if not padding:
        nbytes = memoryview(data).nbytes
        if _native_digest is not None and nbytes >= _SHORTEST:
            return _native_digest(data)
        if nbytes <= BLOCK:
            whole: Any = data  # numpy's stubs know the buffer protocol only from Python 3.12 on
            return xxhash.xxh3_128_digest(whole)
    digester = Digester()
    digester.update(data)
    for _ in range(padding // BLOCK):
        digester.update(_ZEROS)
    digester.update(_ZEROS[: padding % BLOCK])
    return digester.digest()


def digest_each(values: Iterable[bytes]) -> list[bytes]:
    """The digest of each of many small values."""
    if _native_digest is None:
        return list(map(xxhash.xxh3_128_digest, values))
    native, small = _native_digest, xxhash.xxh3_128_digest
    return [small(value) if len(value) < _SHORTEST else native(value) for value in values]


def digest_array(array: NDArray[np.uint8]) -> bytes:
    """Digest of a one-dimensional contiguous uint8 array; other threads get the GIL between blocks at least.

    Raises:
        Invalid: not such an array.
    """
    _check(array, "array")
    if _native_digest is not None and array.size >= _SHORTEST:
        return _native_digest(array)
    digester = Digester()
    for start in range(0, array.size, BLOCK):
        digester.update(array[start : start + BLOCK])
    return digester.digest()


def digest_and_checksum(array: NDArray[np.uint8]) -> tuple[bytes, int]:
    """Digest and CRC-32C of a one-dimensional contiguous uint8 array, which is read from memory once.

    Raises:
        Invalid: not such an array.
    """
    _check(array, "array")
    if _native_seal is not None and array.size >= _SHORTEST:
        return _native_seal(array)
    return _digest_and_checksum_in_blocks(array)


def copy_and_digest(src: NDArray[np.uint8], dst: NDArray[np.uint8]) -> bytes:
    """Copy ``src`` to the start of ``dst``, zero the rest, and return the digest of all of ``dst``: one pass.

    The digest is taken from the copy, so it holds for what is stored even if ``src`` changes meanwhile.

    Args:
        src: the valid bytes of a cell; one-dimensional, uint8, contiguous, no longer than ``dst``.
        dst: a whole cell; one-dimensional, uint8, contiguous, writable.

    Raises:
        Invalid: arrays of another form, or ``src`` longer than ``dst``.
    """
    _check(src, "src")
    _check(dst, "dst")
    if src.size > dst.size:
        raise Invalid(f"{src.size} bytes do not fit into a cell of {dst.size}")
    if _native_copy is not None and dst.size >= _SHORTEST:
        return _native_copy(src, dst)
    return _copy_and_digest_in_blocks(src, dst)


def copy_start_and_digest(src: NDArray[np.uint8], dst: NDArray[np.uint8]) -> bytes:
    """Fill ``dst`` with the start of ``src``, and return the digest of all of ``src``: one pass.

    What is copied is digested as it arrived in ``dst``, so that it is the copy that the digest holds for.

    Args:
        src: a whole cell; one-dimensional, uint8, contiguous.
        dst: one-dimensional, uint8, contiguous, writable, no longer than ``src``.

    Raises:
        Invalid: arrays of another form, or ``dst`` longer than ``src``.
    """
    _check_start(src, dst)
    if _native_copy is not None and src.size >= _SHORTEST:
        return _native_copy(src, dst)
    return _copy_start_and_digest_in_blocks(src, dst)


def _digest_and_checksum_in_blocks(array: NDArray[np.uint8]) -> tuple[bytes, int]:
    digester, crc = Digester(), 0
    for start in range(0, array.size, BLOCK):
        block = array[start : start + BLOCK]
        digester.update(block)
        crc = crc32c(block, crc)
    return digester.digest(), crc


def _copy_and_digest_in_blocks(src: NDArray[np.uint8], dst: NDArray[np.uint8]) -> bytes:
    valid = src.size
    digester = Digester()
    for start in range(0, dst.size, BLOCK):
        end = min(start + BLOCK, dst.size)
        block = dst[start:end]
        if end <= valid:
            np.copyto(block, src[start:end])
        else:
            kept = max(valid - start, 0)
            block[:kept] = src[start:valid] if kept else 0
            block[kept:] = 0
        digester.update(block)
    return digester.digest()


def _copy_start_and_digest_in_blocks(src: NDArray[np.uint8], dst: NDArray[np.uint8]) -> bytes:
    copier = _BlockCopier()
    copier.copy(src, dst)
    return copier.digest()


def _check_start(src: NDArray[np.uint8], dst: NDArray[np.uint8]) -> None:
    _check(src, "src")
    _check(dst, "dst")
    if dst.size > src.size:
        raise Invalid(f"{dst.size} bytes cannot be filled from a cell of {src.size}")


def _check(array: NDArray[np.uint8], name: str) -> None:
    if array.dtype != np.uint8 or array.ndim != 1 or not array.flags.c_contiguous:
        raise Invalid(f"{name} must be one-dimensional, contiguous uint8, not {array.ndim}-dimensional {array.dtype}")
