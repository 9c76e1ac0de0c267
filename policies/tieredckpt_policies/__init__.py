"""The policies that come with tieredckpt, found through entry points like those of any other package.

`POLICIES` lists every class; ``presets/*.toml`` beside them are complete configurations to start from.
"""

from __future__ import annotations

from tieredckpt.policy import Policy
from tieredckpt_policies import eviction, promotion, retention, schedule

__all__ = ["POLICIES", "eviction", "promotion", "retention", "schedule"]

POLICIES: tuple[type[Policy], ...] = tuple(
    found
    for module in (promotion, retention, eviction, schedule)
    for found in vars(module).values()
    if isinstance(found, type) and issubclass(found, Policy) and found.__module__ == module.__name__
)
"""Each has the entry point ``<question>.<kind>`` in the group ``tieredckpt.policies``."""
