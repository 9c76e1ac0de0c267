"""The native client of CHFS; private, and only for a process that may be lost (see native/chfs/client.hpp).

Every call gives the GIL up. Buffers are read and filled in place. Errors are `ChfsError`.
"""

from tieredckpt.format.crc import Bytes

class ChfsError(Exception):
    """``args`` are the code (missing, exists, unavailable, full, short, invalid, failed) and the message."""

class File:
    def write(self, data: Bytes, offset: int) -> None: ...
    def read_into(self, into: memoryview, offset: int) -> None: ...
    def close(self) -> None: ...

class Client:
    def __init__(self, library: str = "", server: str = "", rpc_timeout_ms: int = 30_000) -> None:
        """Connect; may end the process."""

    @property
    def version(self) -> str: ...
    @property
    def library(self) -> str: ...
    @property
    def servers(self) -> int: ...
    @property
    def addresses(self) -> list[str]:
        """Of the servers, as they were when it connected; empty where libchfs does not tell."""

    def check_ring(self) -> None: ...
    def create(self, path: str, chunk_size: int) -> File: ...
    def open_object(self, path: str) -> File:
        """Open what is known to be an object: from a link, libchfs would read what is none of its bytes."""

    def stat(self, path: str) -> tuple[str, int, int, int]:
        """Kind (object, folder, link), size in bytes, mtime in nanoseconds, bytes of a CHFS chunk."""

    def remove(self, path: str) -> None: ...
    def remove_folder(self, path: str) -> None: ...
    def list(self, path: str, replicas: bool = False) -> list[tuple[str, str, int, int]]:
        """Name, kind, bytes of the first CHFS chunk, and mtime in nanoseconds of every entry.

        With ``replicas`` also of those on a server that does not own them."""

    def make_folder(self, path: str) -> None: ...
