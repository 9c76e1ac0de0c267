"""A tier that is scanned again, as after a failure."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from tieredckpt import CheckpointStore
from tieredckpt.engine.opening.connect import connect_late
from tieredckpt.engine.tier.tier import Tier
from tieredckpt.testing.faulty import Faulty

__all__ = ["scan_again", "scanned_again"]


async def scan_again(store: CheckpointStore, tier: Tier) -> list[int]:
    """What a promoter does with a tier that comes back and may not be the same; returns the steps that it holds then.

    Raises as `connect_late`.
    """

    async def come_back() -> list[int]:
        tier.marker = None
        await connect_late(store._life.engine.state, tier)
        return [held.step for held in tier.steps.held]

    return await store._life.loop.call(come_back())


@asynccontextmanager
async def scanned_again(store: CheckpointStore, tier: Tier, faulty: Faulty) -> AsyncIterator[None]:
    """`scan_again`, which waits inside the block for a listing of the steps."""
    listing = faulty.hold("list", key="steps/*")
    scanning = asyncio.create_task(scan_again(store, tier))
    try:
        await listing.reached()
        yield
    finally:
        listing.release()
        await scanning
