"""Stores, for tests of integrations, and of `import` and `export`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.scenes import config, folder, ram

from tieredckpt import CheckpointStore, SyncStore


@pytest.fixture
def store(tmp_path: Path, shared_memory: Path) -> Path:
    """The configuration of a store that nobody opened yet."""
    path = tmp_path / "ckpt.toml"
    path.write_text(
        f"""
        [store]
        chunk_size = "8 KiB"
        [tiers.ram]
        kind = "ram"
        path = "{shared_memory / "ram"}"
        capacity = "8 MiB"
        [tiers.disk]
        kind = "posix"
        path = "{tmp_path / "disk"}"
        retain = "all"
        fsync = false
        """
    )
    return path


@pytest.fixture
def opened(tmp_path: Path, shared_memory: Path) -> Iterator[SyncStore]:
    """An open store of RAM and a folder."""
    tiers = {"ram": ram(shared_memory), "disk": folder(tmp_path / "disk")}
    with CheckpointStore.open(config(tiers)).sync() as store:
        yield store
