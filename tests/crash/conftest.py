"""Stores beside an agent, for tests of agents."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.agents import settings
from support.scenes import folder

from tieredckpt import StoreConfig


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    return tmp_path / "disk"


@pytest.fixture
def slow(ram_folder: Path, shared_memory: Path, disk: Path) -> StoreConfig:
    """A store whose promotions take a moment."""
    return settings(shared_memory, folder(disk, rate_limit="500 KB/s"))
