"""The policies that come with tieredckpt, found through entry points like those of any other package.

`POLICIES` lists every class; ``presets/*.toml`` beside them are complete configurations to start from.
"""

from __future__ import annotations

from tieredckpt.policy import Policy
from tieredckpt_policies import eviction, promotion, retention, schedule

__all__ = ["POLICIES", "eviction", "promotion", "retention", "schedule"]

POLICIES: tuple[type[Policy], ...] = (
    promotion.Always,
    promotion.Never,
    promotion.EveryNSteps,
    promotion.Every,
    promotion.Best,
    promotion.OnSignal,
    promotion.WhenIdle,
    promotion.FirstAndLast,
    promotion.AnyOf,
    promotion.AllOf,
    retention.All,
    retention.LastN,
    retention.EveryK,
    retention.Best,
    retention.WithinAge,
    retention.DenseThenSparse,
    retention.Union,
    eviction.Oldest,
    eviction.Largest,
    eviction.CheapestToGetBack,
    schedule.Always,
    schedule.EveryNSteps,
    schedule.Every,
    schedule.YoungDaly,
    schedule.BoundedOverhead,
)
"""Each has the entry point ``<question>.<kind>`` in the group ``tieredckpt.policies``."""
