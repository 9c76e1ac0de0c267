"""Sets stale saves apart: the training went on elsewhere from an older step, and gave their serials again.

A trainer dies before its last saves were promoted, its node keeps them in RAM or on a disk of its own, and the job
goes on without the node. When it comes back, what these hold is older than what slower tiers hold under the same
serials.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence

from tieredckpt.concurrency import in_thread
from tieredckpt.engine.state.branch import began_after
from tieredckpt.engine.state.state import State
from tieredckpt.engine.state.step_table import on
from tieredckpt.engine.tier import step_index
from tieredckpt.engine.tier.index_cache import unique_extents
from tieredckpt.engine.tier.steps import Stale
from tieredckpt.engine.tier.tier import Tier
from tieredckpt.errors import Corrupt, NotFound, TierUnavailable
from tieredckpt.format import layout
from tieredckpt.format.manifest import StepId, StepRecord
from tieredckpt.format.merging import RUN

__all__ = ["compare_with_slower", "set_stale_apart", "stale_in_ram"]

_log = logging.getLogger("tieredckpt")

_Saves = Mapping[int, tuple[Tier, StepRecord]]
"""Steps by serial, each with the tier that holds it."""


def stale_in_ram(state: State, in_ram: Collection[StepRecord]) -> set[StepId]:
    """The stale steps in RAM: from a serial that a slower tier gave another step, up to the next step that both have.

    What follows a step that both have was saved by a training that knew of it.
    """
    theirs = _saves_of(state.tiers[1:])
    found: set[StepId] = set()
    behind = False
    for record in sorted(in_ram, key=lambda record: record.id):
        if (other := theirs.get(record.serial)) is not None:
            behind = not _same(record, other[1])
        if behind:
            found.add(record.id)
            _log.warning(
                "%s is dropped from RAM: the training has gone on elsewhere, and given its serial again", record.id
            )
    return found


async def set_stale_apart(state: State) -> None:
    """Count no stale step as held, on any tier; RAM drops it, and a reader only stops listing it."""
    for tier in reversed(state.tiers[:-1]):  # the slowest first: what is stale there judges no other tier
        try:
            await compare_with_slower(state, tier)
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


async def compare_with_slower(state: State, tier: Tier) -> None:
    """Count no stale step as held on a tier below RAM: compare it with the slower ones.

    A step is stale if a slower tier has another save of its serial. So are, of the newest steps and of those after a
    stale one, the ones whose run gave a serial before that a slower tier has from another run. Other steps stay: they
    may be of a training that came back here, and went on from what the others hold.

    Raises `TierUnavailable` where a step cannot be read that may be stale; then what the tier holds is not known.
    """
    theirs, held = _saves_of(state.tiers[tier.index + 1 :]), tier.steps.held
    if tier.in_memory or tier.derived or not theirs:
        return
    tier.steps.scanning = True
    try:
        for step in sorted(held, reverse=True):
            if step.serial in theirs or not await _overtaken(tier, step, theirs):
                break
            await _set_apart(tier, step)
        behind = False
        for step in sorted(held):
            if (other := theirs.get(step.serial)) is not None:
                behind = not _same(held[step].record, other[1])
            if behind and (other is not None or await _overtaken(tier, step, theirs)):
                await _set_apart(tier, step)
    except TierUnavailable:
        tier.clear()
        tier.marker = None  # it is scanned again
        raise
    finally:
        tier.steps.scanning = False


async def _overtaken(tier: Tier, step: StepId, theirs: _Saves) -> bool:
    """Whether the run that saved a step had given a serial before that ``theirs`` has from another run."""
    try:
        record = (await step_index.load(tier, step)).record
    except (Corrupt, NotFound) as error:
        _log.info("tier %r: %s cannot be compared with other saves: %s", tier.name, step, error)
        return False
    begin, run = began_after(record), record.provenance.get(RUN)
    before = max((each for each in theirs if begin < each < step.serial and on(record.line, each)), default=None)
    if before is None or run is None:
        return False
    slower, other = theirs[before]
    try:
        return (await step_index.load(slower, other.id)).record.provenance.get(RUN) != run
    except (Corrupt, NotFound, TierUnavailable) as error:
        _log.info("tier %r: %s cannot be compared with %s: %s", tier.name, step, other.id, error)
        return False


async def _set_apart(tier: Tier, step: StepId) -> None:
    try:
        packs = await step_index.packs(tier, step)
    except (Corrupt, NotFound) as error:
        tier.quarantine(step, error)
        return
    problem = Stale(
        f"tier {tier.name!r}: {step} is stale: the training has gone on elsewhere from an older step",
        tier.steps.held[step].btree_key,
        tier.steps.catalogued.stamps.get(step),
    )
    for key in packs:
        tier.packs.orphans.pop(key, None)  # known to be used: no grace needed once it has left
    tier.quarantine(step, problem)
    _log.warning("%s; it is not restored, and leaves when newer steps are as safe", problem)


def _saves_of(tiers: Sequence[Tier]) -> dict[int, tuple[Tier, StepRecord]]:
    """The steps of tiers by serial; of two saves that of the slower tier."""
    return {step.serial: (tier, held.record) for tier in tiers for step, held in tier.steps.held.items()}


def _same(record: StepRecord, other: StepRecord) -> bool:
    return record.id == other.id and record.saved_at == other.saved_at
