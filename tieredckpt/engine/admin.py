"""Manual operations, which no policy decides: promote, evict, pin, delete, collect, verify."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Sequence
from contextlib import suppress

from tieredckpt.engine.keeping.collector import Collected, Collector
from tieredckpt.engine.keeping.retention import after_commit
from tieredckpt.engine.keeping.safety import check_deletable, check_unpinned, check_unread
from tieredckpt.engine.repairing.repack import collect_on
from tieredckpt.engine.repairing.scrub import scrub
from tieredckpt.engine.repairing.verify import Verified, Verifier, to_verify
from tieredckpt.engine.restoring.lookup import never_read
from tieredckpt.engine.state.adoption import adopt_if_gone
from tieredckpt.engine.state.state import State
from tieredckpt.engine.tier import pin_file
from tieredckpt.engine.tier.tier import Tier
from tieredckpt.errors import Conflict, Invalid, NotFound, TieredCkptError, TierUnavailable
from tieredckpt.format.manifest import StepId

__all__ = ["Admin"]


class Admin:
    """Carries out manual operations: on all tiers of the state, or on some. Lives on the engine's loop.

    ``promote`` copies a step to a tier and gives the bytes written.
    """

    def __init__(
        self,
        state: State,
        collector: Collector,
        promote: Callable[[StepId, Tier], Awaitable[int]],
        tiers: Sequence[Tier] | None = None,
    ) -> None:
        self._state = state
        self._tiers = state.tiers if tiers is None else tiers
        self._collector = collector
        self._promote = promote
        self.derived: dict[str, Admin] = {}
        """By name of the tier, what carries out operations on derived steps."""
        self._guards_deletions = asyncio.Lock()
        self._guards_pins = asyncio.Lock()

    def _of_derived(self, name: str) -> Admin | None:
        return self.derived.get(name) if isinstance(name, str) else None

    async def promote(self, number: int, name: str) -> int:
        """Copy a step to a tier now, whatever its policy says; the bytes written."""
        if (theirs := self._of_derived(name)) is not None:
            return await theirs.promote(number, name)
        self._state.check_writable("promote")
        step, tier = self._state.find(number), self._state.tier(name)
        if tier.in_memory:
            raise Invalid(f"tier {name!r} is RAM: a step gets there by being saved")
        self._check_ours(f"promote to tier {name!r}", self._state.manages(tier))
        return await self._copy(step, tier)

    async def _copy(self, step: StepId, tier: Tier) -> int:
        tier.steps.tombstones.discard(step)
        written = await self._promote(step, tier)
        await after_commit(self._state, self._collector, tier)
        return written

    async def evict(self, number: int, name: str) -> None:
        """See `Evictor.evict`."""
        if (theirs := self._of_derived(name)) is not None:
            await theirs.evict(number, name)
            return
        self._state.check_writable("evict")
        step, tier = self._state.find(number, damaged=True), self._state.tier(name)
        self._check_ours(f"evict from tier {name!r}", self._state.manages(tier))
        if tier.steps.keeps(step):  # else it would never come there, or is leaving already
            tier.steps.tombstones.add(step)
        try:
            await self._collector.evictor.evict(step, tier)
        except BaseException:
            if tier.steps.keeps(step):
                tier.steps.tombstones.discard(step)
            raise
        await self._collector.collect(tier, orphans=False)

    async def pin(self, number: int, name: str | None, *, on: bool) -> str:
        """See `CheckpointStore.pin`."""
        if name is not None and (theirs := self._of_derived(name)) is not None:
            return await theirs.pin(number, name, on=on)
        self._state.check_writable("pin")
        tier = self._state.target if name is None else self._state.tier(name)
        if tier.in_memory:
            raise Invalid(f"tier {tier.name!r} is RAM, where no step stays: pin it on a slower tier")
        self._check_ours(f"pin on tier {tier.name!r}", self._state.manages(tier))
        async with self._guards_pins:  # one that fails takes back its own pin, and no other's
            await (self._pin if on else self._unpin)(number, tier)
        return tier.name

    async def _unpin(self, number: int, tier: Tier) -> None:
        steps = [step for step in tier.steps.pinned if step.step == number]
        if not steps:
            tier.check_known()
            names = [repr(other.name) for other in self._tiers if number in {each.step for each in other.steps.pinned}]
            where = f"; it is pinned on {', '.join(names)}" if names else ""
            raise NotFound(f"step {number} is not pinned on tier {tier.name!r}{where}")
        for step in steps:
            await pin_file.unpin(tier, step)
        await after_commit(self._state, self._collector, tier)

    async def _pin(self, number: int, tier: Tier) -> None:
        step = self._state.find(number)
        if step in self._state.deleting:
            raise Conflict(f"cannot pin: {step} is being deleted")
        was_pinned = step in tier.steps.pinned
        try:
            await pin_file.pin(tier, step)  # first, or retention might take the copy at once
            await self._state.changed.until(lambda: step not in tier.steps.leaving)  # by an eviction under way
            await self._copy(step, tier)
        except BaseException:
            if not was_pinned:
                with suppress(TieredCkptError):
                    await pin_file.unpin(tier, step)
            raise

    async def delete(self, number: int, *, force: bool) -> None:
        """See `CheckpointStore.delete`."""
        state = self._state
        state.check_writable("delete")
        self._check_ours(f"delete step {number}", state.membership.rank == 0)
        try:
            found = state.find(number, damaged=True)
        except NotFound as error:
            if never_read(state):
                raise TierUnavailable(str(error)) from error
            raise
        there = {step for tier in state.tiers for step in (*tier.steps.held, *tier.steps.damaged)}
        known = {step for step in there if step.step == number}
        steps = {found} | {step for step in known if state.on_line(step.serial) and state.on_line(found.serial)}
        if not force:
            check_deletable(state, steps)
        try:
            with state.being_deleted(steps):
                await self.delete_copies(steps, force=force)
        finally:
            for step in steps:
                adopt_if_gone(state, step)

    async def delete_copies(self, steps: Collection[StepId], *, force: bool) -> None:
        """Delete every copy of steps on the tiers that this process manages, nearest first.

        Nearest first, so that a failure leaves the copies that survive most. With ``force``, a tier that does not
        answer keeps its copies.
        """
        async with self._guards_deletions:  # one that fails takes back its tombstones, and no other's
            tiers = [tier for tier in self._tiers if self._state.manages(tier)]
            derived = filter(self._state.manages, map(self._state.any_tier, self.derived))
            for tier in (*tiers, *derived):
                check_unread(steps, tier)
                if not force:
                    check_unpinned(steps, tier)
            for theirs in self.derived.values():  # which would be derived again
                await theirs.delete_copies(steps, force=force)
            tombstones = {tier.name: set(steps) - tier.steps.tombstones for tier in tiers}
            for tier in tiers:
                tier.steps.tombstones.update(steps)  # else a policy may bring back what has left only one tier so far
            try:
                for tier in filter(lambda tier: not tier.in_memory and tier.answers, tiers):
                    async with tier.packs.guard:
                        pass  # a commit under way is seen below; one that comes later sees the tombstone
                for tier in tiers:
                    for step in steps:
                        await self._delete_from(tier, step, force=force)
            except BaseException:
                for tier in tiers:
                    tier.steps.tombstones -= tombstones[tier.name]
                raise
            for tier in tiers:
                await self._collector.collect(tier, orphans=False)

    async def _delete_from(self, tier: Tier, step: StepId, *, force: bool) -> None:
        def left_alone() -> bool:
            return force and not tier.answers

        if step in tier.steps.pinned and tier.answers:
            await pin_file.unpin(tier, step)
        # An eviction under way may fail.
        await self._state.changed.until(lambda: step not in tier.steps.leaving or left_alone())
        if tier.steps.keeps(step) and not left_alone():
            await self._collector.evictor.evict(step, tier, deleted=True)

    def _check_ours(self, what: str, ours: bool) -> None:
        if not ours:
            raise Invalid(f"cannot {what} on rank {self._state.membership.rank}: rank 0 does that for all ranks")

    async def collect(self) -> list[Collected]:
        """Reclaim dead packs on every tier that answers, a full one too, and rewrite those that are mostly dead.

        Raises the first error, after the other tiers were collected.
        """
        self._state.check_writable("collect")
        reclaimed: list[Collected] = []
        errors: list[Exception] = []
        for theirs in self.derived.values():
            try:
                reclaimed += await theirs.collect()
            except Exception as error:
                errors.append(error)
        for tier in self._tiers:
            if not tier.answers:
                continue
            try:
                reclaimed.append(await collect_on(self._state, self._collector, tier))
            except Exception as error:
                errors.append(error)
        if errors:
            raise errors[0]
        return reclaimed

    async def verify(
        self,
        number: int | None,
        serial: int | None,
        name: str | None,
        *,
        repair: bool,
        progress: Callable[[int], None] | None,
    ) -> list[Verified]:
        """Read all of a step on one tier or on every tier that holds it, and repair what is damaged if asked."""
        self._check_repair(repair, name)
        step, tiers = to_verify(self._state, number, serial, name)
        found: list[Verified] = []
        for tier in tiers:
            try:
                found += await self._verify_on(step, tier, repair=repair, progress=progress)
            except NotFound:
                if tier is tiers[-1] and not found:
                    raise  # else it left a tier meanwhile, and what the others hold is told all the same
        return found

    async def _verify_on(
        self, step: StepId, tier: Tier, *, repair: bool, progress: Callable[[int], None] | None
    ) -> list[Verified]:
        if (theirs := self._of_derived(tier.name)) is not None:
            return await theirs.verify(step.step, step.serial, tier.name, repair=repair, progress=progress)
        return [await Verifier(self._state, self._collector, repair, progress).on(step, tier)]

    async def scrub(
        self, name: str | None, *, repair: bool, rate: float | None, progress: Callable[[int], None] | None
    ) -> list[Verified]:
        """See `tieredckpt.engine.repairing.scrub`."""
        self._check_repair(repair, name)
        if name in self.derived:
            return await self.derived[name].scrub(name, repair=repair, rate=rate, progress=progress)
        verifier = Verifier(self._state, self._collector, repair, progress)
        found = await scrub(verifier, self._tiers if name is None else (self._state.tier(name),), rate)
        for each, theirs in self.derived.items() if name is None else ():
            found += await theirs.scrub(each, repair=repair, rate=rate, progress=progress)
        return found

    def _check_repair(self, repair: bool, name: str | None) -> None:
        """Raise `Invalid` if this process cannot repair the tier ``name``, or any."""
        if repair:
            self._state.check_writable("repair")
        if repair and name is not None:
            self._check_ours(f"repair tier {name!r}", self._state.manages(self._state.any_tier(name)))
