"""Fills the slab with the cells of a tree: the copy threads, the room they need, and what ``when_full`` says."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from tieredckpt.blobs.ram.slab import Slab
from tieredckpt.concurrency import in_thread, side_by_side
from tieredckpt.engine import limits
from tieredckpt.engine.keeping.collector import Collector
from tieredckpt.engine.keeping.policies import waits_for_promotion
from tieredckpt.engine.keeping.retention import evict_unretained, evict_until, replace_oldest
from tieredckpt.engine.saving.snapshot import Snapshot
from tieredckpt.engine.state.state import State
from tieredckpt.engine.tier.ram import Ram
from tieredckpt.engine.tier.slab_index import SlabIndex, slab_size
from tieredckpt.engine.tier.tier import Tier
from tieredckpt.errors import NoSpace, TieredCkptError
from tieredckpt.units import format_size

__all__ = ["SkipSave", "copy_cells", "fill_slab", "has_room", "wait_for_room"]

_log = logging.getLogger("tieredckpt")


class SkipSave(Exception):
    """This save is not made, and training goes on."""


def has_room(slab: Slab, nbytes: int) -> bool:
    """Whether ``nbytes`` could still be handed out."""
    return slab.room >= nbytes


async def copy_cells(state: State, snapshot: Snapshot, index: SlabIndex) -> None:
    """Run the copy threads until all is copied or the slab is full; none of them runs afterwards."""
    snapshot.full = False
    threads = min(state.config.copy_threads, len(snapshot.pending)) or 1
    await side_by_side(threads, partial(snapshot.work, index), snapshot.stop, state.pool)
    if snapshot.error is not None:
        raise snapshot.error


def _put_back(snapshot: Snapshot, index: SlabIndex) -> None:
    """Discard the copies; their cells are pending again."""
    index.drop([done.digest for done in snapshot.copied])
    snapshot.pending.extendleft(done.cell for done in snapshot.copied)
    snapshot.copied.clear()
    snapshot.new_bytes = 0


async def fill_slab(state: State, collector: Collector, snapshot: Snapshot, tier: Tier, ram: Ram) -> bool:
    """Copy all cells into the slab; False, with all of them still to do, when it can never hold them.

    Raises:
        SkipSave: there is no room now, and ``when_full`` says not to wait for it, or to wait no longer.
    """
    slab, index = ram.slab, ram.index
    new = [cell for cell in snapshot.pending if cell.expected is None or not index.holds(cell.expected)]
    need = sum(slab_size(cell.nbytes) for cell in new)
    if need > slab.capacity:
        return False
    ended = threading.Event()
    try:
        if not slab.used:
            await in_thread(slab.check_room, need, pool=state.pool)
        elif not has_room(slab, need):
            await wait_for_room(state, collector, tier, partial(has_room, slab, need))
        elif slab.spare < need and not slab.awaits_memory:
            await state.ram_gate.make_readers_yield(must=False)
            with state.ram_gate.saving():
                await _evict_and_not_grow(state, collector, tier)
        slab.expect(2 * need, at_least=need)  # for two snapshots, so that later saves wait for no memory
        if slab.spare < need:  # what is there is filled meanwhile
            state.pool.submit(_grow, slab, slab.used + need, lambda: not ended.is_set())
        while snapshot.pending:
            with state.ram_gate.saving():
                await copy_cells(state, snapshot, index)
            if snapshot.full:
                if _size(snapshot) > slab.capacity:  # what was unchanged has left, or the slab could not grow
                    _put_back(snapshot, index)
                    return False
                more = slab_size(snapshot.pending[0].nbytes)
                # More than there was: what is free may be in pieces that are too small.
                await wait_for_room(state, collector, tier, partial(has_room, slab, slab.room + more))
    except NoSpace:
        _put_back(snapshot, index)
        return False
    except BaseException:
        _put_back(snapshot, index)
        raise
    finally:
        ended.set()
    uses = Counter(done.digest for done in snapshot.copied)
    index.drop((uses - Counter(set(uses))).elements())  # a step uses each of its chunks once
    return True


def _grow(slab: Slab, nbytes: int, while_: Callable[[], bool]) -> None:
    with suppress(NoSpace):  # then it is the next cell that is refused
        slab.reserve(nbytes, while_)


async def _evict_and_not_grow(state: State, collector: Collector, tier: Tier) -> None:
    """Reuse memory before the slab grows, by evicting steps that are not retained.

    New memory comes at the speed of page faults, and the save would wait for it; but it comes, so a failure here is
    only logged. All such steps leave, not only as many as are needed now: otherwise free memory would be in ever
    smaller pieces, and the slab would grow after all.
    """
    try:
        await evict_unretained(state, collector, tier)
    except (TieredCkptError, OSError) as error:
        _log.warning("tier %r grows, for a step could not be evicted: %s", tier.name, error)


def _size(snapshot: Snapshot) -> int:
    """Bytes of the slab that the whole tree takes."""
    copied = {done.digest: done.cell.nbytes for done in snapshot.copied}
    pending = (cell.nbytes for cell in snapshot.pending)
    return sum(slab_size(nbytes) for nbytes in (*copied.values(), *pending))


async def wait_for_room(state: State, collector: Collector, tier: Tier, enough: Callable[[], bool]) -> None:
    """Make room in the slab by evictions, then as ``when_full`` says.

    Raises:
        SkipSave: it did not help.
    """
    when_full = state.config.when_full
    loop = asyncio.get_running_loop()
    patience = loop.time() + limits.in_force.wait_for_room
    with state.ram_gate.saving():
        if await evict_until(state, collector, tier, enough):
            return
    await state.ram_gate.make_readers_yield(must=True)
    while not await evict_until(state, collector, tier, enough):
        left = patience - loop.time()
        if when_full == "wait" and left > 0 and _waiting_helps(state, tier):
            await state.changed.wait(min(left, limits.in_force.look_for_room))
            await state.ram_gate.make_readers_yield(must=True)  # one that gave way may have begun anew
            continue
        if when_full != "skip" and await replace_oldest(collector, tier, enough):
            return
        raise SkipSave(
            f"the slab of tier {tier.name!r} ({format_size(tier.capacity or 0)}) is full of steps that must stay for "
            f"now; give it a larger capacity, or save less often"
        )


def _waiting_helps(state: State, tier: Tier) -> bool:
    """Whether a step of the slab is on its way to a tier that works, or being read."""
    slower = (*state.tiers[tier.index + 1 :], *state.derived)
    stuck = sum(other.steps.promotions > 0 and not other.responsive for other in slower)
    # Each promotion reads a step, and those that are stuck do not end soon.
    if tier.steps.parts or len(tier.steps.readers) > stuck:
        return True
    return any(
        waits_for_promotion(state, step, tier, only_healthy=True)
        for step in tier.steps.held
        if tier.steps.has_own(step)
    )
