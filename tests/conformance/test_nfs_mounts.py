"""Folders on a file system over a network that is mounted twice, as two nodes have it.

``NFS_MOUNTS=/first:/second pytest -m nfs_real tests/conformance/test_nfs_mounts.py``, where both are mounts of one
export that share no cache (NFS: ``nosharecache``). Whoever has a file system of another type sees what holds there.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import shutil
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from reliability.kills import kill_trainers
from support.scenes import assert_same, config, tree

from tieredckpt import CheckpointStore
from tieredckpt.blobs.base import BlobStore
from tieredckpt.blobs.posix.system import NFS, SYSTEM
from tieredckpt.config.kinds import kind_named
from tieredckpt.errors import Conflict, NotFound, TierUnavailable
from tieredckpt.testing.backdoor import BackDoor, FolderBackDoor, listed
from tieredckpt.testing.blobs import BlobStoreTests

MOUNTS = [Path(path) for path in os.environ.get("NFS_MOUNTS", "").split(":") if path]

pytestmark = [
    pytest.mark.nfs_real,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(len(MOUNTS) != 2, reason="NFS_MOUNTS names no two mounts of one file system"),
]


@pytest.fixture
def folders() -> Iterator[tuple[Path, Path]]:
    """One folder, as each mount shows it."""
    name = f"tieredckpt-test-{secrets.token_hex(8)}"
    (MOUNTS[0] / name).mkdir()
    assert name in os.listdir(MOUNTS[1])
    yield MOUNTS[0] / name, MOUNTS[1] / name
    shutil.rmtree(MOUNTS[0] / name)


def kind() -> str:
    return "nfs" if SYSTEM.type_of(MOUNTS[0]) == NFS else "posix"


def tier(path: Path | str, **settings: Any) -> dict[str, Any]:
    return {"kind": kind(), "path": path} | settings


async def opened(path: Path) -> BlobStore:
    found = kind_named(kind())
    return await found.open(found.config(name="shared", path=path))


class TestOverOneMount(BlobStoreTests):
    @pytest.fixture
    async def store(self, folders: tuple[Path, Path]) -> AsyncIterator[BlobStore]:
        store = await opened(folders[0])
        yield store
        await store.close()

    @pytest.fixture
    def back_door(self, folders: tuple[Path, Path], store: BlobStore) -> BackDoor:
        return FolderBackDoor(folders[0])


@pytest.fixture
async def stores(folders: tuple[Path, Path]) -> AsyncIterator[tuple[BlobStore, BlobStore]]:
    """The same store on two nodes."""
    stores = [await opened(folder) for folder in folders]
    yield stores[0], stores[1]
    for store in stores:
        await store.close()


async def test_what_one_node_puts_the_other_sees_though_it_has_looked_before(
    stores: tuple[BlobStore, BlobStore],
) -> None:
    """A store that knows that a name is there and cannot open it yet says so, and never that it is missing."""
    one, other = stores
    for turn in range(5):
        key = f"steps/{turn}/manifest"
        for look in (other.stat(key), other.get(key, limit=10)):
            with pytest.raises(NotFound):
                await look
        await one.put(key, [b"x"])
        async with asyncio.timeout(120):
            while True:
                try:
                    assert await other.get(key, limit=10) == b"x"
                    assert (await other.stat(key)).size == 1
                    break
                except TierUnavailable:
                    await asyncio.sleep(0.1)
        assert key in await listed(other)


async def test_what_one_node_replaces_the_other_reads_with_its_new_size(stores: tuple[BlobStore, BlobStore]) -> None:
    one, other = stores
    for nbytes in range(1, 6):
        await one.put("leases/writer", [bytes(nbytes)])
        assert (await other.stat("leases/writer")).size == nbytes
        assert len(await other.get("leases/writer", limit=10)) == nbytes
        assert await listed(other, "leases/") == {"leases/writer": nbytes}


async def test_what_one_node_puts_the_other_deletes(stores: tuple[BlobStore, BlobStore]) -> None:
    one, other = stores
    for turn in range(3):
        key = f"packs/{turn}"
        await other.delete(key)
        await one.put(key, [b"x"])
        await other.delete(key)
        with pytest.raises(NotFound):
            await one.get(key, limit=10)
        assert await listed(one) == {}


async def test_a_reader_on_another_node_finds_each_step(folders: tuple[Path, Path]) -> None:
    async with CheckpointStore.open(config({"shared": tier(folders[0])})) as store:
        for step in (1, 2, 3):
            await store.save(step, tree(step))
            async with CheckpointStore.open(config({"shared": tier(folders[1])}), read_only=True) as reader:
                restored = await reader.restore()
            assert restored is not None
            assert restored.step == step
            assert_same(restored.tree, tree(step))
        with pytest.raises(Conflict):
            async with CheckpointStore.open(config({"shared": tier(folders[1])})):
                pass


def test_trainers_that_are_killed_lose_nothing_that_they_were_told_is_saved(
    folders: tuple[Path, Path], shared_memory: Path
) -> None:
    found = kill_trainers(12, shared_memory, tier(str(folders[0] / "disk")), seed=3)
    assert found.lost == []
    assert sum(found.kills.values()) == 12
    assert found.promoted
