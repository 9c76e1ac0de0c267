"""The tier on which a step outlives the process, for frameworks that wait until it does."""

from __future__ import annotations

import logging
from contextlib import suppress

from tieredckpt import SyncCheckpoint, SyncStore, TieredCkptError, TierInfo

__all__ = ["awaited_tier", "durable_tier", "outlive_node"]

_log = logging.getLogger("tieredckpt")


def durable_tier(store: SyncStore) -> TierInfo | None:
    """The nearest tier that outlives the process; never one of lossy copies, and None without one."""
    tiers = store.tier_infos()
    return next((tier for tier in tiers if tier.survives != "process" and not tier.lossy), None)


def awaited_tier(store: SyncStore) -> str:
    """The tier on which a step is to be before it counts as saved: `durable_tier`, or without one the last."""
    tier = durable_tier(store)
    return store.config.exact[-1].name if tier is None else tier.name


def outlive_node(store: SyncStore, saved: SyncCheckpoint) -> None:
    """Return when a tier that outlives this node has a step that is the last one because the job is about to end, and
    that the next job goes on from; what keeps it from that is a warning.

    Of several ranks, the first one calls it.
    """
    tier, step = durable_tier(store), saved.step
    if tier is None:
        _log.warning("step %d, the last before the job ends, is lost with this node: no tier outlives it", step)
        return
    with suppress(TieredCkptError):  # of one that went past RAM
        saved.reached(store.tiers[0])  # so that of several ranks all have agreed on it
    try:
        if tier.name not in store.where(step):
            store.promote(step, tier.name)
    except TieredCkptError as error:
        _log.warning("step %d, the last before the job ends, is not on tier %r: %s", step, tier.name, error)
