"""Frameworks that a test module needs: skipped where they are missing, failed where everything must be tested."""

from __future__ import annotations

import importlib
import os
from typing import Any

import pytest

__all__ = ["require"]


def require(name: str) -> Any:
    """The module ``name``; skip without it, or fail where ``TIEREDCKPT_REQUIRE_ENGINES`` is set."""
    if os.environ.get("TIEREDCKPT_REQUIRE_ENGINES"):
        return importlib.import_module(name)
    return pytest.importorskip(name, exc_type=ImportError)
