"""Retention and collection: deletes steps by policy and for room, and packs that no step needs."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import NamedTuple

from tieredckpt.blobs.base import BlobInfo, Sweep
from tieredckpt.concurrency import together
from tieredckpt.engine import limits
from tieredckpt.engine.keeping.evictor import Evictor
from tieredckpt.engine.keeping.listed_packs import compare_packs, note_impaired
from tieredckpt.engine.keeping.policies import leaving, leaving_when_full, waits_for_promotion
from tieredckpt.engine.opening.scan import step_folders
from tieredckpt.engine.state.state import State
from tieredckpt.engine.tier import commit_file, step_index
from tieredckpt.engine.tier.index_cache import packs_of, unique_extents
from tieredckpt.engine.tier.tier import Tier
from tieredckpt.errors import Corrupt, NoSpace, NotFound, TieredCkptError, TierUnavailable
from tieredckpt.format import layout
from tieredckpt.format.manifest import StepId, StepIndex

__all__ = ["Collected", "Collector"]

_log = logging.getLogger("tieredckpt")

_DELETES_AT_A_TIME = 16
"""Deletions of packs at a time on a remote tier, where each request takes long: a large step has thousands."""
_INDEXES_AT_A_TIME = 8
"""Indexes read at a time on such a tier: a store has thousands of steps."""
_LARGE_INDEX = 8 << 20
"""Bytes of an index that is read alone: it takes several times as much memory."""


@dataclass(frozen=True, slots=True)
class Collected:
    """Result of a collection on one tier."""

    tier: str
    packs: int = 0
    """Packs deleted, those that were rewritten included."""
    nbytes: int = 0
    """Bytes that they took, less what was written anew."""
    files: int = 0
    """Other leftovers: index files and temporary files of writers that died."""


class _Dense(NamedTuple):
    """Packs that are not sparse, and get no sparser as long as none of ``commits`` leaves."""

    commits: frozenset[tuple[StepId, str]]
    """The steps that refer to them, each with the key of its index."""
    packs: frozenset[str]


class Collector:
    """Evicts by policy and for room, and collects. Lives on the engine's loop."""

    def __init__(self, state: State) -> None:
        self._state = state
        self.evictor = Evictor(state)
        """Takes the steps out, also those that somebody names."""
        self._strays: dict[str, dict[str, float]] = {}
        """By tier, the index files that no step is known to use, and since when (epoch seconds)."""
        self._dense: dict[str, _Dense] = {}
        """By tier, what there was when no pack was sparse."""

    # -- by policy, and for room --------------------------------------------------------------------------

    async def apply_retention(self, tier: Tier) -> None:
        """Evict the steps that the tier's policy does not retain.

        A tier with a capacity keeps them until room is needed; one without would grow for ever.
        """
        if tier.capacity is not None or not self._state.collects(tier):
            return
        evicted = [step for step in leaving(self._state, tier) if await self.evictor.try_evict(step, tier)]
        if evicted:
            await self.collect(tier, orphans=False)

    async def evict_unretained(self, tier: Tier) -> None:
        """Evict all steps from RAM that its policy does not retain and that wait for no promotion."""
        await self.evictor.reclaim_unread(tier)
        for step in leaving(self._state, tier):
            if not waits_for_promotion(self._state, step, tier):
                await self.evictor.try_evict(step, tier)

    async def make_room(self, tier: Tier, enough: Callable[[], bool]) -> bool:
        """Evict from a tier until there is room enough; False when nothing more may go.

        Steps that still wait for their promotion stay. Retained steps leave RAM when a slower tier holds them, for the
        slab is a cache; so do a rank's parts of steps that are not committed, once that is decided.
        """
        await self.evictor.reclaim_unread(tier)
        if enough():
            return True
        for step in tuple(tier.steps.parts):
            if step not in self._state.membership.undecided:
                await self.evictor.drop_part(step, tier)
                self._state.membership.part_dropped(step)
        going = leaving_when_full(self._state, tier)
        if not tier.in_memory:
            await self.collect(tier, orphans=False)
            if enough():
                return True
            if tier.steps.damaged.any_packs(limits.in_force.unreadable_commit):
                return False  # what is evicted now would make no room yet
        for step in going:
            if waits_for_promotion(self._state, step, tier) or not await self.evictor.try_evict(step, tier):
                continue
            if not tier.in_memory:
                await self.collect(tier, orphans=False)
            if enough():
                return True
        return False

    async def freed_by(self, steps: Collection[StepId], tier: Tier) -> int:
        """Bytes of the packs of a tier that would be dead without these steps."""
        if tier.steps.damaged.any_packs(limits.in_force.unreadable_commit):
            return 0  # for now they stay
        used = await self._packs_by_step(tier)
        going = {key for step in steps for key in used.get(step, ())}
        live = {key for step, packs in used.items() if step not in steps for key in packs}
        live |= tier.steps.damaged.own_packs().keys() | self._state.membership.packs_streamed_to(tier)
        live |= tier.steps.late_packs()
        return sum(tier.packs.sizes.get(key, 0) for key in going - live)

    async def replace_oldest(self, tier: Tier, enough: Callable[[], bool]) -> bool:
        """Evict unpromoted snapshots, oldest first, until there is room enough; never the last good copy."""
        for step in sorted(tier.steps.held):
            if await self.evictor.try_evict(step, tier) and enough():
                return True
        return enough()

    # -- packs --------------------------------------------------------------------------------------------

    async def collect(self, tier: Tier, *, orphans: bool = True) -> Collected:
        """Delete the packs that no committed step refers to.

        Args:
            tier: to collect on.
            orphans: also delete packs and files that no step was ever known to use, once they are older than
                the store's ``grace``: they may belong to a writer that is still at work.

        Raises:
            TierUnavailable: of the tier; or another writer has committed a step there, and nothing was deleted.
            NoSpace: a full device has no room for a lease.
        """
        await self.evictor.reclaim_unread(tier)
        if not self._state.collects(tier):
            return Collected(tier.name)
        await self.evictor.find_out(tier)  # before its packs are taken for dead
        async with tier.packs.guard:
            if tier.marker is None or not tier.answers:  # it failed meanwhile, and what it holds is not known
                return Collected(tier.name)
            try:
                await tier.confirm_lease()
            except NoSpace as error:
                raise NoSpace(
                    f"tier {tier.name!r}: nothing is collected there, for its device has no room for a lease; free a "
                    f"few KiB there, and collect again ({error})"
                ) from error
            await self._look_at_damaged(tier)
            await self._take_back(tier)
            listed: list[BlobInfo] = []
            if orphans:
                await compare_packs(tier)
                listed = [info async for info in tier.store.list(layout.STEPS)]
                await self._check_known(tier, listed)
            await note_impaired(tier, await self._packs_by_step(tier))
            live = await self._live_packs(tier)
            now = await tier.now() if orphans and tier.packs.orphans else 0.0
            live |= await self._live_packs(tier)
            # Nothing is awaited from here until the dead packs are known: a verification may read a damaged step well.
            own = tier.steps.damaged.own_packs()
            live |= tier.steps.damaged.any_packs(limits.in_force.unreadable_commit)
            live |= self._state.membership.packs_streamed_to(tier) | tier.steps.late_packs()
            ages = {key: now - since for key, since in tier.packs.orphans.items()}
            ages |= {key: time.monotonic() - since for key, since in own.items()}
            dead = [
                key
                for key in tier.packs.sizes
                if key not in live and (key not in ages or (orphans and ages[key] > self._state.config.grace))
            ]
            nbytes = await self._delete_packs(tier, dead)
            files = await self._sweep(tier, listed) if orphans else 0
        self._state.changed.notify()
        return Collected(tier.name, len(dead), nbytes, files)

    async def _look_at_damaged(self, tier: Tier) -> None:
        """Read damaged commits once more before a collection, which would delete the packs that only they name."""
        for step in tuple(tier.steps.damaged):
            if step in tier.steps.damaged:
                try:
                    await self.evictor.look_again(step, tier)
                except TierUnavailable as silence:
                    _log.warning("tier %r: %s could not be read again: %s", tier.name, step, silence)

    async def _take_back(self, tier: Tier) -> None:
        """Undo failed first commits that may have happened all the same, so that their packs can be deleted.

        A commit that may come late is looked for at each collection until the store's ``grace`` is over; the key of its
        index nodes tells it from those of other writers. If the step is held as well, the commit that is there by then
        counts.
        """
        steps, late, grace = tier.steps, tier.steps.commits_come_late, self._state.config.grace
        for step in tuple(steps.indeterminate.keys() - steps.held.keys() - steps.damaged.keys()):
            async with steps.turn(step):
                if step not in steps.held and (uncertain := steps.indeterminate.get(step)) is not None:
                    if not late or await step_index.root_key(tier, step) in uncertain.btree_keys:
                        await commit_file.delete_manifest(tier, step)
                    steps.expire(step, grace)
        for step in tuple(steps.indeterminate.keys() & steps.held.keys()):
            if late and steps.indeterminate[step].age >= grace:
                await self._reread(tier, step)
                steps.expire(step, grace)

    async def _reread(self, tier: Tier, step: StepId) -> None:
        """Find out which of several commits of a step is on the tier."""
        try:
            btree_key = (await step_index.read(tier, step))[2]
        except (Corrupt, NotFound) as error:
            tier.quarantine(step, error)
            return
        if (held := tier.steps.held.get(step)) is not None and held.btree_key != btree_key:
            tier.steps.indexes.forget(step)
            tier.steps.catalogued.forget(step)
            tier.steps.held[step] = replace(held, btree_key=btree_key)

    async def _check_known(self, tier: Tier, listed: Iterable[BlobInfo]) -> None:
        """Raise `TierUnavailable` if another writer has committed a step on the tier; the tier is then read again.

        That writer was taken for dead while its put was under way. Its step is no leftover.
        """
        for step, files in step_folders(listed).items():
            if layout.MANIFEST not in files or tier.steps.may_have(step):
                continue
            async with tier.steps.turn(step):
                try:
                    await tier.store.stat(layout.manifest_key(step.step, step.serial))
                except NotFound:
                    continue  # it was evicted since
                if tier.steps.may_have(step):
                    continue
            error = TierUnavailable(
                f"tier {tier.name!r} at {tier.store.location}: another writer has committed {step} there; what the "
                f"tier holds is read again, and nothing is collected before"
            )
            if tier.lease is not None:
                tier.lease.taken_over = True
            self._state.report(tier, error)
            raise error

    async def _live_packs(self, tier: Tier) -> set[str]:
        live = set[str]().union(*(await self._packs_by_step(tier)).values())
        for key in live:
            tier.packs.orphans.pop(key, None)
        return live

    async def _packs_by_step(self, tier: Tier) -> dict[StepId, frozenset[str]]:
        """The packs of each step that is held or stale, as it is when this returns. Raises as `_read_indexes`."""
        held, known = tier.steps.held, tier.steps.indexes.packs
        asked: set[StepId] = set()
        while unread := held.keys() - known.keys() - asked:  # again for those that were read well meanwhile
            asked |= unread
            await self._read_indexes(tier, unread, lambda index: None)
        return {step: known[step] for step in held if step in known} | tier.steps.damaged.stale()

    async def _read_indexes(self, tier: Tier, steps: Collection[StepId], use: Callable[[StepIndex], None]) -> None:
        """Read the indexes of steps, several at a time of a remote tier, and remember which packs they refer to.

        One that is corrupt is quarantined. Raises as `step_index.load`.
        """
        large = any(tier.steps.indexes.nbytes.get(step, 0) > _LARGE_INDEX for step in steps)
        turns = asyncio.Semaphore(_INDEXES_AT_A_TIME if tier.store.traits.remote and not large else 1)

        async def read(step: StepId) -> None:
            async with turns:
                try:
                    index = await step_index.load(tier, step)
                except NotFound:
                    if tier.steps.keeps(step):  # and is not being evicted, or was meanwhile
                        raise
                except Corrupt as error:
                    _quarantine(tier, step, error)
                else:
                    tier.steps.indexes.packs[step] = packs_of(index.arrays)
                    use(index)

        await together([read(step) for step in steps])

    async def _delete_packs(self, tier: Tier, keys: Iterable[str]) -> int:
        dead = set(keys)
        tier.packs.forget_chunks(dead)  # before the files go, so that no promotion refers to them meanwhile
        freed = 0
        turns = asyncio.Semaphore(_DELETES_AT_A_TIME if tier.store.traits.remote else 1)

        async def delete(key: str) -> None:
            nonlocal freed
            async with turns:
                await tier.confirm_lease()
                await tier.store.delete(key)
            freed += tier.packs.drop(key)

        await together([delete(key) for key in dead])
        return freed

    async def _sweep(self, tier: Tier, listed: Sequence[BlobInfo]) -> int:
        """Delete index files of steps that were never committed or retracted half, and files of torn writes.

        ``listed`` are the files of all steps, as `_check_known` has seen them: what came since may be a step.
        """
        known = {held.btree_key for step, held in tier.steps.held.items() if step not in tier.steps.indeterminate}
        known |= {layout.manifest_key(step.step, step.serial) for step in (*tier.steps.held, *tier.steps.damaged)}
        unsure = {*tier.steps.damaged, *tier.steps.indeterminate}
        uncertain = tier.steps.indeterminate.keys() & tier.steps.held.keys()
        # Of its two commits, one is there by now; where they may come late, both, one after the other.
        for step in () if tier.steps.commits_come_late else uncertain:
            with suppress(Corrupt, NotFound):
                known.add((await step_index.read(tier, step))[2])
                unsure.discard(step)
        strays = {
            info.key: info.modified for info in listed if info.key not in known and not _belongs(info.key, unsure)
        }
        seen = self._strays.get(tier.name, {})
        # Where the store tells no time of change, a stray is as old as we have known it.
        self._strays[tier.name] = {key: modified or seen.get(key, time.time()) for key, modified in strays.items()}
        oldest_kept = await tier.now() - self._state.config.grace if strays else 0.0
        stale = [key for key, since in self._strays[tier.name].items() if since < oldest_kept]
        for key in stale:
            await tier.confirm_lease()
            await tier.store.delete(key)
        torn = await tier.store.sweep(self._state.config.grace) if isinstance(tier.store, Sweep) else 0
        return len(stale) + torn

    async def sparse_packs(self, tier: Tier) -> dict[str, int]:
        """Packs whose live share of bytes is below the store's ``repack_below``, and the live bytes of each."""
        if not self._state.collects(tier):
            return {}
        commits = {(step, held.btree_key) for step, held in tier.steps.held.items()}
        left = tier.steps.held.news(self) - tier.steps.held.keys()
        before = self._dense.pop(tier.name, None)
        if before is None or left or not before.commits <= commits:
            before = _Dense(frozenset(), frozenset())
        live: dict[str, int] = {}
        seen: set[tuple[str, int]] = set()

        def count(index: StepIndex) -> None:
            for extent in unique_extents(index.arrays).values():
                if extent.path not in before.packs and (extent.path, extent.offset) not in seen:
                    seen.add((extent.path, extent.offset))
                    live[extent.path] = live.get(extent.path, 0) + layout.aligned(extent.length)

        # Thousands of indexes are not read again each time.
        await self._read_indexes(tier, [step for step, _ in commits - before.commits], count)
        threshold = self._state.config.repack_below
        sparse = {key: nbytes for key, nbytes in live.items() if nbytes < threshold * tier.packs.sizes.get(key, 0)}
        if not sparse:
            self._dense[tier.name] = _Dense(frozenset(commits), before.packs.union(live))
        return sparse

    async def users_of(self, tier: Tier, packs: set[str]) -> list[StepId]:
        """The steps on a tier that refer to any of the packs."""
        used = await self._packs_by_step(tier)
        return sorted(step for step in used if packs & used[step] and step in tier.steps.held)

    async def forget_packs(self, tier: Tier, packs: set[str]) -> None:
        """Take the packs' chunks out of the dedupe index, so that the next write of them is a new one."""
        async with tier.packs.guard:
            tier.packs.forget_chunks(packs)
            for step in await self.users_of(tier, packs):  # whatever other pack has the chunk too
                with suppress(NotFound):  # evicted meanwhile
                    for digest, extent in unique_extents((await step_index.load(tier, step)).arrays).items():
                        if extent.path in packs:
                            tier.packs.forget(digest)

    async def after_commit(self, tier: Tier) -> None:
        """Apply retention to a tier after a commit there. Failures are logged."""
        try:
            await self.apply_retention(tier)
        except TieredCkptError as error:
            _log.warning("retention on tier %r: %s", tier.name, error)


def _belongs(key: str, steps: Iterable[StepId]) -> bool:
    return any(key.startswith(layout.step_folder(step.step, step.serial)) for step in steps)


def _quarantine(tier: Tier, step: StepId, error: Corrupt) -> None:
    _log.warning("tier %r: %s cannot be read there: %s", tier.name, step, error)
    tier.quarantine(step, error)
