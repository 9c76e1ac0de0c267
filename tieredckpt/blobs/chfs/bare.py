"""A bare loop over libchfs, in a process of its own: the limit that the `chfs` tier is measured against.

It is the simplest program that uses CHFS: threads write and read pieces of one CHFS chunk each, from memory of their
own, and trust every answer of libchfs.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any, Self

from tieredckpt.errors import TierUnavailable

__all__ = ["BareLoop", "main"]


class BareLoop:
    """Times whole objects of ``nbytes``; a context manager. Raises `TierUnavailable` when libchfs ends it.

    Args:
        library: path of libchfs.
        server: one server's address.
        chunk_size: of CHFS, in bytes.
        threads: how many pieces are in flight.
        nbytes: of each object.
    """

    def __init__(self, library: str, server: str, *, chunk_size: int, threads: int, nbytes: int) -> None:
        job = {"library": library, "server": server, "chunk_size": chunk_size, "threads": threads, "nbytes": nbytes}
        self._process = subprocess.Popen(  # noqa: S603 - our own code, by our own interpreter
            [sys.executable, "-m", "tieredckpt.blobs.chfs.bare", json.dumps(job)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()  # libchfs is not to be ended in order: chfs_term may crash
        self._process.communicate()

    def write(self, path: str) -> float:
        """Seconds to create the object and write all of it."""
        return self._ask("write", path)

    def read(self, path: str) -> float:
        """Seconds to open the object and read all of it."""
        return self._ask("read", path)

    def remove(self, path: str) -> None:
        self._ask("remove", path)

    def _ask(self, verb: str, path: str) -> float:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            print(json.dumps([verb, path]), file=self._process.stdin, flush=True)
            return float(self._process.stdout.readline())
        except (OSError, ValueError) as error:
            raise TierUnavailable(f"the bare loop over libchfs ended at {verb} {path}: {error}") from error


def main(job: str) -> None:
    """Answer lines of ``[verb, path]`` with seconds, until the input ends."""
    _Loop(**json.loads(job)).serve()
    os._exit(0)


class _Loop:
    def __init__(self, library: str, server: str, chunk_size: int, threads: int, nbytes: int) -> None:
        os.environ |= {"CHFS_BUF_SIZE": "0", "CHFS_ASYNC_ACCESS": "0", "CHFS_NODE_LIST_CACHE_TIMEOUT": "0"}
        self._libchfs = _load(library)
        if self._libchfs.chfs_init(os.fsencode(server)) != 0:
            sys.exit(f"chfs_init({server!r}) failed")
        self._chunk_size, self._nbytes = chunk_size, nbytes
        self._memory = mmap.mmap(-1, nbytes)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        ctypes.memset(self._address, 7, nbytes)
        self._pool = ThreadPoolExecutor(threads)

    def serve(self) -> None:
        verbs = {"write": self._write, "read": self._read, "remove": self._remove}
        for line in sys.stdin:
            verb, path = json.loads(line)
            begin = time.perf_counter()
            verbs[verb](os.fsencode(path))
            sys.stdout.write(f"{time.perf_counter() - begin}\n")
            sys.stdout.flush()

    def _write(self, path: bytes) -> None:
        self._pieces(
            self._libchfs.chfs_create_chunk_size(path, os.O_WRONLY, 0o600, self._chunk_size), self._libchfs.chfs_pwrite
        )

    def _read(self, path: bytes) -> None:
        self._pieces(self._libchfs.chfs_open(path, os.O_RDONLY), self._libchfs.chfs_pread)

    def _remove(self, path: bytes) -> None:
        self._libchfs.chfs_truncate(path, ctypes.c_int64(0))  # at once, where unlink would leave it for later
        self._libchfs.chfs_unlink(path)

    def _pieces(self, descriptor: int, call: Any) -> None:
        if descriptor < 0:
            sys.exit("libchfs opened nothing")

        def one(offset: int) -> None:
            length = min(self._chunk_size, self._nbytes - offset)
            if call(descriptor, self._address + offset, length, offset) != length:
                raise OSError(f"libchfs moved less than {length} bytes at {offset}")

        list(self._pool.map(one, range(0, self._nbytes, self._chunk_size)))
        self._libchfs.chfs_close(descriptor)


def _load(library: str) -> ctypes.CDLL:
    try:
        loaded = ctypes.CDLL(library)
    except OSError:
        ctypes.CDLL("libmargo.so", mode=ctypes.RTLD_GLOBAL)
        loaded = ctypes.CDLL(library)
    for name in ("chfs_pwrite", "chfs_pread"):
        call = getattr(loaded, name)
        call.restype = ctypes.c_ssize_t
        call.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int64]
    return loaded


if __name__ == "__main__":
    main(sys.argv[1])
