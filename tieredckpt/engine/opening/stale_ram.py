"""Removes stale saves from RAM: the training went on elsewhere from an older step, and gave their serials again.

A trainer dies before its last saves were promoted, its node keeps them in RAM, and the job goes on without the node.
When it comes back, what RAM holds is older than what the other tiers hold under the same serials.
"""

from __future__ import annotations

import logging
from collections.abc import Collection

from tieredckpt.concurrency import in_thread
from tieredckpt.engine.state.state import State
from tieredckpt.engine.tier import step_index
from tieredckpt.engine.tier.index_cache import unique_extents
from tieredckpt.format import layout
from tieredckpt.format.manifest import StepId, StepRecord

__all__ = ["remove_stale_ram", "stale_steps"]

_log = logging.getLogger("tieredckpt")


def stale_steps(state: State, in_ram: Collection[StepRecord]) -> set[StepId]:
    """The stale steps in RAM: from a serial that a slower tier gave another step, up to the next step that both have.

    What follows a step that both have was saved by a training that knew of it.
    """
    theirs = {step.serial: held.record for tier in state.tiers[1:] for step, held in tier.steps.held.items()}
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


async def remove_stale_ram(state: State) -> None:
    """Remove stale steps from RAM; a reader only stops listing them."""
    first = state.tiers[0]
    if (ram := first.ram) is None:
        return
    for step in stale_steps(state, [held.record for held in first.steps.held.values()]):
        if not ram.slab.writable:
            first.steps.drop(step)
            continue
        digests = list(unique_extents((await step_index.load(first, step)).arrays))
        index_key = first.steps.held[step].btree_key
        unread = await in_thread(ram.store.retire, layout.manifest_key(step.step, step.serial), index_key)
        ram.unread.append((unread, digests))
        first.steps.drop(step)
        await first.store.delete(index_key)


def _same(record: StepRecord, other: StepRecord) -> bool:
    return record.id == other.id and record.saved_at == other.saved_at
