"""Blob stores over object stores keep the contract of `tieredckpt.blobs.base`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest
from support.object_stores import AZURITE, Bucket, Container, Place, azurite_server

from tieredckpt.blobs.base import BlobStore
from tieredckpt.blobs.object.kind import AZURE, S3
from tieredckpt.config.object_tiers import AzureTier, S3Tier
from tieredckpt.testing.blobs import BlobStoreTests


class TestS3Blobs(BlobStoreTests):
    @pytest.fixture
    async def store(self, s3_place: Place) -> AsyncIterator[BlobStore]:
        store = await S3.open(S3Tier(name="s3", **s3_place.tier()))
        await s3_place.bucket.delete("tieredckpt-endpoint.json")
        yield store
        await store.close()

    @pytest.fixture
    def back_door(self, s3_place: Place) -> Bucket:
        return s3_place.bucket


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
