"""Frameworks that a test module needs: skipped where they are missing, failed where everything must be tested."""

from __future__ import annotations

import importlib
import os
from collections.abc import Sequence
from typing import Any

import pytest

__all__ = ["need", "require"]


def require(name: str) -> Any:
    """The module ``name``; skip without it, or fail where ``TIEREDCKPT_REQUIRE_ENGINES`` is set."""
    if os.environ.get("TIEREDCKPT_REQUIRE_ENGINES"):
        return importlib.import_module(name)
    return pytest.importorskip(name, exc_type=ImportError)


def need(missing: Sequence[str]) -> None:
    """Skip the test where anything is missing; fail it where ``TIEREDCKPT_REQUIRE_ENGINES`` is set."""
    if not missing:
        return
    reason = f"needs {' and '.join(missing)}"
    if os.environ.get("TIEREDCKPT_REQUIRE_ENGINES"):
        pytest.fail(reason)
    pytest.skip(reason)
