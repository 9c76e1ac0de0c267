"""Blob stores over S3, Google Cloud Storage and Azure keep the contract of `tieredckpt.blobs.base`.

moto stands for the first two, Azurite for the third.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest
from support.gcs import gcs, key_without_signature
from support.object_stores import AZURITE, BUCKET, Bucket, Container, Place, azurite_server

from tieredckpt.blobs.base import BlobStore
from tieredckpt.config.kinds import kind_of
from tieredckpt.config.object_tiers import AzureTier, GcsTier, ObjectTier, S3Tier
from tieredckpt.testing.blobs import BlobStoreTests


class _ObjectStoreTests(BlobStoreTests):
    @pytest.fixture
    async def store(self, tier: ObjectTier, back_door: Bucket | Container) -> AsyncIterator[BlobStore]:
        store = await kind_of(tier).open(tier)
        await back_door.delete("tieredckpt-endpoint.json")
        yield store
        await store.close()

    @pytest.fixture
    def back_door(self, s3_place: Place) -> Bucket | Container:
        return s3_place.bucket


class TestS3Blobs(_ObjectStoreTests):
    @pytest.fixture
    def tier(self, s3_place: Place) -> ObjectTier:
        return S3Tier(name="s3", **s3_place.tier())


@pytest.mark.usefixtures("no_signature")
class TestGcsBlobs(_ObjectStoreTests):
    @pytest.fixture
    def tier(self, s3_server: str, s3_place: Place) -> Iterator[ObjectTier]:
        with gcs(s3_server) as between:
            key, url = key_without_signature(between.url), f"gs://{BUCKET}/{s3_place.prefix}"
            yield GcsTier(name="gcs", url=url, service_account_key=key, endpoint=between.url, retries=0)


@pytest.fixture(scope="module")
def azurite(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with azurite_server(tmp_path_factory.mktemp("azurite")) as url:
        yield url


class TestAzureBlobs(_ObjectStoreTests):
    @pytest.fixture
    def back_door(self, azurite: str) -> Bucket | Container:
        return Container(azurite)

    @pytest.fixture
    def tier(self, azurite: str, back_door: Container) -> ObjectTier:
        return AzureTier(name="azure", url=f"az://{back_door.name}", endpoint=azurite, **AZURITE)
