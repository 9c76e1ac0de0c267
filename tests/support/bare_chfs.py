"""CHFS without this library: libchfs by ctypes, in a process of its own that takes JSON lines.

As a program: ``python bare_chfs.py LIBRARY``, the server in ``CHFS_SERVER``.
"""

from __future__ import annotations

import asyncio
import base64
import ctypes
import json
import os
import stat
import subprocess
import sys
from contextlib import suppress
from typing import Any

__all__ = ["BareChfs"]


class BareChfs:
    """The back door of a store at ``root``; end it by `close`."""

    def __init__(self, library: str, root: str) -> None:
        self.root = root
        self._process = subprocess.Popen(
            [sys.executable, __file__, library],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"CHFS_LOG_PRIORITY": "emerg"},
        )

    async def put(self, key: str, data: bytes) -> None:
        await self._ask("put", key, base64.b64encode(data).decode())

    async def get(self, key: str) -> bytes | None:
        found = await self._ask("get", key)
        return None if found is None else base64.b64decode(found)

    async def delete(self, key: str) -> None:
        await self._ask("delete", key)

    async def list(self) -> set[str]:
        found = await self._ask("list", "")
        return {name.removeprefix(f"{self.root}/") for name in found if "~" not in name}

    def clear(self) -> None:
        """Remove the root with all that is in it."""
        self._ask_now("clear", self.root)

    def close(self) -> None:
        self._process.communicate()

    async def _ask(self, verb: str, key: str, *more: str) -> Any:
        return await asyncio.to_thread(self._ask_now, verb, f"{self.root}/{key}".rstrip("/"), *more)

    def _ask_now(self, *words: str) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(words) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())


_FILLER = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p, ctypes.POINTER(ctypes.c_char), ctypes.c_int64
)
_MODE_AT = 24  # of st_mode in the struct stat of Linux on x86-64


class _Library:
    def __init__(self, path: str) -> None:
        with suppress(OSError):  # a site may have linked libchfs with it
            ctypes.CDLL("libmargo.so", ctypes.RTLD_GLOBAL)
        self._chfs = ctypes.CDLL(path)
        for name in ("chfs_pwrite", "chfs_pread"):
            function = getattr(self._chfs, name)
            function.restype = ctypes.c_ssize_t
            function.argtypes = [ctypes.c_int, ctypes.c_char_p, ctypes.c_size_t, ctypes.c_int64]
        assert self._chfs.chfs_init(None) == 0

    def put(self, path: str, data: str) -> None:
        raw = base64.b64decode(data)
        folders = path.split("/")[1:-1]
        for count in range(len(folders)):
            self._chfs.chfs_mkdir("/".join(["", *folders[: count + 1]]).encode(), 0o755)
        file = self._chfs.chfs_create(path.encode(), os.O_WRONLY, 0o644 | stat.S_IFREG)
        assert self._chfs.chfs_pwrite(file, raw, len(raw), 0) == len(raw)
        self._chfs.chfs_close(file)

    def get(self, path: str) -> str | None:
        mode = self.entries(path.rpartition("/")[0]).get(path)
        if mode is None:
            return None
        if stat.S_ISLNK(mode):
            target = ctypes.create_string_buffer(4096)
            length = self._chfs.chfs_readlink(path.encode(), target, 4096)
            path = f"{path.rpartition('/')[0]}/{target.raw[:length].decode().rstrip(chr(0))}"
        file = self._chfs.chfs_open(path.encode(), os.O_RDONLY)
        assert file >= 0, path
        data = b""
        while got := self._chfs.chfs_pread(file, room := ctypes.create_string_buffer(1 << 20), len(room), len(data)):
            assert got > 0
            data += room.raw[:got]
        self._chfs.chfs_close(file)
        return base64.b64encode(data).decode()

    def delete(self, path: str) -> None:
        assert self._chfs.chfs_unlink(path.encode()) == 0

    def list(self, path: str) -> list[str]:
        found = []
        for name, mode in self.entries(path).items():
            found += self.list(name) if stat.S_ISDIR(mode) else [name]
        return found

    def clear(self, path: str) -> None:
        for name, mode in self.entries(path).items():
            if stat.S_ISDIR(mode):
                self.clear(name)
            else:
                self._chfs.chfs_unlink(name.encode())
        self._chfs.chfs_rmdir(path.encode())

    def entries(self, path: str) -> dict[str, int]:
        """Path and mode of what is in a folder, from every server."""
        found: dict[str, int] = {}

        def add(_: object, name: bytes, info: Any, __: int) -> int:
            if name not in (b".", b".."):
                mode = int.from_bytes(info[_MODE_AT : _MODE_AT + 4], "little")
                found[f"{path}/{name.decode()}"] = mode & 0xFFFF
            return 0

        for server in range(self._chfs.chfs_size()):
            self._chfs.chfs_readdir_index((path or "/").encode(), server, None, _FILLER(add))
        return found


def _serve() -> None:
    library = _Library(sys.argv[1])
    for line in sys.stdin:
        verb, *words = json.loads(line)
        sys.stdout.write(json.dumps(getattr(library, verb)(*words)) + "\n")
        sys.stdout.flush()
    os._exit(0)  # libchfs is never ended


if __name__ == "__main__":
    _serve()
