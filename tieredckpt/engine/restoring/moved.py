"""Detects that a step left a tier, or was committed again there, while a read-only process read it.

Only RAM keeps a step for such a process: what it reads elsewhere may be evicted at any moment. So bytes that are
missing or different count as damage only after the process has looked again.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Hashable
from contextlib import asynccontextmanager

from tieredckpt.engine.state.state import State
from tieredckpt.errors import Corrupt, NotFound, TierUnavailable
from tieredckpt.format.manifest import StepId

__all__ = ["Moved", "has_moved", "places", "unless_moved"]


class Moved(NotFound):
    """A step is not where it was when a reader began; the reader may look for it again."""


def places(state: State, step: StepId) -> Hashable:
    """Which tiers hold a step, and which commits of it."""
    held = [(tier.name, tier.steps.catalogued.stamps.get(step)) for tier in state.tiers if step in tier.steps.held]
    return tuple(held), id(state.ram_of_ranks.get(step))


async def has_moved(state: State, step: StepId, before: Hashable) -> bool:
    """Look again, in a read-only process: whether the places of a step have changed. False in a writer."""
    if state.reader.refresh is None:
        return False
    await state.reader.refresh()
    return places(state, step) != before


@asynccontextmanager
async def unless_moved(state: State, step: StepId) -> AsyncIterator[None]:
    """Raise `Moved` in place of an error in the block if the step, read there, has moved meanwhile."""
    before = places(state, step)
    try:
        yield
    except (Corrupt, NotFound, TierUnavailable) as error:
        if state.reader.refresh is None or isinstance(error, Moved):
            raise
        # A silent tier would not answer a second look either; but RAM ends with its training, which has promoted the
        # step by then.
        in_ram = any(tier.in_memory and step in tier.steps.held for tier in state.tiers)
        if isinstance(error, TierUnavailable) and places(state, step) == before and not in_ram:
            raise
        # Perhaps another call has found that it left, before this one began to read; that may be looking still.
        gone = isinstance(error, NotFound) and not any(step in tier.steps.held for tier in state.tiers)
        if not await has_moved(state, step, before) and not gone:
            raise
        raise Moved(f"{step} was evicted while it was read, or committed anew; try again") from error
