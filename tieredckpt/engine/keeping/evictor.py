"""Evicts steps: deletes the manifest first; in RAM, extents are reused once their last reader has released them."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import suppress

from tieredckpt.concurrency import whole
from tieredckpt.engine.keeping.safety import check_unread, why_kept
from tieredckpt.engine.opening.scan import is_unchanged, look_again
from tieredckpt.engine.state.state import RamOfRanksStep, State
from tieredckpt.engine.tier import commit_file, step_index
from tieredckpt.engine.tier.steps import IndeterminateDelete, Stale
from tieredckpt.engine.tier.tier import Tier
from tieredckpt.errors import Conflict, NoSpace, NotFound, TieredCkptError, TierUnavailable
from tieredckpt.events import StepEvicted
from tieredckpt.format.manifest import StepId

__all__ = ["Evictor"]

_log = logging.getLogger("tieredckpt")


class Evictor:
    """Takes steps out of tiers, one at a time. Lives on the engine's loop.

    Callers choose the steps. `evict` refuses steps that promise 6 keeps. The other methods drop what is no step, or
    cannot be read, and the caller must know that it is so.
    """

    def __init__(self, state: State) -> None:
        self._state = state

    async def evict(self, step: StepId, tier: Tier, *, deleted: bool = False) -> None:
        """Retract one step from one tier that this process manages.

        ``deleted``: a person deletes the step, which promise 6 does not keep then.

        Raises:
            NotFound: the tier does not hold it.
            Conflict: promise 6, or a reader, forbids it.
            TierUnavailable: as `Tier.check_known`, or of the tier.
        """
        if not tier.steps.keeps(step):
            raise NotFound(f"tier {tier.name!r} does not hold {step}")
        tier.check_known()

        def check() -> None:
            if deleted:
                check_unread((step,), tier)
                return
            asked = step in tier.steps.held or step in tier.steps.pinned  # what cannot be read may leave
            if asked and (reason := why_kept(self._state, step, tier)):
                raise Conflict(f"cannot evict: {reason}")

        check()
        tier.steps.leaving.add(step)
        try:
            if tier.in_memory and (of_ranks := self._state.ram_of_ranks.get(step)) is not None:
                await whole(self._take_out(of_ranks, tier))
            elif tier.ram is not None:
                await commit_file.retract_from_ram(tier, tier.ram, step)
            else:
                with suppress(TieredCkptError):  # an unreadable index names no packs
                    tier.packs.mark_used(await step_index.packs(tier, step))
                await self._retract(step, tier, check)
        finally:
            tier.steps.leaving.discard(step)
            if not tier.steps.keeps(step):  # also where a cancellation came too late
                self.tell_gone(step, tier)
            else:
                self._state.changed.notify()  # wakes who waits for its memory, or for it to be gone

    async def _take_out(self, found: RamOfRanksStep, tier: Tier) -> None:
        await found.take_out()
        self._state.ram_of_ranks.pop(found.step, None)
        tier.steps.drop(found.step)

    async def _retract(self, step: StepId, tier: Tier, check: Callable[[], None]) -> None:
        """Retract a step, also if a full device has no room for a lease: the lease then takes the room of the step."""
        lacks_lease = tier.lacks_lease
        if lacks_lease and not await is_unchanged(tier):
            raise TierUnavailable(
                f"tier {tier.name!r} at {tier.store.location}: the device has no room for a lease, and another writer "
                f"has been there; open the store again to read what the tier holds now"
            )
        await commit_file.retract(tier, step, check)
        if lacks_lease and tier.lease is not None:
            with suppress(NoSpace):  # others may have filled what the step took
                await tier.lease.renew()
                # Else what the tier holds is read again, and then the packs of the step may be anybody's.
                tier.lease.taken_over = not await is_unchanged(tier)

    async def try_evict(self, step: StepId, tier: Tier) -> bool:
        """`evict` a step that is held, or is stale, where nothing forbids it; whether it was done."""
        there = step in tier.steps.held or isinstance(tier.steps.damaged.get(step), Stale)
        may_leave = there and step not in tier.steps.leaving and self._state.manages(tier)
        if not may_leave or why_kept(self._state, step, tier):
            return False
        try:
            await self.evict(step, tier)
        except Conflict:
            if why_kept(self._state, step, tier):  # it has become the last good copy meanwhile
                return False
            raise
        return True

    def tell_gone(self, step: StepId, tier: Tier) -> None:
        """Note and tell that a step has left a tier."""
        tombstones = tier.steps.tombstones
        tombstones.add(step)
        if len(tombstones) > sum(len(each.steps.held) for each in self._state.tiers):  # to list all steps takes longer
            tombstones.intersection_update(self._state.records())
        self._state.events.emit(StepEvicted(step.step, step.serial, tier.name))
        self._state.changed.notify()

    async def find_out(self, tier: Tier) -> None:
        """Find out which steps are still there after failed deletions: these are held again, the others are gone.

        A deletion that may come late is repeated: a step that may go at any moment counts as no copy.
        """
        self._expire_deletions(tier)
        for step, error in tuple(tier.steps.damaged.items()):
            if not isinstance(error, IndeterminateDelete):
                continue
            uncertain = tier.steps.indeterminate.get(step)
            there = await step_index.is_committed(tier, step)
            if tier.steps.damaged.get(step) is not error:
                continue  # meanwhile it was deleted once more, or committed anew
            if there and step in tier.steps.deletions:
                try:
                    if not await self._deleted_again(step, tier, error):
                        continue
                except TierUnavailable as again:
                    _log.warning("tier %r: the deletion of %s failed again: %s", tier.name, step, again)
                    if tier.steps.damaged.get(step) is error:  # behind the others, of which each gets its turn
                        tier.steps.damaged[step] = tier.steps.damaged.pop(step)
                    return  # a server that refuses deletions is not asked for every one of them each time
            elif there:
                del tier.steps.damaged[step]
                tier.steps.held[step] = error.held
                self._state.changed.notify()
                continue
            async with tier.steps.turn(step):  # a promotion that comes now may put its index nodes there, or has failed
                if tier.steps.damaged.get(step) is error and tier.steps.indeterminate.get(step) is uncertain:
                    tier.steps.drop(step)
                    self.tell_gone(step, tier)
                    await tier.store.delete(error.held.btree_key)

    def _expire_deletions(self, tier: Tier) -> None:
        """Forget deletions that can no longer come late; quarantine held steps whose deletion still may."""
        for step, since in tuple(tier.steps.deletions.items()):
            # Where nothing stands between here and the store, it is a thread of ours that is late.
            late = time.monotonic() - since < self._state.config.grace if tier.store.traits.remote else tier.hanging
            if not late:
                del tier.steps.deletions[step]
            elif (held := tier.steps.held.get(step)) is not None:
                tier.quarantine(step, IndeterminateDelete(f"tier {tier.name!r}: {step} may be deleted yet", held))

    async def _deleted_again(self, step: StepId, tier: Tier, error: IndeterminateDelete) -> bool:
        """Repeat a deletion, unless the step has become the last good copy; whether that was done.

        Raises as `commit_file.delete_manifest`.
        """
        async with tier.steps.turn(step):
            await tier.confirm_lease(deleting=True)
            if tier.steps.damaged.get(step) is not error or why_kept(self._state, step, tier):
                return False
            await commit_file.delete_manifest(tier, step)
            return True

    async def look_again(self, step: StepId, tier: Tier) -> None:
        """Read a damaged commit once more and apply the result. Raises as a blob store does."""
        if await look_again(tier, step):
            self.tell_gone(step, tier)
        self._state.changed.notify()

    async def drop_part(self, step: StepId, tier: Tier) -> None:
        """Drop this rank's part of a step from RAM, because the step is not or no longer committed."""
        if tier.ram is None or step in tier.steps.leaving or not (step in tier.steps.parts or step in tier.steps.held):
            return
        tier.steps.leaving.add(step)
        try:
            await commit_file.retract_from_ram(tier, tier.ram, step)
        finally:
            tier.steps.leaving.discard(step)
            self._state.changed.notify()

    async def drop_with_others(self, step: StepId, tier: Tier) -> bool:
        """Drop this rank's part of a step that has left the RAM of another; whether it was still there."""
        await self._state.changed.until(lambda: step not in tier.steps.leaving)
        if step not in tier.steps.held:
            return False
        await self.drop_part(step, tier)
        self._state.events.emit(StepEvicted(step.step, step.serial, tier.name))
        return True

    async def drop_unreadable(self, step: StepId, tier: Tier) -> None:
        """Drop a step with a damaged index from RAM; its extents become free when the folder is opened again."""
        await commit_file.retract(tier, step)
        self._state.changed.notify()

    async def reclaim_unread(self, tier: Tier) -> None:
        """Reclaim extents of steps that left RAM, once their last reader has released them."""
        if tier.ram is not None and tier.ram.retracted:
            await whole(tier.ram.reclaim())
