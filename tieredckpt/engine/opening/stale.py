"""Sets stale saves apart: the training went on elsewhere from an older step, and gave their serials again.

A trainer dies before its last saves were promoted, its node keeps them in RAM or on a disk of its own, and the job
goes on without the node. When it comes back, what these hold is older than what slower tiers hold under the same
serials.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence

from tieredckpt.concurrency import in_thread
from tieredckpt.engine.state.state import State
from tieredckpt.engine.tier import step_index
from tieredckpt.engine.tier.index_cache import unique_extents
from tieredckpt.engine.tier.steps import Stale
from tieredckpt.engine.tier.tier import Tier
from tieredckpt.errors import Corrupt, NotFound, TierUnavailable
from tieredckpt.format import layout
from tieredckpt.format.manifest import StepId, StepRecord

__all__ = ["set_stale_apart", "stale_in_ram"]

_log = logging.getLogger("tieredckpt")


def stale_in_ram(state: State, in_ram: Collection[StepRecord]) -> set[StepId]:
    """The stale steps in RAM: from a serial that a slower tier gave another step, up to the next step that both have.

    What follows a step that both have was saved by a training that knew of it.
    """
    theirs = _saves_of(state.tiers[1:])
    found: set[StepId] = set()
    behind = False
    for record in sorted(in_ram, key=lambda record: record.id):
        if (other := theirs.get(record.serial)) is not None:
            behind = not _same(record, other)
        if behind:
            found.add(record.id)
            _log.warning(
                "%s is dropped from RAM: the training has gone on elsewhere, and given its serial again", record.id
            )
    return found


async def set_stale_apart(state: State) -> None:
    """Count no stale step as held, on any tier; RAM drops it, and a reader only stops listing it."""
    for tier in reversed(state.tiers[:-1]):  # the slowest first: what is stale there judges no other tier
        if not tier.in_memory:
            try:
                await _set_apart(tier, _saves_of(state.tiers[tier.index + 1 :]))
            except TierUnavailable as error:
                state.report(tier, error)
    first = state.tiers[0]
    if (ram := first.ram) is None:
        return
    for step in stale_in_ram(state, [held.record for held in first.steps.held.values()]):
        if not ram.slab.writable:
            first.steps.drop(step)
            continue
        digests = list(unique_extents((await step_index.load(first, step)).arrays))
        index_key = first.steps.held[step].btree_key
        unread = await in_thread(ram.store.retire, layout.manifest_key(step.step, step.serial), index_key)
        ram.unread.append((unread, digests))
        first.steps.drop(step)
        await first.store.delete(index_key)


async def _set_apart(tier: Tier, theirs: Mapping[int, StepRecord]) -> None:
    """Set apart the steps whose serial other saves have, and those that the same runs saved after them.

    Other steps stay: they may be of a training that came back here, and went on from what the others hold. Raises
    `TierUnavailable` where a step cannot be read that may be stale.
    """
    runs: set[tuple[object, ...]] = set()
    for step in sorted(tier.steps.held):
        other = theirs.get(step.serial)
        if other is not None and _same(tier.steps.held[step].record, other):
            runs.clear()
        elif other is not None or runs:
            try:
                run = _run((await step_index.load(tier, step)).record)
                packs = await step_index.packs(tier, step)
            except (Corrupt, NotFound) as error:
                _log.info("tier %r: %s cannot be compared with other saves: %s", tier.name, step, error)
                continue
            if other is None and run not in runs:
                continue
            runs.add(run)
            problem = Stale(
                f"tier {tier.name!r}: {step} is another save than the step of that serial: the training has gone on "
                f"elsewhere from an older step",
                tier.steps.held[step].btree_key,
                tier.steps.catalogued.stamps.get(step),
            )
            for key in packs:
                tier.packs.orphans.pop(key, None)  # known to be used: no grace needed once it has left
            tier.quarantine(step, problem)
            _log.warning("%s; it is not restored, and leaves when newer steps are as safe", problem)


def _saves_of(tiers: Sequence[Tier]) -> dict[int, StepRecord]:
    """The steps of tiers by serial; of two saves that of the slower tier."""
    return {step.serial: held.record for tier in tiers for step, held in tier.steps.held.items()}


def _same(record: StepRecord, other: StepRecord) -> bool:
    return record.id == other.id and record.saved_at == other.saved_at


def _run(record: StepRecord) -> tuple[object, ...]:
    """Identifies the process that saved a step, and what it had restored."""
    return record.provenance.get("host"), record.provenance.get("process"), record.restored_from
