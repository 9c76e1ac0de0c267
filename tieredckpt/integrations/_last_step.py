"""The step that a framework saves because its job is about to end, and goes on from in the next one."""

from __future__ import annotations

import logging
from contextlib import suppress

from tieredckpt import SyncCheckpoint, SyncStore, TieredCkptError

__all__ = ["outlive_node"]

_log = logging.getLogger("tieredckpt")


def outlive_node(store: SyncStore, saved: SyncCheckpoint) -> None:
    """Return when a tier that outlives this node has a step; what keeps it from that is a warning.

    Of several ranks, the first one calls it.
    """
    tiers, step = store.tier_infos(), saved.step
    tier = next((info.name for info in tiers if info.survives != "process"), None)
    if tier is None:
        _log.warning("step %d, the last before the job ends, is lost with this node: no tier outlives it", step)
        return
    with suppress(TieredCkptError):  # of one that went past RAM
        saved.reached(tiers[0].name)  # so that of several ranks all have agreed on it
    try:
        if tier not in store.where(step):
            store.promote(step, tier)
    except TieredCkptError as error:
        _log.warning("step %d, the last before the job ends, is not on tier %r: %s", step, tier, error)
