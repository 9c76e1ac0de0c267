"""What leaves a tier: steps by policy and for room, packs that no step needs, packs that are mostly dead."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass

from tieredckpt.blobs.base import Sweep
from tieredckpt.blobs.ram import RamStore
from tieredckpt.blobs.settle import in_thread, whole
from tieredckpt.engine import manifests
from tieredckpt.engine.ask import leaving, waits_for_promotion
from tieredckpt.engine.half_deleted import HalfDeleted
from tieredckpt.engine.indexes import unique_extents
from tieredckpt.engine.safety import why_not
from tieredckpt.engine.state import State
from tieredckpt.engine.survey import look_again
from tieredckpt.engine.tier import Tier
from tieredckpt.errors import Conflict, Corrupt, NotFound, TieredCkptError, TierUnavailable
from tieredckpt.events import StepEvicted
from tieredckpt.format import layout
from tieredckpt.format.manifest import StepId

__all__ = ["Collected", "Collector"]

_log = logging.getLogger("tieredckpt")

_PATIENCE = 60.0
"""Seconds for which a commit that cannot be read, and of which nothing is known, keeps all packs there are: so long a
medium may lie, and so long nothing that is evicted makes room."""


@dataclass(frozen=True, slots=True)
class Collected:
    """What a collection reclaimed on one tier."""

    tier: str
    packs: int = 0
    """Packs deleted, those that were rewritten included."""
    nbytes: int = 0
    """Bytes that they took, less what was written anew."""
    files: int = 0
    """Other leftovers: index files and temporary files of writers that died."""


class Collector:
    """Evicts and collects. Lives on the engine's loop."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._strays: dict[str, dict[str, float]] = {}
        """By tier, the index files that no step is known to use, and since when (epoch seconds)."""

    # -- steps --------------------------------------------------------------------------------------------

    async def evict(self, step: StepId, tier: Tier) -> None:
        """Retract one step from one tier.

        Raises:
            NotFound: the tier does not hold it.
            Conflict: promise 6, or a reader, forbids it.
        """
        if not tier.keeps(step):
            raise NotFound(f"tier {tier.name!r} does not hold {step}")
        if not self._state.manages(tier):
            raise Conflict(f"tier {tier.name!r} is shared by all ranks, and rank 0 alone deletes there; ask it there")
        if step in tier.held and (reason := why_not(self._state, step, tier)):
            raise Conflict(f"cannot evict: {reason}; promote it, or a newer step, to another tier first")
        tier.leaving.add(step)
        try:
            if tier.ram is not None:
                await whole(self._evict_from_ram(step, tier, tier.ram))  # half done, it would lose the extents
            else:
                with suppress(TieredCkptError):  # an unreadable index names no packs
                    for key in await tier.packs_of(step):
                        tier.orphans.pop(key, None)  # known to have been used: no grace needed
                await manifests.retract(tier, step)
        finally:
            tier.leaving.discard(step)
            if step not in tier.held and step not in tier.damaged:  # also where a cancellation came too late
                self._gone(step, tier)
            elif step in tier.damaged:
                self._state.changed.beat()  # for whoever finds out whether it is gone

    def _gone(self, step: StepId, tier: Tier) -> None:
        records = self._state.records()
        tier.dismissed = {gone for gone in (*tier.dismissed, step) if gone in records}
        self._state.events.emit(StepEvicted(step.step, step.serial, tier.name))
        self._state.changed.beat()

    async def find_out(self, tier: Tier) -> None:
        """Look which steps are still there whose deletion failed: those are held again, the others are gone."""
        for step, error in tuple(tier.damaged.items()):
            if not isinstance(error, HalfDeleted) or not self._state.manages(tier):
                continue
            try:
                await tier.store.stat(layout.manifest_key(step.step, step.serial))
                there = True
            except NotFound:
                there = False
            if tier.damaged.get(step) is not error:
                continue  # meanwhile it was deleted once more, or committed anew
            if there:
                del tier.damaged[step]
                tier.held[step] = error.held
                self._state.changed.beat()
                continue
            tier.drop(step)
            self._gone(step, tier)
            await tier.store.delete(error.held.btree_key)

    async def look_again(self, step: StepId, tier: Tier) -> None:
        """Read a commit once more that could not be read, and tell what came of it. Raises as a blob store does."""
        if await look_again(tier, step):
            self._gone(step, tier)
        self._state.changed.beat()

    def tell_gone(self, steps: Iterable[StepId], tier: Tier) -> None:
        """Tell of those that a new look at the tier has not found any more."""
        for step in steps:
            if step not in tier.held and step not in tier.damaged:
                self._gone(step, tier)

    async def _evict_from_ram(self, step: StepId, tier: Tier, ram: RamStore) -> None:
        slab_index = tier.slab_index
        assert slab_index is not None
        digests = list(unique_extents((await tier.load_index(step)).arrays)) if tier.has_own(step) else []
        async with tier.turn(step):
            held = tier.held.get(step) or tier.parts.get(step)
            index_key = held.btree_key if held is not None else ""
            unread = await in_thread(ram.retire, layout.manifest_key(step.step, step.serial), index_key)
            btree_key = tier.drop(step)
        tier.unread.append((slab_index, unread, digests))
        await self._reclaim_unread(tier)
        if btree_key:
            await tier.store.delete(btree_key)

    async def let_part_go(self, step: StepId, tier: Tier) -> None:
        """Take this rank's part of a step out of RAM, if it is there, for the step is or becomes none."""
        if tier.ram is None or step in tier.leaving or not (step in tier.parts or step in tier.held):
            return
        tier.leaving.add(step)
        try:
            await whole(self._evict_from_ram(step, tier, tier.ram))
        finally:
            tier.leaving.discard(step)
            self._state.changed.beat()

    async def drop_unreadable(self, step: StepId, tier: Tier) -> None:
        """Take a step out of RAM whose index is damaged; its extents come back when the folder is opened again."""
        assert tier.ram is not None
        await in_thread(tier.ram.retire, layout.manifest_key(step.step, step.serial))
        await manifests.retract(tier, step)
        self._state.changed.beat()

    async def _reclaim_unread(self, tier: Tier) -> None:
        if tier.unread:
            await whole(self._look_who_reads(tier))

    async def _look_who_reads(self, tier: Tier) -> None:
        looked_at, tier.unread[:] = tuple(tier.unread), ()  # so that nobody else gives it back besides
        unread = await in_thread(lambda: [gone() for _, gone, _ in looked_at])
        for each, gone in zip(looked_at, unread, strict=True):
            if gone:
                each[0].drop(each[2])  # not the tier's of today: RAM may have been made anew since
            else:
                tier.unread.append(each)

    async def apply_retention(self, tier: Tier) -> None:
        """Let the steps go that the tier's policy does not retain.

        A tier with a capacity keeps them until room is needed; one without would grow for ever.
        """
        if tier.capacity is not None or not tier.answers or not self._state.manages(tier):
            return
        evicted = [step for step in leaving(self._state, tier) if await self._try_evict(step, tier)]
        if evicted:
            await self.collect(tier, orphans=False)

    async def _try_evict(self, step: StepId, tier: Tier) -> bool:
        if step not in tier.held or step in tier.leaving or not self._state.manages(tier):
            return False
        if why_not(self._state, step, tier):
            return False
        await self.evict(step, tier)
        return True

    async def make_room(self, tier: Tier, enough: Callable[[], bool], *, needed: bool = True) -> bool:
        """Evict from a tier until there is room enough; False when nothing more may go.

        Steps that still wait for their promotion stay. If the room is ``needed``, steps that the policy retains leave
        RAM when a slower tier holds them, for the slab is a cache; so do a rank's parts of what may be no step.
        """
        await self._reclaim_unread(tier)
        if enough():
            return True
        for step in tuple(tier.parts):
            if needed and step not in self._state.undecided:
                await self.let_part_go(step, tier)
        going = leaving(self._state, tier)
        if tier.ram is not None and needed:
            going += [step for step in sorted(tier.held) if step not in going and self._elsewhere(step, tier)]
        if tier.ram is None:
            await self.collect(tier, orphans=False)
            if enough():
                return True
            if tier.damaged.any_packs(_PATIENCE):
                return False  # what is evicted now would make no room yet
        for step in going:
            if waits_for_promotion(self._state, step, tier) or not await self._try_evict(step, tier):
                continue
            if tier.ram is None:
                await self.collect(tier, orphans=False)
            if enough():
                return True
        return False

    def _elsewhere(self, step: StepId, tier: Tier) -> bool:
        return any(step in other.held and other.answers for other in self._state.tiers if other is not tier)

    async def replace_oldest(self, tier: Tier, enough: Callable[[], bool]) -> bool:
        """Evict unpromoted snapshots, oldest first, until there is room enough; never the last good copy."""
        for step in sorted(tier.held):
            if await self._try_evict(step, tier) and enough():
                return True
        return enough()

    # -- packs --------------------------------------------------------------------------------------------

    async def collect(self, tier: Tier, *, orphans: bool = True) -> Collected:
        """Delete the packs that no committed step refers to.

        Args:
            tier: to collect on.
            orphans: also delete packs and files that no step was ever known to use, once they are older than
                the store's ``grace``: they may belong to a writer that is still at work.
        """
        await self._reclaim_unread(tier)
        if tier.ram is not None or not tier.answers or not self._state.manages(tier):
            return Collected(tier.name)
        await self.find_out(tier)  # before its packs are taken for dead
        async with tier.guards_packs:
            if tier.marker is None or not tier.answers:  # it failed meanwhile, and what it holds is not known
                return Collected(tier.name)
            await self._look_at_damaged(tier)
            await self._take_back(tier)
            if orphans:
                await self._find_strays(tier)
            # Of a step that is read well meanwhile, by whoever verifies, either shows what it uses.
            own, any_packs = tier.damaged.own_packs(), tier.damaged.any_packs(_PATIENCE)
            live = await self._live_packs(tier) | any_packs | tier.damaged.any_packs(_PATIENCE)
            live |= self._state.packs_streamed_to(tier)
            kept = tier.orphans | own | tier.damaged.own_packs()
            oldest_kept = time.time() - self._state.config.grace
            dead = [
                key
                for key in tier.packs
                if key not in live and (key not in kept or (orphans and kept[key] < oldest_kept))
            ]
            nbytes = await self._delete_packs(tier, dead)
            files = await self._sweep(tier, oldest_kept) if orphans else 0
        self._state.changed.beat()
        return Collected(tier.name, len(dead), nbytes, files)

    async def _look_at_damaged(self, tier: Tier) -> None:
        """Read commits once more that could not be read: their packs would go as what no step is known to use."""
        for step in tuple(tier.damaged):
            if step in tier.damaged:
                try:
                    await self.look_again(step, tier)
                except TierUnavailable as silence:
                    _log.warning("tier %r: %s could not be read again: %s", tier.name, step, silence)

    async def _take_back(self, tier: Tier) -> None:
        """Undo first commits that failed, and may be there all the same: no step is held by their packs."""
        for step in tuple(tier.doubtful - tier.held.keys() - tier.damaged.keys()):
            await tier.store.delete(layout.manifest_key(step.step, step.serial))
            tier.doubtful.discard(step)

    async def _find_strays(self, tier: Tier) -> None:
        """Get to know packs whose put failed after it had happened, and those of other writers."""
        async for info in tier.store.list(layout.PACKS):
            if info.key not in tier.packs and layout.parse_pack_key(info.key) is not None:
                tier.packs[info.key] = info.size
                tier.unlisted.add(info.key)
                tier.orphans[info.key] = info.modified or time.time()

    async def _live_packs(self, tier: Tier) -> set[str]:
        live: set[str] = set()
        for packs in (await self._packs_by_step(tier)).values():
            live |= packs
        for key in live:
            tier.orphans.pop(key, None)
        return live

    async def _packs_by_step(self, tier: Tier) -> dict[StepId, frozenset[str]]:
        found = {}
        for step in tuple(tier.held):
            try:
                found[step] = await tier.packs_of(step)
            except NotFound:
                if step in tier.held:  # and was not evicted meanwhile
                    raise
            except Corrupt as error:
                _condemn(tier, step, error)
        return found

    async def _delete_packs(self, tier: Tier, keys: Iterable[str]) -> int:
        dead = set(keys)
        for digest in tier.chunks.in_packs(dead):
            tier.forget(digest)  # before the file goes, so that no promotion refers to it meanwhile
        freed = 0
        for key in dead:
            await tier.store.delete(key)
            tier.orphans.pop(key, None)
            tier.unlisted.discard(key)
            freed += tier.packs.pop(key)
        return freed

    async def _sweep(self, tier: Tier, oldest_kept: float) -> int:
        """Delete index files of steps that were never committed or retracted half, and files of torn writes."""
        known = {held.btree_key for step, held in tier.held.items() if step not in tier.doubtful}
        known |= {layout.manifest_key(step.step, step.serial) for step in (*tier.held, *tier.damaged)}
        unsure = {*tier.damaged, *tier.doubtful}
        for step in tier.doubtful & tier.held.keys():  # of its two commits, one is there by now
            with suppress(Corrupt, NotFound):
                known.add((await tier.read_index(step))[2])
                unsure.discard(step)
        strays = {
            info.key: info.modified
            async for info in tier.store.list(layout.STEPS)
            if info.key not in known and not _belongs(info.key, unsure)
        }
        seen = self._strays.get(tier.name, {})
        # Where the store tells no time of change, a stray is as old as we have known it.
        self._strays[tier.name] = {key: modified or seen.get(key, time.time()) for key, modified in strays.items()}
        stale = [key for key, since in self._strays[tier.name].items() if since < oldest_kept]
        for key in stale:
            await tier.store.delete(key)
        torn = await tier.store.sweep(self._state.config.grace) if isinstance(tier.store, Sweep) else 0
        return len(stale) + torn

    async def sparse_packs(self, tier: Tier) -> set[str]:
        """Packs whose live share of bytes is below the store's ``repack_below``."""
        if tier.ram is not None or not tier.answers or not self._state.manages(tier):
            return set()
        live: dict[str, int] = {}
        seen: set[tuple[str, int]] = set()
        for step in tuple(tier.held):
            try:
                index = await tier.load_index(step)
            except NotFound:
                continue  # evicted meanwhile
            except Corrupt as error:
                _condemn(tier, step, error)
                continue
            for extent in unique_extents(index.arrays).values():
                if (extent.path, extent.offset) not in seen:
                    seen.add((extent.path, extent.offset))
                    live[extent.path] = live.get(extent.path, 0) + extent.length
            await asyncio.sleep(0)
        threshold = self._state.config.repack_below
        return {key for key, nbytes in live.items() if nbytes < threshold * tier.packs.get(key, 0)}

    async def users_of(self, tier: Tier, packs: set[str]) -> list[StepId]:
        """The steps on a tier that refer to any of the packs."""
        return sorted(step for step, used in (await self._packs_by_step(tier)).items() if packs & used)

    async def forget_packs(self, tier: Tier, packs: set[str]) -> None:
        """Take the packs' chunks out of the dedupe index, so that the next write of them is a new one."""
        async with tier.guards_packs:
            for digest in tier.chunks.in_packs(packs):
                tier.forget(digest)
            for step in await self.users_of(tier, packs):  # whatever other pack has the chunk too
                with suppress(NotFound):  # evicted meanwhile
                    for digest, extent in unique_extents((await tier.load_index(step)).arrays).items():
                        if extent.path in packs:
                            tier.forget(digest)

    async def settle(self, tier: Tier) -> None:
        """After a commit on a tier: retention there, and in RAM what waited for it. Failures are the tier's own."""
        try:
            await self.apply_retention(tier)
        except TieredCkptError as error:
            _log.warning("retention on tier %r: %s", tier.name, error)


def _belongs(key: str, steps: Iterable[StepId]) -> bool:
    return any(key.startswith(layout.step_folder(step.step, step.serial)) for step in steps)


def _condemn(tier: Tier, step: StepId, error: Corrupt) -> None:
    _log.warning("tier %r: %s cannot be read there: %s", tier.name, step, error)
    tier.condemn(step, error)
