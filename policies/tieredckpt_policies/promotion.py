"""Which steps go to a tier: all or none, by step number, by time, and combinations of these."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from tieredckpt.policy import AnyPromotion, Promotion, StepView, StoreView, TierView
from tieredckpt.units import Duration

__all__ = ["AllOf", "Always", "AnyOf", "Every", "EveryNSteps", "Never"]


class Always(Promotion):
    """Every step goes to the tier."""

    kind: Literal["always"] = "always"

    def promotes(self, step: StepView, tier: TierView, store: StoreView) -> bool:
        return True


class Never(Promotion):
    """No step goes to the tier by itself; ``store.promote`` still takes one there."""

    kind: Literal["never"] = "never"

    def promotes(self, step: StepView, tier: TierView, store: StoreView) -> bool:
        return False


class EveryNSteps(Promotion):
    """Steps whose number is a multiple of ``n`` go to the tier; with ``first`` also the first it gets."""

    kind: Literal["every_n_steps"] = "every_n_steps"
    n: Annotated[int, Field(strict=True, ge=1)]
    first: Annotated[bool, Field(strict=True)] = False

    def promotes(self, step: StepView, tier: TierView, store: StoreView) -> bool:
        return step.step % self.n == 0 or (self.first and not store.line_on(tier.name))


class Every(Promotion):
    """A step goes to the tier when ``interval`` (seconds) lies between its save and that of the newest there.

    Steps of abandoned lines do not count as being there. The first step goes at once, and a step older than
    the newest there does not go.
    """

    kind: Literal["every"] = "every"
    interval: Annotated[Duration, Field(gt=0)]

    def promotes(self, step: StepView, tier: TierView, store: StoreView) -> bool:
        there = [held for held in store.line_on(tier.name) if held.serial != step.serial]
        if not there:
            return True
        newest = there[-1]
        return step.serial > newest.serial and step.saved_at - newest.saved_at >= self.interval


class AnyOf(Promotion):
    """A step goes to the tier when one of ``policies`` says so."""

    kind: Literal["any_of"] = "any_of"
    policies: Annotated[tuple[AnyPromotion, ...], Field(min_length=1)]

    def promotes(self, step: StepView, tier: TierView, store: StoreView) -> bool:
        return any(policy.promotes(step, tier, store) for policy in self.policies)


class AllOf(Promotion):
    """A step goes to the tier when each of ``policies`` says so."""

    kind: Literal["all_of"] = "all_of"
    policies: Annotated[tuple[AnyPromotion, ...], Field(min_length=1)]

    def promotes(self, step: StepView, tier: TierView, store: StoreView) -> bool:
        return all(policy.promotes(step, tier, store) for policy in self.policies)
