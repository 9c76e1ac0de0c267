"""The steps that tests of commits and of indexes share."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from reliability.tiers import FaultyTiers
from support.commit_scene import Scene, opened_scene


@pytest.fixture
async def scene(shared_memory: Path, tmp_path: Path, faults: FaultyTiers) -> AsyncIterator[Scene]:
    async with opened_scene(shared_memory, tmp_path, grace=0.2, lease_ttl=0.1) as scene:
        yield scene


@pytest.fixture
async def quiet(shared_memory: Path, tmp_path: Path, faults: FaultyTiers) -> AsyncIterator[Scene]:
    """A scene without collections and renewals in the background."""
    async with opened_scene(shared_memory, tmp_path) as scene:
        yield scene
