"""What happens to steps in a simulation, as it is reported."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["Action", "What"]

What = Literal["saved", "skipped", "promoted", "evicted", "restored"]


@dataclass(frozen=True, slots=True)
class Action:
    """One thing that happened to a step, and on which tier."""

    at: float
    what: What
    step: int
    tier: str
