"""Manual operations, which no policy decides: promote, evict, delete, collect, verify."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection

from tieredckpt.engine.keeping.collector import Collected, Collector
from tieredckpt.engine.keeping.safety import check_deletable, check_unread
from tieredckpt.engine.repairing.repack import collect_on
from tieredckpt.engine.repairing.scrub import scrub
from tieredckpt.engine.repairing.verify import Verified, verify_step
from tieredckpt.engine.state.state import State
from tieredckpt.engine.tier.tier import Tier
from tieredckpt.errors import Invalid
from tieredckpt.format.manifest import StepId

__all__ = ["Admin"]


class Admin:
    """Carries out manual operations. Lives on the engine's loop.

    ``promote`` copies a step to a tier and gives the bytes written.
    """

    def __init__(self, state: State, collector: Collector, promote: Callable[[StepId, Tier], Awaitable[int]]) -> None:
        self._state = state
        self._collector = collector
        self._promote = promote

    async def promote(self, number: int, name: str) -> int:
        """Copy a step to a tier now, whatever its policy says; the bytes written."""
        self._state.check_writable("promote")
        step, tier = self._state.find(number), self._state.tier(name)
        if tier.in_memory:
            raise Invalid(f"tier {name!r} is RAM: a step gets there by being saved")
        self._check_ours(f"promote to tier {name!r}", self._state.manages(tier))
        tier.steps.tombstones.discard(step)
        written = await self._promote(step, tier)
        await self._collector.after_commit(tier)
        return written

    async def evict(self, number: int, name: str) -> None:
        """See `Evictor.evict`."""
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

    async def delete(self, number: int, *, force: bool) -> None:
        """See `CheckpointStore.delete`."""
        state = self._state
        state.check_writable("delete")
        self._check_ours(f"delete step {number}", state.membership.rank == 0)
        found = state.find(number, damaged=True)
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
                state.adopt_if_gone(step)

    async def delete_copies(self, steps: Collection[StepId], *, force: bool) -> None:
        """Delete every copy of steps on the tiers that this process manages, nearest first.

        Nearest first, so that a failure leaves the copies that survive most. With ``force``, a tier that does not
        answer keeps its copies.
        """
        tiers = [tier for tier in self._state.tiers if self._state.manages(tier)]
        for tier in tiers:
            check_unread(steps, tier)
        tombstones = {tier.name: set(steps) - tier.steps.tombstones for tier in tiers}
        for tier in tiers:
            tier.steps.tombstones.update(steps)  # else a policy may bring back what has left only one tier so far
        try:
            for tier in filter(lambda tier: not tier.in_memory and tier.answers, tiers):
                async with tier.packs.guard:
                    pass  # a commit under way is seen below; one that comes later sees the tombstone
            for tier in tiers:
                for step in steps:
                    if tier.steps.keeps(step) and (tier.answers or not force):
                        await self._collector.evictor.evict(step, tier, deleted=True)
        except BaseException:
            for tier in tiers:
                tier.steps.tombstones -= tombstones[tier.name]
            raise
        for tier in tiers:
            await self._collector.collect(tier, orphans=False)

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
        for tier in self._state.tiers:
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
        """Read all of a step on one tier or on every tier that holds it, and mend what is damaged if asked."""
        if repair:
            self._state.check_writable("repair")
        if repair and name is not None:
            self._check_ours(f"repair tier {name!r}", self._state.manages(self._state.tier(name)))
        return await verify_step(self._state, self._collector, number, serial, name, repair=repair, progress=progress)

    async def scrub(
        self, name: str | None, *, repair: bool, rate: float | None, progress: Callable[[int], None] | None
    ) -> list[Verified]:
        """See `tieredckpt.engine.repairing.scrub`."""
        if repair:
            self._state.check_writable("repair")
        if repair and name is not None:
            self._check_ours(f"repair tier {name!r}", self._state.manages(self._state.tier(name)))
        tiers = self._state.tiers if name is None else (self._state.tier(name),)
        return await scrub(self._state, self._collector, tiers, repair=repair, rate=rate, progress=progress)
