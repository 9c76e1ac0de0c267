"""Collects on one tier, once the packs that are mostly dead were rewritten."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

from tieredckpt.engine.keeping.collector import Collected, Collector
from tieredckpt.engine.promoting.copy_step import copy_step
from tieredckpt.engine.state.state import State
from tieredckpt.engine.tier import step_index
from tieredckpt.engine.tier.tier import Tier
from tieredckpt.errors import NotFound

__all__ = ["collect_on", "rewrite"]


async def collect_on(state: State, collector: Collector, tier: Tier) -> Collected:
    """Rewrite the live chunks of sparse packs on a tier, unless it is full, and delete the dead packs.

    Raises as the tier's store does.
    """
    sparse = await collector.sparse_packs(tier) if tier.healthy else set()  # where there is room for the new ones
    rewritten = await rewrite(state, collector, tier, sparse) if sparse else 0
    collected = await collector.collect(tier)
    return replace(collected, nbytes=collected.nbytes - rewritten)


async def rewrite(state: State, collector: Collector, tier: Tier, packs: set[str]) -> int:
    """Copy live chunks of some packs into new ones, and refer to the new ones alone; the bytes written."""
    written = 0
    users = await collector.users_of(tier, packs)
    for step in users:
        with suppress(NotFound):  # evicted meanwhile
            for key in packs & await step_index.packs(tier, step):
                tier.packs.orphans.pop(key, None)  # known to have been used: no grace needed
    await collector.forget_packs(tier, packs)
    for step in users:
        try:
            if step in tier.steps.held:
                written += await copy_step(state, collector, step, tier, again=True, leaving=packs)
        except NotFound:
            if step in tier.steps.held and step not in tier.steps.leaving:  # and was not evicted meanwhile
                raise
    return written
