"""Chooses the copy of a chunk that new commits refer to; what a pack's footer lists may be torn or damaged."""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from collections.abc import Set as AbstractSet

import numpy as np

from tieredckpt.concurrency import in_thread
from tieredckpt.engine import limits
from tieredckpt.engine.state.state import State
from tieredckpt.engine.tier import step_index
from tieredckpt.engine.tier.chunk_reader import read_chunk
from tieredckpt.engine.tier.index_cache import unique_extents
from tieredckpt.engine.tier.tier import Tier
from tieredckpt.errors import Corrupt, NotFound
from tieredckpt.format.encoding import Encoding
from tieredckpt.format.manifest import StepId, StepIndex
from tieredckpt.format.ocdbt import Extent

__all__ = ["is_verified", "refer_to_intact"]


async def refer_to_intact(
    state: State, tier: Tier, step: StepId | None, sizes: Mapping[bytes, int], encoding: Encoding | None = None
) -> None:
    """Make new commits refer to an intact copy of each chunk that the tier may have, or to none.

    A footer proves nothing. If puts are not atomic, it may be there without the chunks before it. And a repair leaves
    the damaged copy in its pack while other chunks there are in use: beside the good copy or, once that was collected,
    alone. So a chunk that an earlier process wrote is read before it is referred to, unless a committed step refers to
    that very copy. Only the indexes of the step itself and of the newest steps are searched for such references: they
    have nearly all chunks that recur in a training, and to search all would take longer than to read. A chunk that is
    doubted is always read. The caller holds ``tier.packs.guard``, or has noted the packs in
    ``tier.packs.streamed_to``.

    ``tier`` is a durable one. ``step`` is to be committed, None if it has no identity yet; ``sizes`` has the bytes of
    each chunk that it is to refer to. Copies in ``encoding`` are preferred; None is that of the tier.

    Raises `TierUnavailable` when a copy or an index could not be read.
    """
    async with tier.packs.proving:
        await _refer_to_intact(state, tier, step, sizes, encoding or tier.packs.encoding)


async def _refer_to_intact(
    state: State, tier: Tier, step: StepId | None, sizes: Mapping[bytes, int], wanted: Encoding
) -> None:
    unproven = await in_thread(_unverified, tier, sizes, pool=state.pool)
    for digest, extent in (await in_thread(_of_one_encoding, tier, sizes, wanted, pool=state.pool)).items():
        if digest not in tier.packs.index:
            continue  # it was forgotten since, as one of them is damaged
        if tier.packs.index[digest] != extent:
            tier.packs.index[digest] = extent
        tier.packs.duplicates.pop(digest, None)
        unproven.add(digest)
    for committed in _to_ask(tier, step) if unproven else ():
        if not unproven:
            break
        try:
            index = await step_index.load(tier, committed)
        except (Corrupt, NotFound):
            continue  # it vouches for nothing
        verified = await in_thread(_verified, tier, index, unproven, pool=state.pool)
        unproven -= verified
        tier.packs.verified |= verified
    doubted = unproven | ((tier.packs.duplicates.keys() | tier.packs.doubted) & sizes.keys())
    # Not of scratch memory: a save that calls this may have all of it.
    memory = np.empty(max((sizes[digest] for digest in doubted), default=0), dtype=np.uint8)
    for digest in doubted:
        known = tier.packs.index.get(digest)
        copies = [*([known] if known is not None else []), *tier.packs.duplicates.get(digest, ())]
        # After a change of `codec`, copies in the new encoding come first.
        copies.sort(key=lambda extent: not wanted.fits(extent.length, sizes[digest]))
        tier.packs.forget(digest)
        for extent in copies:
            try:
                await read_chunk(tier, extent, digest, memory[: sizes[digest]], state.pool)
            except (Corrupt, NotFound):
                continue
            tier.packs.index[digest] = extent
            break
        tier.packs.duplicates.pop(digest, None)


def _to_ask(tier: Tier, step: StepId | None) -> list[StepId]:
    newest = heapq.nlargest(limits.in_force.steps_asked, (held for held in tier.steps.held if held != step))
    return [step, *newest] if step is not None and step in tier.steps.held else newest


def is_verified(tier: Tier, digest: bytes, length: int) -> bool:
    """Whether a rank's part may refer to the copy of a chunk on the tier; ``length`` is what the part says."""
    known = tier.packs.has_of_part(digest, length) and digest not in tier.packs.duplicates
    proven = digest in tier.packs.verified or not tier.packs.index.was_found(digest)
    return known and proven and digest not in tier.packs.doubted


def _unverified(tier: Tier, sizes: Mapping[bytes, int]) -> set[bytes]:
    """Chunks that an earlier process wrote, known from pack footers alone and not verified yet."""
    return {digest for digest in sizes if digest not in tier.packs.verified and tier.packs.index.was_found(digest)}


def _of_one_encoding(tier: Tier, sizes: Mapping[bytes, int], wanted: Encoding) -> dict[bytes, Extent]:
    """Chunks with exactly one copy in the wanted encoding (others date from before a change of `codec`), and that copy.

    Such a chunk needs no more proof than one with a single copy, unless it is doubted: a repair would have left a
    second copy in this encoding.
    """
    found, duplicates = {}, tier.packs.duplicates
    for digest in (duplicates.keys() & sizes.keys()) - tier.packs.doubted:
        known = tier.packs.index.get(digest)
        if known is None:  # it was forgotten, as one of them is damaged
            continue
        fitting = [each for each in (known, *duplicates[digest]) if wanted.fits(each.length, sizes[digest])]
        if len(fitting) == 1:
            found[digest] = fitting[0]
    return found


def _verified(tier: Tier, index: StepIndex, digests: AbstractSet[bytes]) -> set[bytes]:
    """Chunks that a committed step refers to at the place where they were found."""
    extents = unique_extents(index.arrays)
    return {digest for digest in digests & extents.keys() if tier.packs.index.get(digest) == extents[digest]}
