"""The RAM tier's store keeps the contract of `tieredckpt.blobs.base`, its slab beside the objects."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tieredckpt.blobs.base import BlobStore
from tieredckpt.blobs.ram.store import RamStore
from tieredckpt.testing.backdoor import BackDoor, FolderBackDoor
from tieredckpt.testing.blobs import BlobStoreTests

CAPACITY = 1 << 20


pytestmark = pytest.mark.usefixtures("never_blocked_loop")


class WithoutTheSlab(FolderBackDoor):
    """The folder, but for what an open store keeps there for itself."""

    def __init__(self, root: Path, slab_key: str) -> None:
        super().__init__(root)
        self._own = {"lock", "slab.json", slab_key}

    async def list(self) -> set[str]:
        found = await super().list()
        assert found >= self._own, "the store's own files stay, whatever is put and deleted"
        return found - self._own


class _Ram(BlobStoreTests):
    @pytest.fixture
    def back_door(self, store: RamStore) -> BackDoor:
        return WithoutTheSlab(Path(store.location), store.slab_key)


class TestRamStore(_Ram):
    @pytest.fixture
    async def store(self, shared_memory: Path) -> AsyncIterator[BlobStore]:
        store = await asyncio.to_thread(RamStore.open, shared_memory / "ram", CAPACITY)
        yield store
        await store.close()


class TestAttachedRamStore(_Ram):
    """Beside the process that made it."""

    @pytest.fixture
    async def store(self, shared_memory: Path) -> AsyncIterator[BlobStore]:
        writer = await asyncio.to_thread(RamStore.open, shared_memory / "ram", CAPACITY)
        store = await asyncio.to_thread(RamStore.attach, shared_memory / "ram")
        yield store
        await store.close()
        await writer.close()


class TestRamStoreOnDisk(_Ram):
    """Where there is no shared memory, a folder of temporary files serves."""

    @pytest.fixture
    async def store(self, tmp_path: Path) -> AsyncIterator[BlobStore]:
        store = await asyncio.to_thread(RamStore.open, tmp_path / "ram", CAPACITY)
        yield store
        await store.close()
