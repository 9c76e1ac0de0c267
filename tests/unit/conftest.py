"""What many tests of one store share."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.scenes import config, folder, ram

from tieredckpt.config import StoreConfig


@pytest.fixture
def tiers(shared_memory: Path, tmp_path: Path) -> StoreConfig:
    """RAM and a disk."""
    return config({"ram": ram(shared_memory), "disk": folder(tmp_path / "disk")})
