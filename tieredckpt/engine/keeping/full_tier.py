"""Room on a full tier for a newer step: the steps that it retains leave, oldest first, as far as promise 6 allows.

The policy says which steps are retained; the tier limits how many. Without this, a tier full of retained steps would
take no newer one, and the newest step would never be durable. If a device has no room although more than the step needs
has left it, something else holds the space, and the other steps stay.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from tieredckpt.blobs.base import Free
from tieredckpt.engine.keeping.collector import Collector
from tieredckpt.engine.keeping.policies import to_evict_for, unretained, waits_for_promotion
from tieredckpt.engine.keeping.retention import evict_until
from tieredckpt.engine.keeping.safety import why_kept
from tieredckpt.engine.state.state import State
from tieredckpt.engine.tier.steps import Unreadable
from tieredckpt.engine.tier.tier import Tier
from tieredckpt.errors import NoSpace
from tieredckpt.events import RetentionCut
from tieredckpt.format.manifest import StepId
from tieredckpt.units import format_size

__all__ = ["NoRoom", "check_room", "evict_older", "evicting_older", "fits", "make_room", "needing"]

_log = logging.getLogger("tieredckpt")

_VAIN = 2
"""Evictions end when this multiple of the missing bytes has left a device: a file takes more there than its bytes."""


class NoRoom(NoSpace):
    """A tier has no room for ``need`` bytes of a step."""

    def __init__(self, message: str, need: int = 0) -> None:
        super().__init__(message)
        self.need = need


@asynccontextmanager
async def needing(need: int) -> AsyncIterator[None]:
    """Turn `NoSpace` in the block into `NoRoom` for ``need`` bytes."""
    try:
        yield
    except NoRoom:
        raise
    except NoSpace as error:
        raise NoRoom(str(error), need) from error


def fits(tier: Tier, need: int) -> bool:
    """Whether the capacity of a tier has room for so many bytes, without evictions."""
    return tier.capacity is None or tier.used + need <= tier.capacity


async def check_room(step: StepId, tier: Tier, need: int) -> None:
    """Check that a tier has room for so many bytes of a step, in its capacity and on its medium. Raises `NoSpace`."""
    fewer = "or copy fewer steps (`--steps`)"
    if not fits(tier, need):
        raise NoRoom(
            f"tier {tier.name!r} has {format_size(tier.capacity or 0)}, {format_size(tier.used)} of it used; {step} "
            f"needs {format_size(need)} more, and a copy evicts nothing: raise its capacity, {fewer}",
            need,
        )
    free = await tier.store.free() if isinstance(tier.store, Free) else None
    if free is not None and free < need:
        raise NoRoom(
            f"tier {tier.name!r} at {tier.store.location} has {format_size(free)} free; {step} needs "
            f"{format_size(need)}: make room there, {fewer}",
            need,
        )


async def make_room(state: State, collector: Collector, step: StepId | None, tier: Tier, need: int) -> bool:
    """Whether the capacity of a tier has room for so many bytes of a step, after evictions if needed.

    ``step`` is None for a save, which is newer than all there is.
    """
    if tier.capacity is None or await evict_until(state, collector, tier, lambda: fits(tier, need)):
        return True
    while await evict_older(state, collector, step, tier, need):
        if fits(tier, need):
            return True
    return False


async def evicting_older(
    state: State, collector: Collector, step: StepId, tier: Tier, copy: Callable[[], Awaitable[int]]
) -> int:
    """Copy a step to a tier; if the device is full, evict an older step and try again."""
    while True:
        try:
            return await copy()
        except NoRoom as error:
            if await evict_older(state, collector, step, tier, error.need):
                continue
            why = _in_vain_message(tier) if fits(tier, error.need) and _is_in_vain(tier) else _unreadable_message(tier)
            why = why or _pinned_message(tier)
            if not why:
                raise
            raise NoRoom(f"{error}{why}", error.need) from error


async def evict_older(state: State, collector: Collector, step: StepId | None, tier: Tier, need: int) -> bool:
    """Evict one step from a full tier, for a newer one that needs so many bytes there; whether one left.

    No step leaves if all that may leave would not make enough room, or if earlier evictions made none on the device.
    """
    if not state.collects(tier):
        return False
    on_device = fits(tier, need)  # else its capacity is full, which counts what leaves
    if on_device or tier.lacks_lease:
        tier.health.lacked = max(tier.health.lacked, need)
        if _is_in_vain(tier):
            return False
    going = [
        older
        for older in to_evict_for(state, tier, step)
        if not waits_for_promotion(state, older, tier, only_healthy=True) and not why_kept(state, older, tier)
    ]
    lacking = need if fits(tier, need) else tier.used + need - (tier.capacity or 0)
    if not going or await collector.freed_by(going, tier) < lacking:
        return False
    retained = set(going).difference(unretained(state, tier))
    before = tier.used
    for older in going:
        nbytes = await collector.freed_by([older], tier)
        if await collector.evictor.try_evict(older, tier):
            if older in retained:
                _tell(state, older, tier)
            try:
                await collector.collect(tier, orphans=False)
            except NoSpace:  # not even for the lease without which no pack is deleted
                tier.health.freed += nbytes
            if on_device:
                tier.health.freed += max(0, before - tier.used)
            return True
    return False


def _is_in_vain(tier: Tier) -> bool:
    """Whether far more has left a device than it had no room for, and it has taken no step since."""
    index = max(tier.steps.indexes.nbytes.values(), default=0)
    return 0 < tier.health.freed >= _VAIN * (tier.health.lacked + index)


def _unreadable_message(tier: Tier) -> str:
    """Which steps keep all packs of a tier because their files cannot be read, for a message; empty where none does."""
    found = sorted(step for step, problem in tier.steps.damaged.items() if isinstance(problem, Unreadable))
    if not found:
        return ""
    return (
        f"; nothing can be evicted while {', '.join(map(str, found))} cannot be read there, for its packs are not "
        f"known: see to its files, or evict it"
    )


def _pinned_message(tier: Tier) -> str:
    """How many steps of a tier stay because they are pinned, for a message; empty where none is."""
    pinned = tier.steps.pinned & tier.steps.held.keys()
    return f"; pinned there, so that they stay: {len(pinned)} steps (`tieredckpt ls` tells which)" if pinned else ""


def _in_vain_message(tier: Tier) -> str:
    return (
        f"; older steps of {format_size(tier.health.freed)} left it, which made no room, so the others stay: see what "
        f"else takes its space (a storage target that is full while others have room, snapshots, files that are held "
        f"open, a quota that is shared), or give it more"
    )


def _tell(state: State, step: StepId, tier: Tier) -> None:
    if not tier.health.note:
        tier.health.note = "has no room for all the steps that its policy retains: the oldest leave for newer ones"
        _log.warning(
            "tier %r %s, first %s; give it more room, or let `retain` ask for fewer", tier.name, tier.health.note, step
        )
    state.events.emit(RetentionCut(step.step, step.serial, tier.name))
