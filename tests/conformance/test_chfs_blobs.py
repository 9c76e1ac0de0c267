"""The CHFS store keeps the contract of `tieredckpt.blobs.base`, over the look-alike and over a running CHFS."""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from support.bare_chfs import BareChfs
from support.lookalike import LookalikeBackDoor, library, missing

from tieredckpt.blobs.base import BlobStore
from tieredckpt.blobs.chfs.store import ChfsStore
from tieredckpt.testing.backdoor import BackDoor
from tieredckpt.testing.blobs import BlobStoreTests

MIB = 1 << 20


@pytest.fixture(autouse=True)
def _built() -> None:
    if why := missing():
        pytest.skip(why)


pytestmark = pytest.mark.usefixtures("never_blocked_loop")


class TestChfsStore(BlobStoreTests):
    servers = 3

    @pytest.fixture
    def directory(self, tmp_path: Path) -> Path:
        directory = tmp_path / "chfs"
        directory.mkdir()
        (directory / "switches").write_text(f"servers = {self.servers}\n")
        return directory

    @pytest.fixture
    async def store(self, directory: Path) -> AsyncIterator[BlobStore]:
        store = ChfsStore(
            "/some/root", server=f"directory:{directory}", library=str(library()), chunk_size=MIB, arena=8 * MIB
        )
        await store.connect()
        yield store
        await store.close()

    @pytest.fixture
    def back_door(self, directory: Path, store: BlobStore) -> BackDoor:
        return LookalikeBackDoor(directory, "/some/root", self.servers)


LIBCHFS = os.environ.get("TIEREDCKPT_LIBCHFS", "libchfs.so")


@pytest.fixture(scope="module")
def bare() -> Iterator[BareChfs]:
    bare = BareChfs(LIBCHFS, f"/tieredckpt-test-{secrets.token_hex(8)}")
    yield bare
    bare.clear()
    bare.close()


@pytest.mark.chfs_real
@pytest.mark.skipif("CHFS_SERVER" not in os.environ, reason="CHFS_SERVER names no running CHFS")
class TestChfsStoreOverChfs(BlobStoreTests):
    @pytest.fixture
    async def store(self, bare: BareChfs) -> AsyncIterator[BlobStore]:
        store = ChfsStore(bare.root, library=LIBCHFS, chunk_size=MIB)
        await store.connect()
        yield store
        await store.close()
        await asyncio.to_thread(bare.clear)

    @pytest.fixture
    def back_door(self, bare: BareChfs) -> BackDoor:
        return bare
