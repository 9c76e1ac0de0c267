"""Adoption: which branch a process continues, from the steps that it finds on the tiers."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from tieredckpt.engine import limits
from tieredckpt.engine.state.failures import failure_history
from tieredckpt.engine.state.state import State
from tieredckpt.engine.tier.lease import Holder
from tieredckpt.engine.tier.tier import Tier
from tieredckpt.format.manifest import StepId

__all__ = ["adopt_if_gone", "adopt_late_tier", "adopt_newest"]

_log = logging.getLogger("tieredckpt")


def adopt_newest(state: State, dead: Sequence[Holder] = ()) -> None:
    """Continue from the newest step of any branch, as after a restart; ``dead`` are writers found dead by others."""
    records = state.records()
    newest = max(records, default=None)
    state.branch.adopt(records[newest].line if newest else (), newest)
    every = (*state.tiers, *state.derived)
    serials = [step.serial for tier in every for step in (*tier.steps.held, *tier.steps.damaged)]
    blind = any(tier.marker is None for tier in every)
    state.branch.last_serial = max(state.branch.last_serial, *serials, 0) + (
        limits.in_force.serials_skipped if blind else 0
    )
    stale_holders = [holder for tier in every if tier.lease is not None for holder in tier.lease.stale_holders]
    state.observation.history = failure_history(records[newest] if newest else None, [*stale_holders, *dead])


def adopt_if_gone(state: State, step: StepId) -> None:
    """Continue from the newest save that is left, where ``step`` was the newest of the branch and no tier holds it."""
    records = state.records()
    if step == state.branch.newest and step not in records:
        newest = max(records, default=None)
        if newest is not None and not state.on_line(newest.serial):
            _log.warning("%s is gone; training continues from %s, which was off the branch", step, newest)
        # The trainer's state has not changed, so it still goes back to the same lossy copy, if any.
        state.branch.adopt(records[newest].line if newest else (), newest, state.branch.lossy)


def adopt_late_tier(state: State, tier: Tier) -> None:
    """Take up the steps of a tier that could not be read at start."""
    if not state.branch.line:  # nothing was found then, and nothing was saved since
        adopt_newest(state)
    found = (step.serial for step in (*tier.steps.held, *tier.steps.damaged))
    state.branch.last_serial = max(state.branch.last_serial, *found, 0)
