"""Collection: deletes packs and files that no step needs."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import chain

from tieredckpt.blobs.base import BlobInfo, Sweep
from tieredckpt.concurrency import together
from tieredckpt.engine import limits
from tieredckpt.engine.keeping.evictor import Evictor
from tieredckpt.engine.keeping.listed_packs import compare_packs, note_impaired
from tieredckpt.engine.keeping.used_packs import packs_by_step, read_indexes, unread
from tieredckpt.engine.opening.scan import step_folders
from tieredckpt.engine.state.state import State
from tieredckpt.engine.tier import commit_file, step_index
from tieredckpt.engine.tier.index_cache import unique_extents
from tieredckpt.engine.tier.tier import Tier
from tieredckpt.errors import Corrupt, NoSpace, NotFound, TierUnavailable
from tieredckpt.format import layout
from tieredckpt.format.manifest import StepId, StepIndex

__all__ = ["Collected", "Collector"]

_log = logging.getLogger("tieredckpt")

_DELETES_AT_A_TIME = 16
"""Deletions of packs at a time on a remote tier, where each request takes long: a large step has thousands."""


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


@dataclass(frozen=True, slots=True)
class _Dense:
    """Packs that are not sparse, and get no sparser as long as none of the steps leaves or is committed anew."""

    steps: frozenset[StepId] = frozenset()
    """Those that refer to them."""
    packs: frozenset[str] = frozenset()


class Collector:
    """Collects what evicted steps and writers that died leave. Lives on the engine's loop."""

    def __init__(self, state: State) -> None:
        self._state = state
        self.evictor = Evictor(state)
        """Takes the steps out, also those that somebody names."""
        self._strays: dict[str, dict[str, float]] = {}
        """By tier, the index files that no step is known to use, and since when (epoch seconds)."""
        self._dense: dict[str, _Dense] = {}
        """By tier, what there was when no pack was sparse."""

    async def freed_by(self, steps: Collection[StepId], tier: Tier) -> int:
        """Bytes of the packs of a tier that would be dead without these steps."""
        if tier.steps.damaged.any_packs(limits.in_force.unreadable_commit):
            return 0  # for now they stay
        used = await packs_by_step(tier)
        if unread(tier, used):
            return 0
        going = set[str]().union(*(used.pop(step, ()) for step in steps))
        return sum(tier.packs.sizes.get(key, 0) for key in going - self._packs_in_use(tier, used, math.inf))

    async def collect(self, tier: Tier, *, orphans: bool = True) -> Collected:
        """Delete the packs that no committed step refers to.

        With ``orphans``, also packs and files that no step was ever known to use, once they are older than the store's
        ``grace``: they may belong to a writer that is still at work.

        Raises:
            TierUnavailable: of the tier; or another writer has committed a step there, and nothing was deleted.
            NoSpace: a full device has no room for a lease.
        """
        await self.evictor.reclaim_unread(tier)
        if not self._state.collects(tier):
            return Collected(tier.name)
        await self.evictor.find_out(tier)  # before its packs are taken for dead
        async with tier.packs.guard:
            if tier.marker is None:  # it failed meanwhile, and what it holds is not known
                return Collected(tier.name)
            try:
                await tier.confirm_lease()
            except NoSpace as error:
                raise NoSpace(
                    f"tier {tier.name!r}: nothing is collected there, for its device has no room for a lease; free a "
                    f"few KiB there, and collect again ({error})"
                ) from error
            await self._look_at_damaged(tier)
            await self._resolve_commits(tier)
            strays: dict[str, float] = {}
            if orphans:
                await compare_packs(tier)
                strays = await self._find_strays(tier)
            used = await packs_by_step(tier)
            await note_impaired(tier, used)
            tier.packs.mark_used(chain.from_iterable(used.values()))
            grace = self._state.config.grace if orphans else math.inf  # else nothing is old enough
            now = await tier.now() if orphans and (strays or tier.packs.orphans) else 0.0
            used = await packs_by_step(tier)  # a verification may have read a damaged step well; now nothing is awaited
            young = {key for key, since in tier.packs.orphans.items() if now - since <= grace}
            dead = (
                set() if unread(tier, used) else tier.packs.sizes.keys() - self._packs_in_use(tier, used, grace) - young
            )
            nbytes = await self._delete_packs(tier, dead)
            old = [key for key, since in strays.items() if now - since > grace]
            files = await self._sweep(tier, old) if orphans else 0
        self._state.changed.notify()
        return Collected(tier.name, len(dead), nbytes, files)

    def _packs_in_use(self, tier: Tier, used: Mapping[StepId, frozenset[str]], grace: float) -> set[str]:
        """The packs that steps use, that damaged steps may use, and those of commits to come.

        ``used`` is `packs_by_step` of the steps that count; for ``grace`` seconds an unreadable step keeps the packs
        that it is known to use.
        """
        damaged = tier.steps.damaged
        return set().union(
            *used.values(),
            damaged.own_packs(grace),
            damaged.any_packs(limits.in_force.unreadable_commit),
            self._state.membership.packs_streamed_to(tier),
            tier.steps.late_packs(),
        )

    async def _look_at_damaged(self, tier: Tier) -> None:
        """Read damaged commits once more before a collection, which would delete the packs that only they name."""
        for step in tuple(tier.steps.damaged):
            if step in tier.steps.damaged:
                try:
                    await self.evictor.look_again(step, tier)
                except TierUnavailable as silence:
                    _log.warning("tier %r: %s could not be read again: %s", tier.name, step, silence)

    async def _resolve_commits(self, tier: Tier) -> None:
        """Resolve failed commits that may have happened: undo first ones, so that their packs can be deleted.

        A commit that may come late is looked for at each collection until the store's ``grace`` is over; the key of its
        index nodes tells it from those of other writers. If the step is held as well, the commit that is there by then
        counts.
        """
        steps, late, grace = tier.steps, tier.steps.commits_come_late, self._state.config.grace
        for step in tuple(steps.indeterminate):
            async with steps.turn(step):
                uncertain = steps.indeterminate.get(step)
                if uncertain is None or step in steps.damaged:
                    continue
                if step in steps.held:
                    if late and uncertain.age < grace:
                        continue
                    if not await self._reread(tier, step):
                        continue
                elif not late or await step_index.root_key(tier, step) in uncertain.btree_keys:
                    await commit_file.delete_manifest(tier, step)
                steps.resolve(step, grace)

    async def _reread(self, tier: Tier, step: StepId) -> bool:
        """Find out which of several commits of a step is on the tier.

        False if that cannot be read, and this process knows the index, as after a repair that has failed: the step is
        restored and promoted by it, and is no good copy.
        """
        try:
            btree_key = (await step_index.read(tier, step))[2]
        except (Corrupt, NotFound) as error:
            if isinstance(error, Corrupt) and step in tier.steps.indexes:
                tier.steps.impair(step, (step.manifest_key,))
                return False
            tier.quarantine(step, error)
            return True
        tier.steps.mend(step, (step.manifest_key,))
        if (held := tier.steps.held.get(step)) is not None and held.btree_key != btree_key:
            tier.steps.indexes.forget(step)
            tier.steps.catalogued.forget(step)
            tier.steps.held[step] = replace(held, btree_key=btree_key)
        return True

    async def _check_known(self, tier: Tier, listed: Iterable[BlobInfo]) -> None:
        """Raise `TierUnavailable` if another writer has committed a step on the tier; the tier is then read again.

        That writer was taken for dead while its put was under way. Its step is no leftover.
        """
        for step, files in step_folders(listed).items():
            if layout.MANIFEST not in files or tier.steps.may_have(step):
                continue
            async with tier.steps.turn(step):
                if tier.steps.may_have(step) or not await step_index.is_committed(tier, step):
                    continue
            error = TierUnavailable(
                f"tier {tier.name!r} at {tier.store.location}: another writer has committed {step} there; what the "
                f"tier holds is read again, and nothing is collected before"
            )
            if tier.lease is not None:
                tier.lease.taken_over = True
            self._state.report(tier, error)
            raise error

    async def _delete_packs(self, tier: Tier, dead: Collection[str]) -> int:
        tier.packs.forget_chunks(dead)  # before the files go, so that no promotion refers to them meanwhile
        freed = 0

        async def delete(key: str) -> None:
            nonlocal freed
            await tier.confirm_lease()
            await tier.store.delete(key)
            freed += tier.packs.drop(key)

        await together(map(delete, dead), _DELETES_AT_A_TIME if tier.store.traits.remote else 1)
        return freed

    async def _find_strays(self, tier: Tier) -> dict[str, float]:
        """The files in folders of steps that no commit refers to, and since when (epoch seconds).

        Steps that were never committed, or retracted half, leave index files. Raises as `_check_known`.
        """
        listed = [info async for info in tier.store.list(layout.STEPS)]
        await self._check_known(tier, listed)
        held, seen = tier.steps.held, self._strays.get(tier.name, {})
        known = {held[step].btree_key for step in held} | {step.manifest_key for step in held}
        unsure = (*tier.steps.damaged, *tier.steps.indeterminate)
        folders = tuple(step.folder for step in unsure)
        # Where the store tells no time of change, a stray is as old as we have known it.
        self._strays[tier.name] = {
            info.key: info.modified or seen.get(info.key, time.time())
            for info in listed
            if info.key not in known and not info.key.startswith(folders)
        }
        return self._strays[tier.name]

    async def _sweep(self, tier: Tier, strays: Collection[str]) -> int:
        """Delete these strays, and files of torn writes; returns how many there were."""
        for key in strays:
            await tier.confirm_lease()
            await tier.store.delete(key)
        torn = await tier.store.sweep(self._state.config.grace) if isinstance(tier.store, Sweep) else 0
        return len(strays) + torn

    async def sparse_packs(self, tier: Tier) -> dict[str, int]:
        """Packs whose live share of bytes is below the store's ``repack_below``, and the live bytes of each."""
        if not self._state.collects(tier):
            return {}
        steps = frozenset(tier.steps.held)
        dense, changed = self._dense.pop(tier.name, _Dense()), tier.steps.held.news(self)
        if not changed.isdisjoint(dense.steps):
            dense = _Dense()
        live: dict[str, int] = {}
        seen: set[tuple[str, int]] = set()

        def count(index: StepIndex) -> None:
            for extent in unique_extents(index.arrays).values():
                if extent.path not in dense.packs and (extent.path, extent.offset) not in seen:
                    seen.add((extent.path, extent.offset))
                    live[extent.path] = live.get(extent.path, 0) + layout.aligned(extent.length)

        await read_indexes(tier, steps - dense.steps, count)  # and not thousands of others again
        threshold = self._state.config.repack_below
        sparse = {key: nbytes for key, nbytes in live.items() if nbytes < threshold * tier.packs.sizes.get(key, 0)}
        if not sparse:
            self._dense[tier.name] = _Dense(steps, dense.packs.union(live))
        return sparse
