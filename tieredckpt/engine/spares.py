"""Settles which copy of a chunk a tier refers to, where its packs have several and one of them may be damaged."""

from __future__ import annotations

from collections.abc import Mapping

from tieredckpt.engine.source import read_chunk
from tieredckpt.engine.state import State
from tieredckpt.engine.tier import Tier
from tieredckpt.errors import Corrupt, NotFound

__all__ = ["refer_to_intact"]


async def refer_to_intact(state: State, tier: Tier, sizes: Mapping[bytes, int]) -> None:
    """Let new commits refer to an intact copy of each chunk that the tier has more than once, or to none.

    A repair leaves the damaged copy in its pack while other chunks there are in use, and footers do not tell
    which of two copies is the good one. The caller holds ``tier.guards_packs``.

    Args:
        state: of the engine.
        tier: a durable one.
        sizes: bytes of each chunk that is to be referred to, by digest.

    Raises `TierUnavailable` when a copy could not be read.
    """
    for digest in tier.spares.keys() & sizes.keys():
        known = tier.chunks.get(digest)
        copies = [*([known] if known is not None else []), *tier.spares[digest]]
        tier.forget(digest)
        for extent in copies:
            async with state.scratch.lend(sizes[digest]) as memory:
                try:
                    await read_chunk(state, tier, digest, extent, sizes[digest], memory)
                except (Corrupt, NotFound):
                    continue
            tier.chunks[digest] = extent
            break
        del tier.spares[digest]
