"""What tests of object stores share: a proxy before the server, and a store on RAM and a tier behind it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.object_stores import Place
from support.proxy import Proxy, proxy
from support.scenes import config, ram

from tieredckpt.config import StoreConfig


@pytest.fixture
def between(s3_server: str) -> Iterator[Proxy]:
    with proxy(s3_server) as between:
        yield between


@pytest.fixture
def settings(shared_memory: Path, s3_place: Place, between: Proxy) -> StoreConfig:
    far = s3_place.tier(between.url, promote="never", retain="all", deadline=2)
    return config({"ram": ram(shared_memory), "s3": far})
