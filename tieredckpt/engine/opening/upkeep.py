"""Periodic work of an open store: renews leases, reclaims leftovers, writes catalogs, reads unreadable steps again."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from tieredckpt.concurrency import being_cancelled
from tieredckpt.engine import limits
from tieredckpt.engine.opening.catalog_write import write_catalog
from tieredckpt.engine.state.state import State
from tieredckpt.engine.tier.steps import Unreadable
from tieredckpt.engine.tier.tier import Tier
from tieredckpt.errors import TieredCkptError
from tieredckpt.format.manifest import StepId

__all__ = ["catalogue", "keep_catalogued", "keep_tidy", "read_again", "renew_lease"]

_log = logging.getLogger("tieredckpt")


async def renew_lease(state: State, tier: Tier) -> None:
    """Keep the lease of a tier from running out, until cancelled."""
    while not being_cancelled():
        await asyncio.sleep(state.config.lease_ttl / 3)
        if tier.lease is None or not tier.answers:
            continue
        try:
            await tier.lease.renew()
            await tier.lease.confirm()
        except TieredCkptError as error:
            state.report(tier, error)
        except Exception as error:
            _log.exception("tier %r: unexpected failure to renew the lease", tier.name)
            state.report(tier, error)


async def keep_tidy(grace: float, collect: Callable[[], Awaitable[object]]) -> None:
    """Reclaim garbage of crashes and repairs; none is old enough before the grace period is over."""
    while not being_cancelled():
        await asyncio.sleep(grace)
        try:
            await collect()
        except TieredCkptError as error:
            _log.warning("collection: %s", error)
        except Exception:
            _log.exception("collection: unexpected failure")


async def read_again(tier: Tier, look_again: Callable[[StepId, Tier], Awaitable[None]]) -> None:
    """Read steps again that could not be read though their tier works, until cancelled."""
    while not being_cancelled():
        await asyncio.sleep(limits.in_force.last_retry)
        for step, problem in tuple(tier.steps.damaged.items()):
            if not isinstance(problem, Unreadable) or not tier.answers:
                continue
            try:
                await look_again(step, tier)
            except TieredCkptError as error:
                _log.info("tier %r: %s could not be read again: %s", tier.name, step, error)
            except Exception:
                _log.exception("tier %r: unexpected failure to read %s again", tier.name, step)


async def keep_catalogued(tier: Tier) -> None:
    """Write catalogs of what comes to a tier, until cancelled, so that the next opening need not read it."""
    while not being_cancelled():
        await catalogue(tier)
        await asyncio.sleep(limits.in_force.catalog_interval)


async def catalogue(tier: Tier) -> None:
    """Write a catalog if enough came to a tier; a failure costs the next opening time, and no more."""
    if tier.in_memory or tier.marker is None or not tier.healthy:
        return
    try:
        await write_catalog(tier, tier.marker.store)
    except TieredCkptError as error:
        _log.warning("tier %r: no catalog was written: %s", tier.name, error)
    except Exception:
        _log.exception("tier %r: unexpected failure to write a catalog", tier.name)
