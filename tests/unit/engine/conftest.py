"""The tiers that tests of several folders use: RAM, and a folder that retains everything."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.scenes import config, folder, ram

from tieredckpt.config import StoreConfig


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    """The folder of the slower tier."""
    return tmp_path / "disk"


@pytest.fixture
def two_tiers(shared_memory: Path, disk: Path) -> StoreConfig:
    return config({"ram": ram(shared_memory), "disk": folder(disk, retain="all")})
