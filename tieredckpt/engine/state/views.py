"""Views for policies: what they see of a store, its tiers and its steps. Functions of their arguments alone."""

from __future__ import annotations

import math
from collections.abc import Mapping

from tieredckpt.blobs.wrap import Metered
from tieredckpt.engine.state.membership import Membership
from tieredckpt.engine.state.observation import Observation
from tieredckpt.engine.tier.tier import Tier
from tieredckpt.format.manifest import StepId, StepRecord
from tieredckpt.policy.steps import Listing, StepView, StepViews
from tieredckpt.policy.views import StoreView, TierView

__all__ = ["numbers", "step_view", "store_view", "tier_view", "write_bandwidth"]


def store_view(
    steps: Listing,
    tiers: tuple[TierView, ...],
    nearest: Tier,
    membership: Membership,
    observation: Observation,
) -> StoreView:
    """The store as policies see it now, from the views of its steps and tiers; ``nearest`` has the replicas."""
    now = observation.now()
    replicas = {
        step.serial: nodes for step, nodes in tuple(membership.replicated.items()) if step in nearest.steps.held
    }
    return StoreView(now, StepViews(steps, now, replicas), tiers, frozenset(observation.signals))


def tier_view(tier: Tier, *, at_rest: bool = False) -> TierView:
    """A tier as policies see it; with ``at_rest``, as if no promotion to it were under way."""
    return TierView(
        name=tier.name,
        index=tier.index,
        survives=tier.survives.shown,
        capacity=tier.capacity,
        used=tier.used,
        write_bandwidth=write_bandwidth(tier),
        healthy=tier.healthy,
        promoting=tier.steps.promotions > 0 and not at_rest,
    )


def write_bandwidth(tier: Tier) -> float | None:
    """Recent bandwidth of writes to a tier in bytes a second; None before the first write, and for RAM.

    The process that writes to the tier measures it.
    """
    if tier.remote.bandwidth:
        return tier.remote.bandwidth
    return tier.blobs.usage().write_bandwidth if isinstance(tier.blobs, Metered) else None


def step_view(step: StepId, record: StepRecord, tiers: tuple[str, ...], on_line: bool) -> StepView:
    """A step of age 0 as policies see it; ``tiers`` are the names of those that hold it."""
    metrics = numbers(record.metrics)
    return StepView(step.step, step.serial, record.saved_at, 0.0, record.nbytes, metrics, tiers, on_line)


def numbers(metrics: Mapping[str, float | str]) -> dict[str, float]:
    """The metrics of a record as floats; a text in a hostile store that is no number is left out."""
    return {name: float(value) for name, value in metrics.items() if not isinstance(value, str) or _is_number(value)}


def _is_number(text: str) -> bool:
    try:
        return not math.isnan(float(text)) or text == "nan"
    except ValueError:
        return False
