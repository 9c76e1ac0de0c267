"""CRC-32C of bytes in memory: the checksum of manifests, B+tree nodes, pack footers and zarr3 chunks.

CRC-32C is the Castagnoli polynomial, reflected, as in RFC 3720.

google_crc32c holds the GIL while it works and refuses writable buffers, and every promoted chunk is
checksummed while training runs. The native function gives the GIL up and takes any buffer. Measured over
16 MiB on two x86-64 cores: native ran at 1.6 times the speed of a warm memcpy, google_crc32c at half of it;
a thread that computed in Python beside them kept 0.8 to 1.1 of its speed beside native, and 0.35 to 0.4
beside google_crc32c.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, TypeAlias

import google_crc32c
import numpy as np
from numpy.typing import NDArray

from tieredckpt.errors import Invalid

__all__ = ["NATIVE", "Bytes", "crc32c"]

Bytes: TypeAlias = bytes | bytearray | memoryview | NDArray[Any]
"""A C-contiguous buffer of any shape and item type; its bytes count in memory order."""

_FALLBACK_BLOCK = 1 << 20
"""Bytes hashed between two chances for another thread to take the GIL (a fraction of a millisecond)."""

_native: Callable[[Bytes, int], int] | None
try:
    from tieredckpt._native import crc32c as _native
except ImportError:
    _native = None

NATIVE: Final = _native is not None
"""Whether the native function was built; without it the results are the same, and other threads wait."""


def crc32c(data: Bytes, crc: int = 0) -> int:
    """CRC-32C of `data`, or of what `crc` already covers followed by `data`.

    ``crc32c(b, crc32c(a)) == crc32c(a + b)``. `crc` and the result are in ``[0, 2**32)``.

    Raises:
        Invalid: `data` is no C-contiguous buffer, or `crc` is out of range.
    """
    try:
        if _native is not None:
            return _native(data, crc)
        return _crc32c_in_blocks(data, crc)
    except (BufferError, TypeError, ValueError) as error:
        raise Invalid(
            f"crc32c needs a C-contiguous buffer and a crc in [0, 2**32), "
            f"not {type(data).__name__} and {crc!r}: {error}"
        ) from error


def _crc32c_in_blocks(data: Bytes, crc: int) -> int:
    """`crc32c` by google_crc32c, which takes a writable buffer only when an array lends it."""
    if not 0 <= crc < 1 << 32:
        raise ValueError("crc is out of range")
    view = np.frombuffer(data, dtype=np.uint8)
    for start in range(0, view.size, _FALLBACK_BLOCK):
        crc = google_crc32c.extend(crc, view[start : start + _FALLBACK_BLOCK])
    return crc
