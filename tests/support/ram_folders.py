"""What tests of RAM folders share: a store on one, its extents, and a script in another process."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from tieredckpt.blobs.ram.store import RamStore

MIB = 1 << 20


@asynccontextmanager
async def opened(folder: Path, capacity: int | None = MIB) -> AsyncIterator[RamStore]:
    store = RamStore.open(folder, capacity)
    try:
        yield store
    finally:
        await store.close()


def take_extent(store: RamStore, content: bytes) -> int:
    offset = store.slab.allocate(len(content))
    assert offset is not None
    store.slab.array[offset : offset + len(content)] = list(content)
    return offset


async def read_extent(store: RamStore, offset: int, nbytes: int) -> bytes:
    into = bytearray(nbytes)
    await store.get_into(store.slab_key, offset, memoryview(into))
    return bytes(into)


def run(script: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", textwrap.dedent(script), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
