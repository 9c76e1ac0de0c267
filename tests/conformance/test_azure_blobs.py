"""A blob store over Azure keeps the contract of `tieredckpt.blobs.base`; Azurite stands for it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest
from support.object_stores import AZURITE, Container, azurite_server

from tieredckpt.blobs.base import BlobStore
from tieredckpt.blobs.object.kind import AZURE
from tieredckpt.config.object_tiers import AzureTier
from tieredckpt.testing.blobs import BlobStoreTests


@pytest.fixture(scope="module")
def azurite(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with azurite_server(tmp_path_factory.mktemp("azurite")) as url:
        yield url


class TestAzureBlobs(BlobStoreTests):
    @pytest.fixture
    def back_door(self, azurite: str) -> Container:
        return Container(azurite)

    @pytest.fixture
    async def store(self, azurite: str, back_door: Container) -> AsyncIterator[BlobStore]:
        tier = AzureTier(name="azure", url=f"az://{back_door.name}", endpoint=azurite, **AZURITE)
        store = await AZURE.open(tier)
        await back_door.delete("tieredckpt-endpoint.json")
        yield store
        await store.close()
