"""The store in memory keeps the contract of a blob store, whole objects or pieces."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from reliability.memory import MemoryBlobs, Objects

from tieredckpt.blobs.base import BlobStore
from tieredckpt.testing.backdoor import BackDoor
from tieredckpt.testing.blobs import BlobStoreTests


class ObjectsBackDoor:
    def __init__(self, objects: Objects) -> None:
        self._objects = objects

    async def put(self, key: str, data: bytes) -> None:
        self._objects.data[key] = bytearray(data)
        self._objects.modified[key] = 0.0

    async def get(self, key: str) -> bytes | None:
        found = self._objects.data.get(key)
        return None if found is None else bytes(found)

    async def delete(self, key: str) -> None:
        del self._objects.data[key]

    async def list(self) -> set[str]:
        return set(self._objects.data)


class TestMemoryBlobs(BlobStoreTests):
    pieces: int | None = None

    @pytest.fixture
    def objects(self) -> Objects:
        return Objects()

    @pytest.fixture
    async def store(self, objects: Objects) -> AsyncIterator[BlobStore]:
        store = MemoryBlobs(objects, pieces=self.pieces)
        yield store
        await store.close()

    @pytest.fixture
    def back_door(self, objects: Objects) -> BackDoor:
        return ObjectsBackDoor(objects)


class TestMemoryBlobsInPieces(TestMemoryBlobs):
    pieces = 64 << 10
