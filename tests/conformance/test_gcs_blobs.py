"""A blob store over Google Cloud Storage keeps the contract of `tieredckpt.blobs.base`; moto stands for it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest
from support.gcs import gcs, key_without_signature
from support.object_stores import BUCKET, Bucket, Place

from tieredckpt.blobs.base import BlobStore
from tieredckpt.blobs.object.kind import GCS
from tieredckpt.config.object_tiers import GcsTier
from tieredckpt.testing.blobs import BlobStoreTests


@pytest.mark.usefixtures("no_signature")
class TestGcsBlobs(BlobStoreTests):
    @pytest.fixture
    def server(self, s3_server: str) -> Iterator[str]:
        with gcs(s3_server) as between:
            yield between.url

    @pytest.fixture
    async def store(self, server: str, s3_place: Place) -> AsyncIterator[BlobStore]:
        tier = GcsTier(
            name="gcs",
            url=f"gs://{BUCKET}/{s3_place.prefix}",
            service_account_key=key_without_signature(server),
            endpoint=server,
            retries=0,
        )
        store = await GCS.open(tier)
        await s3_place.bucket.delete("tieredckpt-endpoint.json")
        yield store
        await store.close()

    @pytest.fixture
    def back_door(self, s3_place: Place) -> Bucket:
        return s3_place.bucket
