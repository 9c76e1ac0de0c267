"""Collects on one tier, once the packs that are mostly dead were rewritten."""

from __future__ import annotations

from dataclasses import replace

from tieredckpt.engine.collector import Collected, Collector
from tieredckpt.engine.copier import copy_step
from tieredckpt.engine.state import State
from tieredckpt.engine.tier import Tier

__all__ = ["collect_on"]


async def collect_on(state: State, collector: Collector, tier: Tier) -> Collected:
    """Rewrite what lives in the sparse packs of a tier, and delete the dead ones. Raises as the tier's store does."""
    sparse = await collector.sparse_packs(tier)
    rewritten = 0
    if sparse:
        users = await collector.users_of(tier, sparse)
        await collector.forget_packs(tier, sparse)
        for step in users:
            if step in tier.held:  # and was not evicted meanwhile
                rewritten += await copy_step(state, collector, step, tier, again=True, leaving=sparse)
    collected = await collector.collect(tier)
    return replace(collected, nbytes=collected.nbytes - rewritten)
