"""The folder of a RAM tier."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def folder(shared_memory: Path) -> Path:
    return shared_memory / "ram"
