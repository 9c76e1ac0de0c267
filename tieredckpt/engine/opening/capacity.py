"""Refuses tiers that are too small for the steps that a store has."""

from __future__ import annotations

import logging

from tieredckpt.engine.state.state import State
from tieredckpt.errors import Invalid
from tieredckpt.units import format_size

__all__ = ["refuse_what_cannot_fit"]

_log = logging.getLogger("tieredckpt")


def refuse_what_cannot_fit(state: State) -> None:
    """Raise `Invalid` if no slower tier can hold a step as large as the newest; warn of single tiers that cannot."""
    newest = next(reversed(state.records().items()), None)
    slower = [tier for tier in state.tiers if not tier.in_memory]
    if newest is None or not slower:
        return
    step, record = newest
    small = [
        (tier, tier.capacity)
        for tier in slower
        if tier.marker is not None  # else what it holds is not known
        and tier.capacity is not None
        and tier.capacity < record.nbytes
        and tier.packs.encoding.raw  # else they may compress to less
        # else its chunks are shared ones
        and all(held.record.nbytes < record.nbytes for held in tier.steps.held.values())
    ]
    told = [
        f"tier {tier.name!r} with its {format_size(capacity)} cannot hold a step as large as {step}, "
        f"{format_size(record.nbytes)}; raise its capacity, or take the tier out"
        for tier, capacity in small
    ]
    if len(small) == len(slower):
        raise Invalid("\n".join(told))
    for text in told:
        _log.warning("%s", text)
