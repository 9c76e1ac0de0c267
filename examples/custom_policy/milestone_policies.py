"""Policies of one's own: chosen steps go to a tier, and stay there beside the newest."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from tieredckpt.policy import Promotion, Retention, StepView, StoreView, TierView

__all__ = ["PromoteMilestones", "RetainMilestones"]

Steps = Annotated[tuple[int, ...], Field(min_length=1)]


class PromoteMilestones(Promotion):
    """The steps of these numbers go to the tier."""

    kind: Literal["milestones"] = "milestones"
    steps: Steps

    def promotes(self, step: StepView, tier: TierView, store: StoreView) -> bool:
        return step.step in self.steps


class RetainMilestones(Retention):
    """The steps of these numbers stay, and the newest ``newest`` ones."""

    kind: Literal["milestones"] = "milestones"
    steps: Steps
    newest: Annotated[int, Field(strict=True, ge=1)] = 1

    def retains(self, tier: TierView, store: StoreView) -> frozenset[int]:
        line = store.line_on(tier.name)
        chosen = {step.serial for step in line if step.step in self.steps}
        return frozenset(chosen | {step.serial for step in line[-self.newest :]})
