"""The directory of the libchfs look-alike, read and written without it."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

import tieredckpt
from support.scenes import SOON

__all__ = ["LookalikeBackDoor", "hangs", "library", "missing"]

_HEADER = struct.Struct("<8sI52x")
_CHUNK = 4096
_MASK = (1 << 64) - 1


def library() -> Path | None:
    """The look-alike of this installation; None where the native code was not built."""
    found = (Path(folder, "libchfs_lookalike.so") for folder in tieredckpt.__path__)
    return next((path for path in found if path.exists()), None)


def missing() -> str:
    """Why nothing of CHFS can be tried here; empty when it can, and a failure where the native code is required."""
    if importlib.util.find_spec("tieredckpt._chfs") is not None and library() is not None:
        return ""
    why = "tieredckpt was installed without its CHFS client and the look-alike"
    if os.environ.get("TIEREDCKPT_REQUIRE_NATIVE") == "1":
        pytest.fail(why)
    return why


async def hangs(directory: Path, verb: str) -> None:
    """Return when a call of a verb hangs, as the switches in force have it."""
    told = directory / "hanging"
    async with asyncio.timeout(SOON):
        while not told.exists() or verb not in told.read_text().splitlines():
            await asyncio.sleep(0.005)


class LookalikeBackDoor:
    """Objects as the chunks that they are: ``servers/<n>/<path>``, and ``<path>:<i>`` for those behind the first."""

    def __init__(self, directory: Path, root: str, servers: int) -> None:
        self._root = root.strip("/")
        self._servers = [directory / "servers" / str(number) for number in range(servers)]

    async def put(self, key: str, data: bytes) -> None:
        def write() -> None:
            chunks = [data[at : at + _CHUNK] for at in range(0, len(data), _CHUNK)] or [b""]
            for folder in Path(self._root, key).parents:
                for server in self._servers:
                    (server / folder).mkdir(parents=True, exist_ok=True)
            for index, chunk in enumerate(chunks):
                self._chunk(key, index).write_bytes(_HEADER.pack(b"CHFSLIKE", _CHUNK) + chunk)

        await asyncio.to_thread(write)

    async def get(self, key: str) -> bytes | None:
        return await asyncio.to_thread(self._get, key)

    def _get(self, key: str) -> bytes | None:
        first = self._chunk(key, 0)
        if not first.is_file():
            return None
        _, size = _HEADER.unpack(first.read_bytes()[: _HEADER.size])
        data = b""
        for chunk in self._chunks(key):
            payload = chunk.read_bytes()[_HEADER.size :]
            assert len(data) % size == 0, "only the last chunk may be short"
            data += payload
        return data

    async def delete(self, key: str) -> None:
        for chunk in list(self._chunks(key)):
            await asyncio.to_thread(chunk.unlink)

    async def list(self) -> set[str]:
        def names() -> set[str]:
            found = set()
            for server in self._servers:
                for path in (server / self._root).rglob("*"):
                    name = path.relative_to(server / self._root).as_posix()
                    if path.is_file() and ":" not in name and "~" not in name:
                        found.add(name)
            return found

        return await asyncio.to_thread(names)

    def _chunks(self, key: str) -> Iterator[Path]:
        index = 0
        while (chunk := self._chunk(key, index)).exists():
            yield chunk
            index += 1

    def _chunk(self, key: str, index: int) -> Path:
        path = f"{self._root}/{key}"
        server = self._servers[(_hash(path) + index) % len(self._servers)]
        return server / (f"{path}:{index}" if index else path)


def _hash(text: str) -> int:
    value = 0xCBF29CE484222325
    for byte in text.encode():
        value = ((value ^ byte) * 0x100000001B3) & _MASK
    value ^= value >> 33
    value = (value * 0xFF51AFD7ED558CCD) & _MASK
    return value ^ (value >> 33)
