"""A posix store on a folder of the test."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tieredckpt.blobs.posix.store import PosixStore


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "root"


@pytest.fixture
async def store(root: Path) -> AsyncIterator[PosixStore]:
    store = await asyncio.to_thread(PosixStore, root)
    yield store
    await store.close()
