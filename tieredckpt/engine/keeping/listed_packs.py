"""Compares the known packs of a tier with those that are there: others may have written or deleted some."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping

from tieredckpt.engine.tier import marker_file
from tieredckpt.engine.tier.tier import Tier
from tieredckpt.errors import NotFound
from tieredckpt.format import layout
from tieredckpt.format.manifest import StepId

__all__ = ["compare_packs", "note_impaired"]

_log = logging.getLogger("tieredckpt")


async def compare_packs(tier: Tier) -> None:
    """Find packs of failed puts that happened all the same, and packs of other writers; forget packs that are lost.

    A purge of old files may have deleted packs, and later steps would refer to them. The caller holds
    ``tier.packs.guard``. Raises as the tier's store does, and `TierUnavailable` if the tier is another one by now, or
    not mounted.
    """
    packs = tier.packs
    unseen = set(packs.sizes)
    async for info in tier.store.list(layout.PACKS):
        unseen.discard(info.key)
        if info.key not in packs.sizes and layout.parse_pack_key(info.key) is not None:
            packs.sizes[info.key] = info.size
            packs.unlisted.add(info.key)
            packs.orphans[info.key] = math.inf
        if (since := packs.orphans.get(info.key)) is not None:
            packs.orphans[info.key] = info.modified or min(since, time.time())
    if not unseen:
        return
    await marker_file.check(tier.store, tier.marker, tier.name, f"{len(unseen)} packs")
    lost = [key for key in sorted(unseen) if await _is_lost(tier, key)]
    if not lost:
        return
    _log.error(
        "tier %r: %d packs are gone that this store has not deleted, such as %s; later steps write what was in them "
        "again, and so do earlier ones that another tier holds",
        *(tier.name, len(lost), lost[0]),
    )
    packs.forget_chunks(lost)
    for key in lost:
        packs.drop(key)


async def note_impaired(tier: Tier, used: Mapping[StepId, frozenset[str]]) -> None:
    """Mark held steps whose packs are gone as impaired: no good copies. Raises as the tier's store does."""
    known = tier.packs.sizes.keys()
    unknown = frozenset().union(*(packs for step, packs in used.items() if step not in tier.steps.impaired)) - known
    lost = {key for key in unknown if await _is_lost(tier, key)}
    if not lost:
        return
    found = {step: packs & lost for step, packs in used.items() if packs & lost and step in tier.steps.held}
    if found:
        _log.error(
            "tier %r: packs of %d steps are gone, such as %s; they are no good copies",
            *(tier.name, len(found), next(iter(found))),
        )
    for step, packs in found.items():
        tier.steps.impair(step, packs)


async def _is_lost(tier: Tier, key: str) -> bool:
    try:
        await tier.store.stat(key)
    except NotFound:
        return True
    return False  # it was listed late, or has come since
