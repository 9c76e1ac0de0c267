"""What tests of cancelled calls share."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.scenes import config, folder, ram
from support.stopping import Touched

from tieredckpt.config import StoreConfig


@pytest.fixture
def touched(monkeypatch: pytest.MonkeyPatch) -> Touched:
    return Touched(monkeypatch)


@pytest.fixture
def settings(shared_memory: Path, tmp_path: Path) -> StoreConfig:
    few = {"kind": "last_n", "n": 2}
    tiers = {
        "ram": ram(shared_memory),
        "disk": folder(tmp_path / "disk", retain=few),
        "far": folder(tmp_path / "far", retain=few, promote="never"),
    }
    return config(tiers, repack_below=0.9)  # more than any pack is live: each collection rewrites them
