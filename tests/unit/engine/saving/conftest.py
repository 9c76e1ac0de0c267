"""Saves that read nothing before they may."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from support.scenes import SOON

from tieredckpt.engine.saving import save


@pytest.fixture
def held_back(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """What a save reads, it reads when this is set."""
    may_begin = threading.Event()
    snapshot = save.Writer._snapshot

    async def late(*arguments: Any) -> Any:
        assert await asyncio.to_thread(may_begin.wait, SOON)
        return await snapshot(*arguments)

    monkeypatch.setattr(save.Writer, "_snapshot", late)
    yield may_begin
    may_begin.set()
