"""Native code of tieredckpt; private. Absent where no C++ compiler was at hand when it was installed."""

from typing import Any

from numpy.typing import NDArray

from tieredckpt.format.crc import Bytes

CRC32C_ACCELERATED: bool
"""Whether `crc32c` uses CRC instructions on this processor."""

def crc32c(data: Bytes, crc: int = 0) -> int:
    """Extend `crc` by the bytes of a C-contiguous buffer; without the GIL from 64 KiB on."""

def crc32c_portable(data: Bytes, crc: int = 0) -> int:
    """The same from tables alone; what `crc32c` does on processors without CRC instructions."""

XXH3_ACCELERATED: bool
"""Whether this processor has the vector instructions that `xxh3_copy` is written for."""

XXH3_SHORTEST: int
"""Fewer bytes are refused (`ValueError`): the short forms of XXH3 are not here."""

def xxh3(data: Bytes) -> bytes:
    """XXH3-128 of a C-contiguous buffer, canonical; without the GIL from 64 KiB on."""

def xxh3_crc32c(data: Bytes) -> tuple[bytes, int]:
    """Both of a C-contiguous buffer, which is read from memory once; without the GIL from 64 KiB on."""

class Xxh3Stream:
    """XXH3-128 of bytes that come in pieces of any size; two threads at one would harm memory."""

    def copy(self, source: NDArray[Any], target: NDArray[Any]) -> None:
        """Take `source` in, and fill `target`, which does not overlap it, with its start; that counts as it arrived.

        Without the GIL from 64 KiB on. A longer target is refused (`ValueError`).
        """

    def digest(self) -> bytes:
        """Of all bytes so far, canonical; of fewer than `XXH3_SHORTEST` it is refused (`ValueError`)."""

def xxh3_copy(source: NDArray[Any], target: NDArray[Any]) -> bytes:
    """Copy what fits of `source` to `target`, fill that up with zeros, and return the digest of the longer one.

    The copied part counts as it arrived in `target`. Without the GIL from 64 KiB on.
    """

def xxh3_copy_portable(source: NDArray[Any], target: NDArray[Any]) -> bytes:
    """The same without vector instructions."""

NARROW_ACCELERATED: bool
"""Whether this processor has the vector instructions that `narrow_bf16` and `narrow_fp16` are written for."""

def narrow_bf16(source: NDArray[Any], target: NDArray[Any]) -> bool:
    """Round 32-bit floats to bfloat16 in `target`; whether all of them are finite before and after.

    What becomes of others is not said. Without the GIL from 64 KiB on. `ValueError` where the sizes do not fit.
    """

def narrow_fp16(source: NDArray[Any], target: NDArray[Any]) -> bool:
    """The same, to float16."""

def narrow_bf16_portable(source: NDArray[Any], target: NDArray[Any]) -> bool:
    """The same without vector instructions."""

def narrow_fp16_portable(source: NDArray[Any], target: NDArray[Any]) -> bool:
    """The same without vector instructions."""
