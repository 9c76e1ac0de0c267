"""Stores with exports."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.exports import Open, Paused

from tieredckpt import CheckpointStore, SyncStore


@pytest.fixture
def open_store(tmp_path: Path, shared_memory: Path) -> Iterator[Open]:
    """Opens the store of the test with exports; closed at the end of the test."""
    opened: list[SyncStore] = []

    def open_with(ram: dict[str, Any] | None = None, disk: dict[str, Any] | None = None, **exports: Any) -> SyncStore:
        tiers = {
            "ram": {"kind": "ram", "path": str(shared_memory / "ram"), "capacity": "16 MiB", **(ram or {})},
            "disk": {"kind": "posix", "path": str(tmp_path / "disk"), "fsync": False, **(disk or {})},
        }
        for table in exports.values():
            table.setdefault("to", str(tmp_path / "out"))
        source = {"store": {"chunk_size": "8 KiB"}, "tiers": tiers, "exports": exports}
        opened.append(CheckpointStore.open_sync(source))
        return opened[-1]

    yield open_with
    for store in opened:
        store.close()


@pytest.fixture
def paused(monkeypatch: pytest.MonkeyPatch) -> Iterator[Paused]:
    """Exports of safetensors wait after their first part, until the test lets them go on."""
    found = Paused(monkeypatch)
    yield found
    found.go_on.set()
