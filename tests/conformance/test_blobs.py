"""Every blob store of this library, and every wrapper, keeps the contract of `tieredckpt.blobs.base`."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import tensorstore as ts
from support.file_systems import FILE_SYSTEMS, kind_on, system_of
from support.scenes import new_shared_folder

from tieredckpt.blobs.base import BlobStore
from tieredckpt.blobs.kvstore.store import KvStoreBlobs
from tieredckpt.blobs.posix.store import PosixStore
from tieredckpt.blobs.wrap import Below, Deadline, Limited, Metered, Retrying
from tieredckpt.errors import TierUnavailable
from tieredckpt.testing.backdoor import BackDoor, FolderBackDoor
from tieredckpt.testing.blobs import BlobStoreTests
from tieredckpt.testing.faulty import Faulty

SHARED_MEMORY = Path("/dev/shm")


pytestmark = pytest.mark.usefixtures("never_blocked_loop")


class _Folder(BlobStoreTests):
    """Stores over a folder of the disk, left as nothing but what was put there."""

    direct: bool | None = None

    @pytest.fixture
    def root(self, tmp_path: Path) -> Path:
        return tmp_path / "root"

    def wrapped(self, store: PosixStore) -> BlobStore:
        return store

    @pytest.fixture
    async def store(self, root: Path) -> AsyncIterator[BlobStore]:
        store = self.wrapped(await asyncio.to_thread(PosixStore, root, direct=self.direct))
        yield store
        await store.close()

    @pytest.fixture
    def back_door(self, root: Path, store: BlobStore) -> BackDoor:
        return FolderBackDoor(root)


class TestPosixStore(_Folder):
    pass


class TestPosixStoreBuffered(_Folder):
    direct = False


@pytest.mark.skipif(not SHARED_MEMORY.is_dir(), reason="needs /dev/shm")
class TestPosixStoreInSharedMemory(_Folder):
    @pytest.fixture
    def root(self) -> Iterator[Path]:
        root = new_shared_folder()
        yield root
        shutil.rmtree(root)


class TestAllWrappers(TestPosixStoreInSharedMemory):
    """In the order in which a tier has them; each passes every call on, so that one that breaks the contract shows."""

    direct = False
    closed = TierUnavailable

    def wrapped(self, store: PosixStore) -> BlobStore:
        return Metered(Limited(Retrying(Deadline(Faulty(store), "disk")), operations=2, nbytes=1 << 20))


class TestBelow(_Folder):
    """A store with its objects below a folder of another."""

    def wrapped(self, store: PosixStore) -> BlobStore:
        return Below(store, "derived/")

    @pytest.fixture
    def back_door(self, root: Path, store: BlobStore) -> BackDoor:
        return FolderBackDoor(root / "derived")


class TestNfs(_Folder):
    kind = "nfs"

    @pytest.fixture
    async def store(self, root: Path) -> AsyncIterator[BlobStore]:
        kind = kind_on(self.kind, system_of(FILE_SYSTEMS[self.kind]))
        store = await kind.open(kind.config(name="shared", path=root))
        yield store
        await store.close()


class TestLustre(TestNfs):
    kind = "lustre"


class KvBackDoor:
    """The back door of a TensorStore kvstore that lives in a context."""

    def __init__(self, store: ts.KvStore) -> None:
        self._store = store

    async def put(self, key: str, data: bytes) -> None:
        await self._store.write(key, data)

    async def get(self, key: str) -> bytes | None:
        found = await self._store.read(key)
        return bytes(found.value) if found.state == "value" else None

    async def delete(self, key: str) -> None:
        await self._store.write(key, None)

    async def list(self) -> set[str]:
        return {key.decode() for key in await self._store.list()}


class TestKvStoreMemory(BlobStoreTests):
    @pytest.fixture
    def context(self) -> ts.Context:
        return ts.Context()

    @pytest.fixture
    async def store(self, context: ts.Context) -> AsyncIterator[BlobStore]:
        # Without the final "/": a path is a folder either way.
        store = await KvStoreBlobs.open("memory://some/folder", context=context)
        yield store
        await store.close()

    @pytest.fixture
    async def back_door(self, context: ts.Context) -> BackDoor:
        return KvBackDoor(await ts.KvStore.open("memory://some/folder/", context=context))


class TestKvStoreFile(BlobStoreTests):
    @pytest.fixture
    async def store(self, tmp_path: Path) -> AsyncIterator[BlobStore]:
        store = await KvStoreBlobs.open({"driver": "file", "path": str(tmp_path)})
        yield store
        await store.close()

    @pytest.fixture
    def back_door(self, tmp_path: Path, store: BlobStore) -> BackDoor:
        return FolderBackDoor(tmp_path)
