"""Eviction policies: the order in which steps that need not stay leave a tier that runs out of room."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

from tieredckpt.policy import Eviction, StepView, StoreView, TierView

__all__ = ["CheapestToGetBack", "Largest", "Oldest"]


class Oldest(Eviction):
    """The step that was saved first leaves first."""

    kind: Literal["oldest"] = "oldest"

    def order(self, candidates: Sequence[StepView], tier: TierView, store: StoreView) -> list[int]:
        return sorted(step.serial for step in candidates)


class Largest(Eviction):
    """The largest step leaves first, and of equal ones the oldest: the fewest steps leave for the room needed."""

    kind: Literal["largest"] = "largest"

    def order(self, candidates: Sequence[StepView], tier: TierView, store: StoreView) -> list[int]:
        return [step.serial for step in sorted(candidates, key=lambda step: (-step.nbytes, step.serial))]


class CheapestToGetBack(Eviction):
    """First leaves the step that another tier restores fastest; last a step that no other tier has.

    The time is the step's size over the bandwidth seen when that tier was written to. A nearer tier without a known
    bandwidth, such as RAM, counts as taking no time; a slower one counts as slower than all known ones. Tiers that fail
    count as holding nothing. For equal times the oldest step leaves first.
    """

    kind: Literal["cheapest_to_get_back"] = "cheapest_to_get_back"

    def order(self, candidates: Sequence[StepView], tier: TierView, store: StoreView) -> list[int]:
        others = {other.name: other for other in store.tiers if other.name != tier.name and other.healthy}

        def cost(step: StepView) -> tuple[bool, float, int]:
            times = [_seconds(step, others[name], tier) for name in step.tiers if name in others]
            return not times, min(times, default=math.inf), step.serial

        return [step.serial for step in sorted(candidates, key=cost)]


def _seconds(step: StepView, source: TierView, tier: TierView) -> float:
    if source.write_bandwidth:
        return step.nbytes / source.write_bandwidth
    return 0.0 if source.index < tier.index else math.inf
