"""A blob store over S3 keeps the contract of `tieredckpt.blobs.base`."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from support.object_stores import Bucket, Place

from tieredckpt.blobs.base import BlobStore
from tieredckpt.blobs.object.kind import S3
from tieredckpt.config.object_tiers import S3Tier
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
