"""Two steps on two tiers."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from reliability.tiers import FaultyTiers
from support.commit_scene import Scene, opened_scene


@pytest.fixture
async def scene(shared_memory: Path, tmp_path: Path, faults: FaultyTiers) -> AsyncIterator[Scene]:
    async with opened_scene(shared_memory, tmp_path) as scene:
        yield scene
