"""Sets stale saves apart: the training went on elsewhere from an older step, and gave their serials again.

A trainer dies before its last saves were promoted, its node keeps them in RAM or on a disk of its own, and the job
goes on without the node. When it comes back, what these hold is older than what slower tiers hold under the same
serials.
"""

from __future__ import annotations

import logging
from bisect import bisect
from collections.abc import Collection, Sequence

from tieredckpt.engine.state.state import State
from tieredckpt.engine.state.step_table import on
from tieredckpt.engine.tier import commit_file, step_index
from tieredckpt.engine.tier.steps import Stale
from tieredckpt.engine.tier.tier import Tier
from tieredckpt.errors import Corrupt, NotFound, TierUnavailable
from tieredckpt.format.manifest import StepId, StepRecord

__all__ = ["compare_with_slower", "set_stale_apart", "stale_steps"]

_log = logging.getLogger("tieredckpt")


def stale_steps(records: Collection[StepRecord], slower: Sequence[Tier]) -> list[StepId]:
    """The steps that other saves, on slower tiers, have replaced; oldest first. One of these holds:

    - another save has the serial of the step;
    - the run of a later save had given the serial of the step, which is of another run;
    - the run of the step had given the serial of an earlier save, which is of another run;
    - the step came after such a one in the same run, which may have gone back before that serial, and slower tiers have
      no save of the run in between.

    Other steps are of a training that has come back since, and went on from what the slower tiers hold.
    """
    theirs = {
        step.serial: held.record
        for tier in slower
        for step, held in tier.steps.held.items()
        if tier.steps.has_own(step)  # in RAM of a process alone, ranks may have others
    }
    serials = sorted(theirs)
    found: list[StepId] = []
    overtaken: dict[str, int] = {}
    """By run, the last serial of those found."""
    for record in sorted(records, key=lambda record: record.id) if theirs else ():
        at = bisect(serials, record.serial)
        before, after = (theirs[each] for each in (serials[max(at - 1, 0)], serials[min(at, len(serials) - 1)]))
        if before.serial == record.serial:
            stale = before.id != record.id or before.saved_at != record.saved_at
        else:
            stale = _gave_again(record, before) or _gave_again(after, record)
            if not stale and (last := overtaken.get(record.run)) is not None:
                stale = all(theirs[each].run != record.run for each in serials[bisect(serials, last) : at])
        if stale:
            found.append(record.id)
            if record.run:
                overtaken[record.run] = record.serial
    return found


def _gave_again(later: StepRecord, earlier: StepRecord) -> bool:
    """Whether the run of a step had given the serial of an earlier step, which another run saved."""
    gave = later.began_after < earlier.serial < later.serial and on(later.line, earlier.serial)
    return gave and bool(earlier.run) and earlier.run != later.run


async def set_stale_apart(state: State) -> None:
    """Count no stale step as held, on any tier; RAM drops it, and a reader only stops listing it."""
    for tier in reversed(state.tiers):  # the slowest first: what is stale there judges no other tier
        try:
            await compare_with_slower(state, tier)
        except TierUnavailable as error:
            state.report(tier, error)
    first = state.tiers[0]
    if (ram := first.ram) is None:
        return
    for step in stale_steps([held.record for held in first.steps.held.values()], state.tiers[1:]):
        _log.warning("%s is dropped from RAM: the training has gone on elsewhere from an older step", step)
        if ram.slab.writable:
            await commit_file.retract_from_ram(first, ram, step)
        else:
            first.steps.drop(step)


async def compare_with_slower(state: State, tier: Tier) -> None:
    """Count no stale step as held on a tier below RAM.

    Raises `TierUnavailable` where one cannot be read; then all that the tier holds is to be read again.
    """
    if tier.in_memory or tier.derived:
        return
    stale = stale_steps([held.record for held in tier.steps.held.values()], state.tiers[tier.index + 1 :])
    tier.steps.scanning = True
    try:
        for step in stale:
            await _set_apart(tier, step)
    except TierUnavailable as error:
        for step in stale:
            tier.quarantine(step, error)
        tier.marker = None  # it is scanned again
        raise
    finally:
        tier.steps.scanning = False
        state.changed.notify()


async def _set_apart(tier: Tier, step: StepId) -> None:
    try:
        packs = await step_index.packs(tier, step)
    except (Corrupt, NotFound) as error:
        tier.quarantine(step, error)
        return
    if (held := tier.steps.held.get(step)) is None:
        return  # it was evicted meanwhile
    problem = Stale(
        f"tier {tier.name!r}: {step} is stale: the training has gone on elsewhere from an older step",
        held.btree_key,
        tier.steps.catalogued.stamps.get(step),
    )
    tier.packs.mark_used(packs)
    tier.quarantine(step, problem)
    _log.warning("%s; it is not restored, and leaves when newer steps are as safe", problem)
