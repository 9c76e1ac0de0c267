"""Retention policies: keep the newest steps, every k-th, the best, those of some age, fewer with age, all, or a union.

Only `All` keeps off-branch steps: the other policies would count them in place of steps that a restore can use.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from tieredckpt.policy import AnyRetention, Retention, StepView, StoreView, TierView
from tieredckpt.settings import Settings
from tieredckpt.units import Duration

__all__ = ["All", "Band", "Best", "DenseThenSparse", "EveryK", "LastN", "Union", "WithinAge"]


class All(Retention):
    """Every step stays, off-branch ones included."""

    kind: Literal["all"] = "all"
    retains_all = True

    def retains(self, tier: TierView, store: StoreView) -> frozenset[int]:
        return store.serials_on(tier.name)


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


class Band(Settings):
    """Of steps up to the age ``until`` (None: any age), the first in each span of ``every`` stays; 0 for each step."""

    every: Annotated[Duration, Field(ge=0)] = 0.0
    until: Annotated[Duration, Field(gt=0)] | None = None


class DenseThenSparse(Retention):
    """Steps stay the more sparsely the older they are: by default all of an hour, then hourly for a day, then daily.

    The first of ``bands`` that reaches as far as a step's age decides about it. Spans of ``every`` begin at whole
    multiples of it since the epoch, and the first step of each span stays. If each band's ``every`` is a multiple of
    the one before, a denser band keeps every step that a sparser band needs later. The newest step stays in any case.
    """

    kind: Literal["dense_then_sparse"] = "dense_then_sparse"
    bands: Annotated[tuple[Band, ...], Field(min_length=1)] = (
        Band(every=0.0, until=3600.0),
        Band(every=3600.0, until=86400.0),
        Band(every=86400.0),
    )

    @model_validator(mode="after")
    def _reaches_ever_further(self) -> Self:
        for nearer, farther in pairwise(self.bands):
            if nearer.until is None:
                raise ValueError("only the last band may go on for ever: give the others an `until`")
            if farther.until is not None and farther.until <= nearer.until:
                raise ValueError("each band must reach further than the one before: raise its `until`")
        return self

    def retains(self, tier: TierView, store: StoreView) -> frozenset[int]:
        line = tuple(store.line_on(tier.name))  # each view is made once, and looked at several times
        firsts = {band.every: _firsts(line, band.every) for band in self.bands}
        kept = {line[-1].serial} if line else set[int]()
        for step in line:
            band = next((band for band in self.bands if band.until is None or step.age <= band.until), None)
            if band is not None and step.serial in firsts[band.every]:
                kept.add(step.serial)
        return frozenset(kept)


def _firsts(steps: tuple[StepView, ...], every: float) -> set[int]:
    """Serials of the first step in each span; of all steps where spans have no length."""
    if not every:
        return {step.serial for step in steps}
    first: dict[float, int] = {}
    for step in steps:
        first.setdefault(step.saved_at // every, step.serial)
    return set(first.values())


class Union(Retention):
    """Steps that one of ``policies`` retains stay."""

    kind: Literal["union"] = "union"
    policies: Annotated[tuple[AnyRetention, ...], Field(min_length=1)]

    def retains(self, tier: TierView, store: StoreView) -> frozenset[int]:
        return frozenset[int]().union(*(policy.retains(tier, store) for policy in self.policies))
