"""Rewrites the packs of one tier that are mostly dead, then collects there."""

from __future__ import annotations

import logging
from contextlib import suppress
from dataclasses import replace
from functools import partial

from tieredckpt.engine.keeping.collector import Collected, Collector
from tieredckpt.engine.keeping.full_tier import fits
from tieredckpt.engine.keeping.retention import evict_until
from tieredckpt.engine.keeping.used_packs import users_of
from tieredckpt.engine.promoting.copy_step import copy_step
from tieredckpt.engine.state.state import State
from tieredckpt.engine.tier import step_index
from tieredckpt.engine.tier.index_cache import unique_extents
from tieredckpt.engine.tier.tier import Tier
from tieredckpt.errors import NoSpace, NotFound

__all__ = ["collect_on", "rewrite"]

_log = logging.getLogger("tieredckpt")


async def collect_on(state: State, collector: Collector, tier: Tier) -> Collected:
    """Rewrite the live chunks of sparse packs on a tier that has room for them, and delete the dead packs.

    Raises as the tier's store does; a lack of room is only logged.
    """
    rewritten = 0
    # A capacity may be full of dead bytes; a full device has no room for the new packs.
    if tier.healthy or (tier.answers and tier.capacity is not None):
        sparse = await collector.sparse_packs(tier)
        # Asked before chunks are forgotten, which the next step would have to bring again.
        room = partial(fits, tier, sum(sparse.values()))
        try:
            if sparse and await evict_until(state, collector, tier, room):
                rewritten = await rewrite(state, collector, tier, set(sparse))
        except NoSpace as error:
            _log.warning("tier %r: packs that are mostly dead stay there for now: %s", tier.name, error)
    collected = await collector.collect(tier)
    return replace(collected, nbytes=collected.nbytes - rewritten)


async def rewrite(state: State, collector: Collector, tier: Tier, packs: set[str]) -> int:
    """Copy live chunks of some packs into new ones, and refer only to these; returns the bytes written."""
    written = 0
    users = await users_of(tier, packs)
    for step in users:
        with suppress(NotFound):  # evicted meanwhile
            tier.packs.mark_used(packs & await step_index.packs(tier, step))
    await _forget(tier, packs)
    for step in users:
        try:
            if step in tier.steps.held:
                written += await copy_step(state, collector, step, tier, again=True, without=packs)
        except NotFound:
            if step in tier.steps.held and step not in tier.steps.leaving:  # and was not evicted meanwhile
                raise
    return written


async def _forget(tier: Tier, packs: set[str]) -> None:
    """Take the packs' chunks out of the dedupe index, so that the next write of them is a new one."""
    async with tier.packs.guard:
        tier.packs.forget_chunks(packs)
        for step in await users_of(tier, packs):  # whatever other pack has the chunk too
            with suppress(NotFound):  # evicted meanwhile
                for digest, extent in unique_extents((await step_index.load(tier, step)).arrays).items():
                    if extent.path in packs:
                        tier.packs.forget(digest)
