"""Looks for damage, and mends it from the tiers that have the bytes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

import numpy as np

from tieredckpt.blobs.settle import in_thread
from tieredckpt.blobs.slab import aligned
from tieredckpt.engine.collector import Collector
from tieredckpt.engine.copier import copy_step
from tieredckpt.engine.reader import check
from tieredckpt.engine.source import Damage, StepSource
from tieredckpt.engine.state import State
from tieredckpt.engine.tier import Tier
from tieredckpt.errors import TieredCkptError
from tieredckpt.events import ChunkRepaired
from tieredckpt.format import layout
from tieredckpt.format.manifest import StepId
from tieredckpt.format.ocdbt import Extent

__all__ = ["heal", "heal_index", "inspect"]

_log = logging.getLogger("tieredckpt")


async def inspect(
    state: State, step: StepId, tier: Tier, progress: Callable[[int], None] | None = None
) -> list[Damage]:
    """Read everything of a step on one tier; what is not as it was saved.

    Raises what the index raises, and `TierUnavailable` when a chunk could not be read to the end.
    """
    async with StepSource.open(state, step, only=tier) as source:
        source.progress = progress
        await check(state, source)
        if source.silence is not None:
            raise source.silence
        return source.damage


async def heal(state: State, collector: Collector, step: StepId, damage: Iterable[Damage]) -> list[TieredCkptError]:
    """Write good bytes back to every tier that lost some; returns what could not be mended."""
    by_tier: dict[str, dict[bytes, Damage]] = {}
    for found in damage:
        by_tier.setdefault(found.tier.name, {})[found.digest] = found
    problems: list[TieredCkptError] = []
    for name, chunks in by_tier.items():
        tier = state.tier(name)
        try:
            if tier.ram is not None:
                await _mend_slab(state, step, tier, chunks)
            else:
                await _mend_packs(state, collector, step, tier, chunks)
        except TieredCkptError as error:
            _log.error("%s could not be mended on tier %r: %s", step, name, error)
            problems.append(error)
    return problems


async def _mend_slab(state: State, step: StepId, tier: Tier, chunks: dict[bytes, Damage]) -> None:
    assert tier.ram is not None
    async with StepSource.open(state, step, only=tier) as source:
        for key, array in source.index.arrays.items():
            for ordinal, chunk in enumerate(array.chunks):
                if chunk.digest not in chunks or not isinstance(chunk.where, Extent):
                    continue
                nbytes = array.grid.cell_nbytes
                async with state.scratch.lend(aligned(nbytes)) as memory:
                    good = await source.read(key, ordinal, memory, bad=tier)
                    start = chunk.where.offset
                    lies_at = tier.ram.slab.array[start : start + nbytes]
                    await in_thread(np.copyto, lies_at, memory[:nbytes], pool=state.pool)
                chunks.pop(chunk.digest)
                state.events.emit(ChunkRepaired(step.step, layout.array_key(key), tier.name, good.name))


async def _mend_packs(
    state: State, collector: Collector, step: StepId, tier: Tier, chunks: dict[bytes, Damage]
) -> None:
    """Packs are immutable: the chunks go into a new one, and the step's index points there from then on."""
    async with tier.guards_packs:
        for digest in chunks:
            tier.forget(digest)
    await copy_step(state, collector, step, tier, again=True)
    for found in chunks.values():
        source = next((other.name for other in state.holders(step) if other is not tier), tier.name)
        state.events.emit(ChunkRepaired(step.step, found.key, tier.name, source))
    await collector.collect(tier, orphans=False)


async def heal_index(state: State, collector: Collector, step: StepId, tier: Tier, error: TieredCkptError) -> None:
    """A step's commit cannot be read on a tier: drop it from RAM, commit it anew elsewhere."""
    if tier.ram is not None:
        await collector.drop_unreadable(step, tier)
        return
    tier.condemn(step, error)
    if state.holders(step):
        await copy_step(state, collector, step, tier)
