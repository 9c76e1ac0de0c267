"""Native code of tieredckpt; private. Absent where no C++ compiler was at hand when it was installed."""

from tieredckpt.format.crc import Bytes

CRC32C_ACCELERATED: bool
"""Whether `crc32c` uses CRC instructions on this processor."""

def crc32c(data: Bytes, crc: int = 0) -> int:
    """Extend `crc` by the bytes of a C-contiguous buffer; without the GIL from 64 KiB on."""

def crc32c_portable(data: Bytes, crc: int = 0) -> int:
    """The same from tables alone; what `crc32c` does on processors without CRC instructions."""
