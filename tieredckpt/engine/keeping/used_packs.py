"""Finds the packs that the steps of a tier use, by their indexes; many at a time of a remote tier."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from collections.abc import Set as AbstractSet

from tieredckpt.concurrency import together
from tieredckpt.engine.tier import marker_file, step_index
from tieredckpt.engine.tier.index_cache import packs_of
from tieredckpt.engine.tier.tier import Tier
from tieredckpt.errors import Corrupt, NotFound
from tieredckpt.format.manifest import StepId, StepIndex

__all__ = ["packs_by_step", "read_indexes", "unread", "users_of"]

_log = logging.getLogger("tieredckpt")

_INDEXES_AT_A_TIME = 8
"""Indexes read at a time on a remote tier, where each request takes long: a store has thousands of steps."""
_LARGE_INDEX = 8 << 20
"""Bytes of an index that is read alone: it takes several times as much memory."""


async def packs_by_step(tier: Tier) -> dict[StepId, frozenset[str]]:
    """The packs of each step that is held or stale, as it is when this returns; not of one that cannot be read.

    That one is being deleted. Raises as `read_indexes`.
    """
    steps, asked = tier.steps, set[StepId]()
    # Again for those that were read well meanwhile; of those that leave, some may be gone.
    while unread := steps.held.keys() - steps.indexes.packs.keys() - (asked & steps.leaving):
        asked |= unread
        await read_indexes(tier, unread)
    known = steps.indexes.packs
    return {step: known[step] for step in steps.held if step in known} | steps.damaged.stale()


def unread(tier: Tier, used: Mapping[StepId, frozenset[str]]) -> AbstractSet[StepId]:
    """The held steps that `packs_by_step` could not read, which are being deleted.

    Each may use any pack, and stays if its deletion fails. So no pack is dead meanwhile.
    """
    return tier.steps.held.keys() - used.keys()


async def users_of(tier: Tier, packs: Collection[str]) -> list[StepId]:
    """The held steps that refer to any of the packs. Raises as `read_indexes`."""
    used = await packs_by_step(tier)
    return sorted(step for step in used if not used[step].isdisjoint(packs) and step in tier.steps.held)


async def read_indexes(tier: Tier, steps: Collection[StepId], use: Callable[[StepIndex], None] | None = None) -> None:
    """Read the indexes of steps, ``use`` each, and remember which packs they refer to.

    One that is corrupt or lost is quarantined. Raises as a blob store does, and `TierUnavailable` if an index and the
    marker are lost: then the tier is another one by now, or not mounted.
    """
    large = any(tier.steps.indexes.nbytes.get(step, 0) > _LARGE_INDEX for step in steps)

    async def read(step: StepId) -> None:
        held = tier.steps.own(step)
        try:
            index = await step_index.load(tier, step)
        except (Corrupt, NotFound) as error:
            if isinstance(error, NotFound):
                await marker_file.check(tier.store, tier.marker, tier.name, str(step))
            # And is not being evicted, or was meanwhile, nor was committed anew, or found by a new scan of the tier.
            if tier.steps.keeps(step) and tier.steps.own(step) is held:
                _log.warning("tier %r: %s cannot be read there: %s", tier.name, step, error)
                tier.quarantine(step, error)
        else:
            if step in tier.steps.indexes:  # else it left
                tier.steps.indexes.packs[step] = packs_of(index.arrays)
            if use is not None:
                use(index)

    await together(map(read, steps), _INDEXES_AT_A_TIME if tier.store.traits.remote and not large else 1)
