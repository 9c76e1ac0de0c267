"""Opens shared tiers again on the ranks that do not manage them: each rank has a blob store of its own, which may fail
alone, or stay behind when rank 0 has opened its own again.
"""

from __future__ import annotations

import asyncio
import logging

from tieredckpt.engine import limits
from tieredckpt.engine.opening.connect import reopen
from tieredckpt.engine.state.state import State
from tieredckpt.engine.tier.tier import Tier
from tieredckpt.errors import TieredCkptError, TierUnavailable

__all__ = ["check_open", "is_unavailable_here", "keep_open"]

_log = logging.getLogger("tieredckpt")


async def keep_open(state: State) -> None:
    """Open shared tiers again that fail on this rank, or were not there at opening, until cancelled."""
    shared = [tier for tier in state.tiers if tier.shared]
    failures = 0
    while True:
        await state.changed.until(lambda: any(map(is_unavailable_here, shared)))
        for tier in filter(is_unavailable_here, shared):
            try:
                async with tier.packs.guard:  # nothing is written there meanwhile
                    await check_open(state, tier)
            except TieredCkptError as error:
                _log.info("rank %d: tier %r cannot be opened again: %s", state.membership.rank, tier.name, error)
            except Exception:
                _log.exception("rank %d: tier %r: unexpected failure to open it", state.membership.rank, tier.name)
        failures = failures + 1 if any(map(is_unavailable_here, shared)) else 0
        if failures:
            await asyncio.sleep(limits.backoff(limits.in_force.first_retry, limits.in_force.last_retry, failures - 1))


async def check_open(state: State, tier: Tier) -> None:
    """Open a tier again if it is not open on this rank, or failed here since it was opened.

    Raises `TierUnavailable` where it is not there, or is not what rank 0 has.
    """
    if not is_unavailable_here(tier):
        return
    if not await reopen(state, tier):
        raise TierUnavailable(
            f"tier {tier.name!r} is not at {tier.config.location} on the machine of rank {state.membership.rank}; is "
            f"its file system mounted there?"
        )
    tier.health.unavailable_here = False
    state.changed.notify()


def is_unavailable_here(tier: Tier) -> bool:
    """Whether a shared tier is not open on this rank, or failed here since it was."""
    return tier.blobs is None or tier.health.unavailable_here
