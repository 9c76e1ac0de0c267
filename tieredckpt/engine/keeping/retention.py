"""Retention: evicts steps by policy, and for room."""

from __future__ import annotations

import logging
from collections.abc import Callable

from tieredckpt.engine import limits
from tieredckpt.engine.keeping.collector import Collector
from tieredckpt.engine.keeping.policies import to_evict_when_full, unretained, waits_for_promotion
from tieredckpt.engine.keeping.used_packs import packs_by_step, unread
from tieredckpt.engine.state.state import State
from tieredckpt.engine.tier.tier import Tier
from tieredckpt.errors import TieredCkptError

__all__ = ["after_commit", "apply_retention", "evict_unretained", "evict_until", "replace_oldest"]

_log = logging.getLogger("tieredckpt")


async def apply_retention(state: State, collector: Collector, tier: Tier) -> None:
    """Evict the steps that the tier's policy does not retain.

    A tier with a capacity keeps them until room is needed; one without would grow for ever.
    """
    if tier.capacity is not None or not state.collects(tier):
        return
    evicted = [step for step in unretained(state, tier) if await collector.evictor.try_evict(step, tier)]
    if evicted:
        await collector.collect(tier, orphans=False)


async def evict_unretained(state: State, collector: Collector, tier: Tier) -> None:
    """Evict all steps from RAM that its policy does not retain and that wait for no promotion."""
    await collector.evictor.reclaim_unread(tier)
    for step in filter(tier.steps.has_own, unretained(state, tier)):
        if not waits_for_promotion(state, step, tier):
            await collector.evictor.try_evict(step, tier)


async def evict_until(state: State, collector: Collector, tier: Tier, enough: Callable[[], bool]) -> bool:
    """Evict from a tier until there is room enough; False when nothing more may go.

    Steps that still wait for their promotion stay. Retained steps leave RAM when a slower tier holds them, for the
    slab is a cache; so do a rank's parts of steps that are not committed, once that is decided.
    """
    if tier.in_memory:  # what is leaving already may make the room
        await state.changed.until(lambda: not tier.steps.leaving)
    await collector.evictor.reclaim_unread(tier)
    if enough():
        return True
    for step in tuple(tier.steps.parts):
        # Meanwhile rank 0 may have committed it: then it is a step that is held.
        if step in tier.steps.parts and step not in state.membership.undecided:
            state.membership.dropping_part(step)  # first, so that rank 0 does not count on it
            await collector.evictor.drop_part(step, tier)
    going = to_evict_when_full(state, tier)
    if not tier.in_memory:
        await collector.collect(tier, orphans=False)
        if enough():
            return True
        if tier.steps.damaged.any_packs(limits.in_force.unreadable_commit):
            return False  # what is evicted now would make no room yet
        if state.collects(tier) and unread(tier, await packs_by_step(tier)):
            return False
    for step in filter(tier.steps.has_own, going):  # others have no room here
        if waits_for_promotion(state, step, tier) or not await collector.evictor.try_evict(step, tier):
            continue
        if not tier.in_memory:
            await collector.collect(tier, orphans=False)
        if enough():
            return True
    return False


async def replace_oldest(collector: Collector, tier: Tier, enough: Callable[[], bool]) -> bool:
    """Evict unpromoted snapshots, oldest first, until there is room enough; never the last good copy."""
    for step in filter(tier.steps.has_own, sorted(tier.steps.held)):
        if await collector.evictor.try_evict(step, tier) and enough():
            return True
    return enough()


async def after_commit(state: State, collector: Collector, tier: Tier) -> None:
    """Apply retention to a tier after a commit there. Failures are logged."""
    try:
        await apply_retention(state, collector, tier)
    except TieredCkptError as error:
        _log.warning("retention on tier %r: %s", tier.name, error)
