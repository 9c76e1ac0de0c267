"""Scrubs whole tiers: every chunk once, every commit, the footers of the packs and the marker; repairs on request."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from tieredckpt.blobs.wrap import Pace
from tieredckpt.engine.keeping.collector import Collector
from tieredckpt.engine.keeping.used_packs import users_of
from tieredckpt.engine.opening.scan import pack_table
from tieredckpt.engine.repairing.check import Checked
from tieredckpt.engine.repairing.repack import rewrite
from tieredckpt.engine.repairing.verify import Verified, Verifier
from tieredckpt.engine.state.state import State
from tieredckpt.engine.tier import marker_file, step_index
from tieredckpt.engine.tier.tier import Tier
from tieredckpt.errors import Corrupt, NotFound, TieredCkptError
from tieredckpt.format import layout
from tieredckpt.format.manifest import StepId

__all__ = ["scrub"]


async def scrub(verifier: Verifier, tiers: Sequence[Tier], rate: float | None) -> list[Verified]:
    """Verify all that tiers hold, one tier after the other, the newest steps first; at most ``rate`` bytes a second.

    Returns one result per step and tier, oldest save first, and then one for each tier whose own files are damaged.
    """
    found: list[Verified] = []
    state, collector = verifier.state, verifier.collector
    for tier in tiers:
        checked, repairs = Checked(Pace(rate)), verifier.repairs(tier)
        if not tier.answers or tier.marker is None:
            if state.read_only and isinstance(tier.health.error, NotFound):
                continue  # it was never made, or ended with its process
            found.append(Verified(None, tier.name, 0, (), False, f"it does not answer: {tier.health.error}"))
            continue
        if (marker := await _check_marker(tier, repair=repairs)) is not None:
            found.append(marker)
        for step in sorted({*tier.steps.held, *tier.steps.damaged.not_stale()}, reverse=True):
            if tier.steps.has_own(step) or step in tier.steps.damaged:
                with suppress(NotFound):  # evicted meanwhile
                    found.append(await verifier.on(step, tier, checked))
        if not tier.in_memory and (footers := await _check_footers(state, collector, tier, repair=repairs)) is not None:
            found.append(footers)
    return sorted(found, key=lambda each: (each.id is None, each.id or StepId(0, 0)))


async def _check_marker(tier: Tier, *, repair: bool) -> Verified | None:
    assert tier.marker is not None
    problem = f"tier {tier.name!r}: {layout.MARKER} is not what was written"
    try:
        if await marker_file.is_still(tier.store, tier.marker):
            return None
        if repair:
            await marker_file.write(tier.store, tier.marker)
    except TieredCkptError as error:
        return Verified(None, tier.name, 0, (layout.MARKER,), False, f"{problem}: {error}")
    return Verified(None, tier.name, 0, (layout.MARKER,), repair, problem)


async def _check_footers(state: State, collector: Collector, tier: Tier, *, repair: bool) -> Verified | None:
    """Check that each pack lists its chunks: a lost index is rebuilt from these lists, and later saves use them."""
    damaged: set[str] = set()
    used: set[str] = set()
    try:
        for key, size in tuple(tier.packs.sizes.items()):
            try:
                await pack_table(tier, key, size)
            except (Corrupt, NotFound):
                if key in tier.packs.sizes:  # and was not collected meanwhile
                    damaged.add(key)
        for step in await users_of(tier, damaged):
            with suppress(NotFound):  # evicted meanwhile
                used |= damaged & await step_index.packs(tier, step)
        damaged = used  # unreferenced bytes are left from a crash, and are collected
        if not damaged:
            return None
        if repair:
            await rewrite(state, collector, tier, damaged)
            await collector.collect(tier, orphans=False)
    except TieredCkptError as error:
        return Verified(None, tier.name, 0, tuple(sorted(damaged)), False, f"tier {tier.name!r}: {error}")
    left = damaged & tier.packs.sizes.keys()
    problem = f"tier {tier.name!r}: the footers of {len(damaged)} packs are damaged"
    return Verified(None, tier.name, 0, tuple(sorted(damaged)), repair and not left, problem)
