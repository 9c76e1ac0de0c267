"""A place whose slower tier is collected."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.collecting import Place
from support.scenes import folder


@pytest.fixture
def place(shared_memory: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    return Place(shared_memory, monkeypatch)


@pytest.fixture(params=["posix", "kvstore"])
def disk(request: pytest.FixtureRequest, place: Place) -> dict[str, Any]:
    """The slower tier, retaining everything, on one of two kinds of store."""
    if request.param == "posix":
        return folder(place.disk, retain="all")
    spec = {"driver": "file", "path": f"{place.disk}/"}
    return {"kind": "kvstore", "spec": spec, "retries": 0, "retain": "all"}
