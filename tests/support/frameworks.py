"""Frameworks that a test module needs: skipped where they are missing, failed where everything must be tested.

Every process of a run collects every test; what one module alone needs, and takes seconds, is imported by `lazily`.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Sequence
from typing import Any

import pytest

__all__ = ["lazily", "need", "need_modules", "require"]


def require(name: str) -> Any:
    """The module ``name``; skip without it, or fail where ``TIEREDCKPT_REQUIRE_ENGINES`` is set."""
    if os.environ.get("TIEREDCKPT_REQUIRE_ENGINES"):
        return importlib.import_module(name)
    return pytest.importorskip(name, exc_type=ImportError)


class _Later:
    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        return getattr(importlib.import_module(self._name), attribute)


def lazily(name: str) -> Any:
    """What stands for the module ``name``, and imports it when something of it is used."""
    return _Later(name)


def need_modules(*names: str) -> None:
    """Skip the test, or module, where one is not installed; fail it where ``TIEREDCKPT_REQUIRE_ENGINES`` is set."""
    need([name for name in names if importlib.util.find_spec(name) is None])


def need(missing: Sequence[str]) -> None:
    """Skip the test, or module, where anything is missing; fail it where ``TIEREDCKPT_REQUIRE_ENGINES`` is set."""
    if not missing:
        return
    reason = f"needs {' and '.join(missing)}"
    if os.environ.get("TIEREDCKPT_REQUIRE_ENGINES"):
        pytest.fail(reason)
    pytest.skip(reason, allow_module_level=True)
