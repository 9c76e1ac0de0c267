"""Settles which copy of a chunk new commits refer to, where what a footer lists may be torn or damaged."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Set as AbstractSet

from tieredckpt.blobs.settle import in_thread
from tieredckpt.engine.indexes import unique_extents
from tieredckpt.engine.source import read_chunk
from tieredckpt.engine.state import State
from tieredckpt.engine.tier import Tier
from tieredckpt.errors import Corrupt, NotFound
from tieredckpt.format.manifest import StepIndex

__all__ = ["refer_to_intact", "undoubted"]


async def refer_to_intact(state: State, tier: Tier, sizes: Mapping[bytes, int]) -> None:
    """Let new commits refer to an intact copy of each chunk that the tier may have, or to none.

    A footer vouches for nothing. Where puts are not atomic it may be there without the chunks before it; and a
    repair leaves the damaged copy in its pack while other chunks there are in use, beside the good copy or,
    once that was collected, alone. So what an earlier process wrote is read before it is referred to, unless a
    committed step refers to that very copy. The caller holds ``tier.guards_packs``.

    Args:
        state: of the engine.
        tier: a durable one.
        sizes: bytes of each chunk that is to be referred to, by digest.

    Raises `TierUnavailable` when a copy or an index could not be read.
    """
    if tier.unproven is None:
        tier.unproven = await _unproven(state, tier)
    for digest in (tier.unproven | tier.spares.keys()) & sizes.keys():
        known = tier.chunks.get(digest)
        copies = [*([known] if known is not None else []), *tier.spares.get(digest, ())]
        tier.forget(digest)
        for extent in copies:
            async with state.scratch.lend(sizes[digest]) as memory:
                try:
                    await read_chunk(state, tier, digest, extent, sizes[digest], memory)
                except (Corrupt, NotFound):
                    continue
            tier.chunks[digest] = extent
            break
        tier.spares.pop(digest, None)
        tier.unproven.discard(digest)


def undoubted(tier: Tier) -> AbstractSet[bytes]:
    """The chunks of a tier that may be referred to as they are."""
    if tier.unproven is None:
        return frozenset()
    doubted = tier.unproven | tier.spares.keys()
    return tier.chunks.keys() - doubted if doubted else tier.chunks.keys()


async def _unproven(state: State, tier: Tier) -> set[bytes]:
    """The chunks in the packs of a tier to which no committed step refers where they were found."""
    unproven = set(tier.chunks)

    def prove(index: StepIndex) -> None:
        found = unique_extents(index.arrays).items()
        unproven.difference_update(digest for digest, extent in found if tier.chunks.get(digest) == extent)

    for step in sorted(tier.held, reverse=True):
        if not unproven:
            break
        try:
            index = await tier.load_index(step)
        except (Corrupt, NotFound):
            continue  # it vouches for nothing
        await in_thread(prove, index, pool=state.pool)
    return unproven
