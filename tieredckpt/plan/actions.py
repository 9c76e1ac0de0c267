"""Actions on steps in a simulation, for reports."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["Action", "What"]

What = Literal["saved", "skipped", "promoted", "evicted", "restored"]


@dataclass(frozen=True, slots=True)
class Action:
    """One action on a step, and its tier."""

    at: float
    what: What
    step: int
    tier: str
