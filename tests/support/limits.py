"""Other limits than those that are in force, as long as a test runs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tieredckpt.engine import limits

__all__ = ["limit"]


def limit(patch: pytest.MonkeyPatch, **changes: Any) -> None:
    """Put other values in the place of some; see `tieredckpt.engine.limits.Limits`."""
    patch.setattr(limits, "in_force", replace(limits.in_force, **changes))
