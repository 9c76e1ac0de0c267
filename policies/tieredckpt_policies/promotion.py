"""Promotion policies: by step number, time, metric or signal, for a free tier, and combinations of these."""

from __future__ import annotations

import math
from typing import Annotated, Literal

from pydantic import Field

from tieredckpt.policy import AnyPromotion, Promotion, StepView, StoreView, TierView, answers_for_good, decided
from tieredckpt.units import Duration

__all__ = [
    "AllOf",
    "Always",
    "AnyOf",
    "Best",
    "Every",
    "EveryNSteps",
    "FirstAndLast",
    "Never",
    "OnSignal",
    "WhenIdle",
]

Signal = Annotated[str, Field(min_length=1)]


class Always(Promotion):
    """Every step goes to the tier."""

    kind: Literal["always"] = "always"

    def promotes(self, step: StepView, tier: TierView, store: StoreView) -> bool:
        return True

    def by_step_alone(self) -> bool:
        return True


class Never(Promotion):
    """No step goes to the tier by itself; ``store.promote`` still takes one there."""

    kind: Literal["never"] = "never"

    def promotes(self, step: StepView, tier: TierView, store: StoreView) -> bool:
        return False

    def by_step_alone(self) -> bool:
        return True


class EveryNSteps(Promotion):
    """Steps whose number is a multiple of ``n`` go to the tier; with ``first`` also the first it gets."""

    kind: Literal["every_n_steps"] = "every_n_steps"
    n: Annotated[int, Field(strict=True, ge=1)]
    first: Annotated[bool, Field(strict=True)] = False

    def promotes(self, step: StepView, tier: TierView, store: StoreView) -> bool:
        return step.step % self.n == 0 or (self.first and not store.line_on(tier.name))

    def by_step_alone(self) -> bool:
        return not self.first


class Every(Promotion):
    """A step goes to the tier when ``interval`` (seconds) lies between its save and that of the newest there.

    Off-branch steps do not count as being there. The first step goes at once, and a step older than the newest there
    does not go. A step saved after the clock was set back goes as well; else the tier would get none until the clock
    has caught up.
    """

    kind: Literal["every"] = "every"
    interval: Annotated[Duration, Field(gt=0)]

    def promotes(self, step: StepView, tier: TierView, store: StoreView) -> bool:
        there = reversed(store.line_on(tier.name))
        newest = next((held for held in there if held.serial != step.serial), None)
        if newest is None:
            return True
        passed = step.saved_at - newest.saved_at
        return step.serial > newest.serial and (passed >= self.interval or passed < 0)


class Best(Promotion):
    """A step goes to the tier when fewer than ``n`` steps there are better by ``metric``.

    The smallest value is the best, or with ``mode = "max"`` the largest; of equal values the newer is the
    better. A step without the metric, or with one that is not a finite number, does not go.
    """

    kind: Literal["best"] = "best"
    metric: Annotated[str, Field(min_length=1)]
    n: Annotated[int, Field(strict=True, ge=1)] = 1
    mode: Literal["min", "max"] = "min"

    def promotes(self, step: StepView, tier: TierView, store: StoreView) -> bool:
        sign = 1 if self.mode == "min" else -1
        value = sign * step.metrics.get(self.metric, math.nan)
        if not math.isfinite(value):
            return False
        there = [
            (sign * held.metrics.get(self.metric, math.nan), -held.serial)
            for held in store.line_on(tier.name)
            if held.serial != step.serial
        ]
        return sum(math.isfinite(rank[0]) and rank < (value, -step.serial) for rank in there) < self.n


class OnSignal(Promotion):
    """The newest step goes to the tier while ``signal`` is raised (``store.signal``)."""

    kind: Literal["on_signal"] = "on_signal"
    signal: Signal = "preempt"

    def promotes(self, step: StepView, tier: TierView, store: StoreView) -> bool:
        return self.signal in store.signals and _is_newest(step, store)


class WhenIdle(Promotion):
    """The newest step goes to the tier while no step is being promoted to this tier or a nearer one.

    So a slow tier takes the newest step as soon as it has finished one, skips the steps saved in between, and does not
    compete with nearer tiers for memory and links.
    """

    kind: Literal["when_idle"] = "when_idle"

    def promotes(self, step: StepView, tier: TierView, store: StoreView) -> bool:
        busy = any(other.promoting for other in store.tiers if other.index <= tier.index)
        return not busy and _is_newest(step, store)


class FirstAndLast(Promotion):
    """The first step that the tier gets goes to it, and the newest one while the trainer raises ``signal``.

    Only the trainer knows which save is the last: it calls ``store.signal("last")``.
    """

    kind: Literal["first_and_last"] = "first_and_last"
    signal: Signal = "last"

    def promotes(self, step: StepView, tier: TierView, store: StoreView) -> bool:
        if self.signal in store.signals and _is_newest(step, store):
            return True
        return all(held.serial == step.serial for held in store.line_on(tier.name))


class AnyOf(Promotion):
    """A step goes to the tier when one of ``policies`` says so."""

    kind: Literal["any_of"] = "any_of"
    policies: Annotated[tuple[AnyPromotion, ...], Field(min_length=1)]

    def promotes(self, step: StepView, tier: TierView, store: StoreView) -> bool:
        return any(decided(policy, policy.promotes(step, tier, store)) for policy in self.policies)

    def by_step_alone(self) -> bool:
        return all(answers_for_good(policy) for policy in self.policies)


class AllOf(Promotion):
    """A step goes to the tier when each of ``policies`` says so."""

    kind: Literal["all_of"] = "all_of"
    policies: Annotated[tuple[AnyPromotion, ...], Field(min_length=1)]

    def promotes(self, step: StepView, tier: TierView, store: StoreView) -> bool:
        return all(decided(policy, policy.promotes(step, tier, store)) for policy in self.policies)

    def by_step_alone(self) -> bool:
        return all(answers_for_good(policy) for policy in self.policies)


def _is_newest(step: StepView, store: StoreView) -> bool:
    return store.newest is not None and step.serial == store.newest.serial
