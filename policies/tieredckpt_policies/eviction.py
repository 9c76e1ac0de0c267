"""In which order steps that need not stay leave a tier that runs out of room."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from tieredckpt.policy import Eviction, StepView, StoreView, TierView

__all__ = ["Oldest"]


class Oldest(Eviction):
    """The step that was saved first leaves first."""

    kind: Literal["oldest"] = "oldest"

    def order(self, candidates: Sequence[StepView], tier: TierView, store: StoreView) -> list[int]:
        return sorted(step.serial for step in candidates)
