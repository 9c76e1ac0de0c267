"""Every communicator that can run in one process keeps the contract of `tieredckpt.engine.ranks.communicator`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from reliability.ranks import World

from tieredckpt.blobs.kvstore.store import KvStoreBlobs
from tieredckpt.blobs.posix.store import PosixStore
from tieredckpt.engine.ranks.communicator import Communicator
from tieredckpt.engine.transport.mailbox import Mailbox
from tieredckpt.engine.transport.shared import SharedStore
from tieredckpt.testing.communicators import CommunicatorTests

Processes = Callable[[], list[Communicator]]


pytestmark = pytest.mark.usefixtures("never_blocked_loop")


class TestInProcess(CommunicatorTests):
    @pytest.fixture
    def processes(self) -> Processes:
        world = World(4)
        return lambda: [*world.communicators()]


class TestInProcessWithoutBulk(CommunicatorTests):
    @pytest.fixture
    def processes(self) -> Processes:
        world = World(2, nodes=["a", "a"], bulk=False)
        return lambda: [*world.communicators()]


class TestSharedFolder(CommunicatorTests):
    @pytest.fixture
    def processes(self, tmp_path: Path) -> Processes:
        async def open_store() -> PosixStore:
            return await asyncio.to_thread(PosixStore, tmp_path, fsync=False)

        return lambda: [SharedStore(open_store, rank=rank, size=3) for rank in range(3)]


class TestSharedKvstore(CommunicatorTests):
    @pytest.fixture
    def processes(self, tmp_path: Path) -> Processes:
        async def open_store() -> KvStoreBlobs:
            return await KvStoreBlobs.open({"driver": "file", "path": f"{tmp_path}/"})

        return lambda: [SharedStore(open_store, rank=rank, size=2) for rank in range(2)]


@pytest.fixture(scope="module")
def connections() -> list[Any]:
    """To a store of torch, one for each rank; to make one may take seconds where names are looked up slowly."""
    dist = pytest.importorskip("torch.distributed")
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    return [server, server.clone(), server.clone()]


class TestTorchStore(CommunicatorTests):
    """Messages through the store of a job that goes on while its ranks are started again."""

    @pytest.fixture
    def processes(self, connections: list[Any], request: pytest.FixtureRequest) -> Processes:
        from torch.distributed import PrefixStore

        from tieredckpt.engine.transport.torch import StoreCarrier

        name = request.node.name
        return lambda: [
            Mailbox(StoreCarrier(partial(PrefixStore, name, store)), rank=rank, size=3)
            for rank, store in enumerate(connections)
        ]
