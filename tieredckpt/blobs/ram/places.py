"""Places of the slower tiers of a configuration, in a form in which two configurations can be compared.

Paths are compared after `os.path.realpath`, URLs by scheme, endpoint, bucket and prefix; no secret is in either.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

from tieredckpt.blobs.ram.owner import Place, look_at
from tieredckpt.concurrency import on_own_thread_within
from tieredckpt.config import StoreConfig, TierConfig
from tieredckpt.config.kinds import kind_of
from tieredckpt.config.tiers import normal
from tieredckpt.errors import TierUnavailable

__all__ = ["place_of", "places_of"]


async def places_of(config: StoreConfig) -> dict[str, Place]:
    """The places, by name, of the tiers that identify a store: not memory, nor tiers that hold only derived steps."""
    found = await asyncio.gather(*(place_of(tier) for tier in config.exact))
    return {tier.name: place for tier, place in zip(config.exact, found, strict=True) if place is not None}


async def place_of(tier: TierConfig) -> Place | None:
    """The place of a tier, and what is there now; None for memory. A path that does not answer is taken as text."""
    where = kind_of(tier).location(tier)
    if not isinstance(where, Path):
        return Place(location=where) if where else None
    try:
        return await on_own_thread_within(tier.deadline, tier.name, f"looking at {where}", look_at, where)
    except TierUnavailable:
        return Place(location=normal(where), configured=normal(where))
