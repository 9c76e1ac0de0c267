"""Which steps stay on a tier: the newest, the round, the best, the young, all, and unions of these.

Only `All` keeps steps of abandoned lines: the others would count them in place of steps that a restore
could take.
"""

from __future__ import annotations

import math
from typing import Annotated, Literal

from pydantic import Field

from tieredckpt.policy import AnyRetention, Retention, StoreView, TierView
from tieredckpt.units import Duration

__all__ = ["All", "Best", "EveryK", "LastN", "Union", "WithinAge"]


class All(Retention):
    """Every step stays, those of abandoned lines included."""

    kind: Literal["all"] = "all"

    def retains(self, tier: TierView, store: StoreView) -> frozenset[int]:
        return frozenset(step.serial for step in store.on(tier.name))


class LastN(Retention):
    """The newest ``n`` steps stay."""

    kind: Literal["last_n"] = "last_n"
    n: Annotated[int, Field(strict=True, ge=1)]

    def retains(self, tier: TierView, store: StoreView) -> frozenset[int]:
        return frozenset(step.serial for step in store.line_on(tier.name)[-self.n :])


class EveryK(Retention):
    """Steps whose number is a multiple of ``k`` stay."""

    kind: Literal["every_k"] = "every_k"
    k: Annotated[int, Field(strict=True, ge=1)]

    def retains(self, tier: TierView, store: StoreView) -> frozenset[int]:
        return frozenset(step.serial for step in store.line_on(tier.name) if step.step % self.k == 0)


class Best(Retention):
    """The ``n`` steps with the smallest (``mode = "min"``) or largest value of ``metric`` stay.

    Of equal values the newer is the better. Steps without the metric, or with one that is not a finite
    number, are never among the best.
    """

    kind: Literal["best"] = "best"
    metric: Annotated[str, Field(min_length=1)]
    n: Annotated[int, Field(strict=True, ge=1)] = 1
    mode: Literal["min", "max"] = "min"

    def retains(self, tier: TierView, store: StoreView) -> frozenset[int]:
        sign = 1 if self.mode == "min" else -1
        ranked = sorted(
            (sign * step.metrics[self.metric], -step.serial)
            for step in store.line_on(tier.name)
            if math.isfinite(step.metrics.get(self.metric, math.nan))
        )
        return frozenset(-negated_serial for _, negated_serial in ranked[: self.n])


class WithinAge(Retention):
    """Steps saved at most ``age`` seconds ago stay."""

    kind: Literal["within_age"] = "within_age"
    age: Annotated[Duration, Field(gt=0)]

    def retains(self, tier: TierView, store: StoreView) -> frozenset[int]:
        return frozenset(step.serial for step in store.line_on(tier.name) if step.age <= self.age)


class Union(Retention):
    """Steps that one of ``policies`` retains stay."""

    kind: Literal["union"] = "union"
    policies: Annotated[tuple[AnyRetention, ...], Field(min_length=1)]

    def retains(self, tier: TierView, store: StoreView) -> frozenset[int]:
        return frozenset[int]().union(*(policy.retains(tier, store) for policy in self.policies))
