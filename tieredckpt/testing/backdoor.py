"""Helpers for tests of blob stores: a back door, a store with all verbs, and memory of known content."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import mmap
import os
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Protocol

from tieredckpt.blobs.base import ALIGNMENT, BlobStore, GetDigested, ListAtOnce, PutStream, Stretch

__all__ = [
    "BackDoor",
    "FolderBackDoor",
    "aligned",
    "assert_cancelled_reads_let_go",
    "listed",
    "lister",
    "pattern",
    "verbs",
]


class BackDoor(Protocol):
    """Raw access to the data of a store, past the store."""

    async def put(self, key: str, data: bytes) -> None: ...

    async def get(self, key: str) -> bytes | None:
        """The whole object; None if there is none."""

    async def delete(self, key: str) -> None: ...

    async def list(self) -> set[str]:
        """The names of all objects there, keys or not."""


class FolderBackDoor:
    """The back door of a store that keeps objects as files named by their keys."""

    def __init__(self, root: Path) -> None:
        self._root = root

    async def put(self, key: str, data: bytes) -> None:
        def write() -> None:
            path = self._root / key
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)

        await asyncio.to_thread(write)

    async def get(self, key: str) -> bytes | None:
        def read() -> bytes | None:
            path = self._root / key
            return path.read_bytes() if path.is_file() else None

        return await asyncio.to_thread(read)

    async def delete(self, key: str) -> None:
        await asyncio.to_thread((self._root / key).unlink)

    async def list(self) -> set[str]:
        def names() -> set[str]:
            # Folders that the store deletes meanwhile are skipped; `rglob` would fail on them.
            found = (Path(folder, name) for folder, _, files in os.walk(self._root) for name in files)
            return {path.relative_to(self._root).as_posix() for path in found}

        return await asyncio.to_thread(names)


@functools.lru_cache(maxsize=64)
def pattern(nbytes: int, seed: int = 0) -> bytes:
    """Random bytes, equal for equal seeds."""
    return random.Random(seed).randbytes(nbytes)


def aligned(data: bytes, *, shift: int = 0) -> memoryview:
    """A writable copy of ``data`` in memory whose address is ``shift`` bytes past a page's start."""
    # An anonymous mapping cannot be empty, and keeps a page to show writes past the end.
    view = memoryview(mmap.mmap(-1, shift + len(data) + ALIGNMENT))[shift : shift + len(data)]
    view[:] = data
    return view


async def listed(store: BlobStore, prefix: str = "") -> dict[str, int]:
    """Key and size of the objects that the store lists; an object that is listed twice is an error."""
    infos = [(info.key, info.size) async for info in store.list(prefix)]
    found = dict(infos)
    assert len(found) == len(infos), f"listed twice: {infos}"
    return found


def verbs(store: BlobStore, key: str) -> list[Callable[[], Awaitable[object]]]:
    """A call of each verb that takes a key, and of the store's optional abilities."""
    calls: list[Callable[[], Awaitable[object]]] = [
        lambda: store.get(key, limit=10),
        lambda: store.get_into(key, 0, memoryview(bytearray(1))),
        lambda: store.put(key, [b"x"]),
        lambda: store.put(key, [bytes(2 << 20)]),
        lambda: store.stat(key),
        lambda: store.delete(key),
    ]
    if store.traits.create_only:
        calls.append(lambda: store.put(key, [b"x"], create_only=True))
    if store.traits.digested_reads and isinstance(store, GetDigested):
        calls.append(lambda: store.get_digested(key, [Stretch(0, 1, memoryview(bytearray(1)))]))
    if isinstance(store, PutStream):
        calls.append(lambda: store.put_stream(key, _one_piece()))
    return calls


async def lister(store: BlobStore) -> ListAtOnce | None:
    """The store, if it can list at once."""
    return store if isinstance(store, ListAtOnce) and await store.list_at_once("") is not None else None


async def _one_piece() -> AsyncIterator[bytes]:
    yield b"x"


async def assert_cancelled_reads_let_go(
    store: BlobStore, key: str, read: Callable[[memoryview], Awaitable[object]]
) -> None:
    """Assert that a ``read`` of 8 MiB, cancelled sooner or later, leaves the memory alone once it has ended."""
    size = 8 << 20
    for turns in (1, 2, 20, 100):
        into = aligned(bytes(size))
        reading = asyncio.ensure_future(read(into))
        for _ in range(turns):
            await asyncio.sleep(0)
        reading.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await reading
        into[:] = bytes(size)
        assert (await store.stat(key)).size == size
        assert into == bytes(size)
