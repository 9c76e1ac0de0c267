"""What tests of object stores share: a proxy before the server, and a store on RAM and a tier behind it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from support.object_stores import Place
from support.proxy import Proxy, proxy
from support.scenes import config, ram

from tieredckpt.blobs.base import BlobStore
from tieredckpt.blobs.object.kind import S3
from tieredckpt.config import StoreConfig
from tieredckpt.config.object_tiers import S3Tier


@pytest.fixture
def between(s3_server: str) -> Iterator[Proxy]:
    with proxy(s3_server) as between:
        yield between


@pytest.fixture
async def store(s3_place: Place, between: Proxy) -> AsyncIterator[BlobStore]:
    """A tier alone, behind the proxy."""
    store = await S3.open(S3Tier(name="s3", **s3_place.tier(between.url)))
    between.restart_count()
    yield store
    await store.close()


@pytest.fixture
def settings(shared_memory: Path, s3_place: Place, between: Proxy) -> StoreConfig:
    far = s3_place.tier(between.url, promote="never", retain="all", deadline=2)
    return config({"ram": ram(shared_memory), "s3": far})
