"""The mode of a trainer whose agent promotes: slower tiers are the agent's, RAM is the trainer's."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Mapping
from contextlib import AsyncExitStack, suppress

from tieredckpt.concurrency import whole
from tieredckpt.engine.admin import Admin
from tieredckpt.engine.agent import messages
from tieredckpt.engine.agent.client import AgentClient
from tieredckpt.engine.agent.messages import Flush, GiveWay, Reach
from tieredckpt.engine.keeping.collector import Collected, Collector
from tieredckpt.engine.keeping.safety import check_unread
from tieredckpt.engine.mode.alone import Alone, Changed
from tieredckpt.engine.repairing.verify import Verified
from tieredckpt.engine.saving.slower_tiers import SlowerTiers
from tieredckpt.engine.state.adoption import adopt_newest
from tieredckpt.engine.state.state import State
from tieredckpt.engine.tier import commit_file
from tieredckpt.engine.tier.packs import WrittenPacks
from tieredckpt.engine.tier.tier import Tier
from tieredckpt.errors import Conflict, Invalid, TierUnavailable
from tieredckpt.format.manifest import StepId, StepIndex
from tieredckpt.format.ocdbt import Extent

__all__ = ["BesideAgent"]


class AgentTiers:
    """Slower tiers that the agent manages, as its trainer sees them. Lives on the engine's loop."""

    def __init__(self, link: AgentClient) -> None:
        self._link = link

    async def make_room(self, tier: Tier, nbytes: int) -> bool:
        """See `SlowerTiers.make_room`."""
        return await self._link.ask(messages.MakeRoom(tier.name, nbytes), bool)

    async def hold_packs(self, tier: Tier, until_committed: AsyncExitStack) -> None:
        """See `SlowerTiers.hold_packs`."""
        until_committed.push_async_callback(self._give_back, tier)
        await self._link.ask(messages.Lend(tier.name), again=False)

    async def _give_back(self, tier: Tier) -> None:
        with suppress(TierUnavailable):  # an agent that has ended keeps nothing
            await whole(self._link.ask(messages.GiveBack(tier.name), again=False))  # else it stays lent

    async def find(self, tier: Tier, sizes: Mapping[bytes, int]) -> dict[bytes, Extent]:
        """See `SlowerTiers.find`."""
        found: list[tuple[bytes, str, int, int]]
        found = await self._link.ask(
            messages.Find(tier.name, dict(sizes)), list[tuple[bytes, str, int, int]], again=False
        )
        return {digest: Extent(pack, offset, length) for digest, pack, offset, length in found}

    def add_packs(self, tier: Tier, written: WrittenPacks) -> None:
        """Record nothing: the agent learns of the packs by the commit."""

    async def commit(self, tier: Tier, index: StepIndex, packs: Mapping[str, int]) -> None:
        """See `SlowerTiers.commit`."""
        key = index.record.id.first_btree_key
        encoded = (await commit_file.encode(tier, index.record, index.arrays, key)).index
        await self._link.ask(messages.Commit(tier.name, encoded.manifest, encoded.btree, key, dict(packs)), again=False)


async def _nobody(step: StepId, tier: Tier) -> int:
    raise Invalid(f"{step} is promoted to tier {tier.name!r} by the agent alone")


class AgentAdmin(Admin):
    """Sends operations on slower tiers to the agent."""

    def __init__(self, state: State, collector: Collector, link: AgentClient) -> None:
        super().__init__(state, collector, _nobody)
        self._link = link

    async def promote(self, number: int, name: str) -> int:
        """See `Admin.promote`."""
        if self._is_ours(name):
            return await super().promote(number, name)
        return await self._link.ask(messages.Promote(number, name), int)

    async def evict(self, number: int, name: str) -> None:
        """See `Admin.evict`."""
        if self._is_ours(name):
            await super().evict(number, name)
        else:
            await self._link.ask(messages.Evict(number, name), again=False)

    async def pin(self, number: int, name: str | None, *, on: bool) -> str:
        """See `Admin.pin`."""
        if on and any(step.step == number for step in self._state.deleting):  # the agent is done, and RAM has it yet
            raise Conflict(f"cannot pin: step {number} is being deleted")
        return await self._link.ask(messages.Pin(number, name, on), str, again=on)

    async def delete_copies(self, steps: Collection[StepId], *, force: bool) -> None:
        """See `Admin.delete_copies`; the agent is first, for it would promote again what RAM still has."""
        for tier in filter(self._state.manages, self._state.tiers):
            check_unread(steps, tier)
        with suppress(*([TierUnavailable] if force else [])):  # then there is no agent, which could promote them again
            await self._link.ask(messages.Delete(tuple(steps), force))
        await super().delete_copies(steps, force=force)

    async def collect(self) -> list[Collected]:
        """See `Admin.collect`."""
        mine = [each for each in await super().collect() if self._is_ours(each.tier)]
        theirs: list[Collected] = await self._link.ask(messages.Collect(), list[Collected])
        return mine + theirs

    def _check_repair(self, repair: bool, name: str | None) -> None:
        """Check nothing: the agent repairs its tiers."""

    async def _verify_on(
        self, step: StepId, tier: Tier, *, repair: bool, progress: Callable[[int], None] | None
    ) -> list[Verified]:
        if self._is_ours(tier.name):
            return await super()._verify_on(step, tier, repair=repair, progress=progress)
        operation = messages.Verify(step.step, step.serial, tier.name, repair)
        return await self._link.ask(operation, list[Verified], progress=progress)

    async def scrub(
        self, name: str | None, *, repair: bool, rate: float | None, progress: Callable[[int], None] | None
    ) -> list[Verified]:
        """See `tieredckpt.engine.repairing.scrub`."""
        found: list[Verified] = []
        for tier in self._state.every_tier if name is None else (self._state.any_tier(name),):
            if self._is_ours(tier.name):
                found += await super().scrub(tier.name, repair=repair, rate=rate, progress=progress)
            else:
                operation = messages.Scrub(tier.name, repair, rate)
                found += await self._link.ask(operation, list[Verified], progress=progress)
        return sorted(found, key=lambda each: (each.id is None, each.id or StepId(0, 0)))

    def _is_ours(self, name: str) -> bool:
        return self._state.manages(self._state.any_tier(name))


class BesideAgent(Alone):
    """A trainer with an agent, see `Alone`; `link` asks the agent for work on its tiers."""

    def __init__(self, state: State, collector: Collector) -> None:
        self.link = AgentClient(state)
        self.repair_elsewhere = self.link.repair
        super().__init__(state, collector)

    def _make_admin(self) -> Admin:
        return AgentAdmin(self.state, self.collector, self.link)

    def _make_slower_tiers(self) -> SlowerTiers:
        return AgentTiers(self.link)

    async def open(self, open_tiers: Callable[[], Awaitable[None]]) -> None:
        await open_tiers()
        await self.ram_of_ranks.look()
        await self.link.open()
        adopt_newest(self.state, self.link.dead)

    async def reopened(self) -> None:
        await self.link.listen_anew()

    async def leave(self, *, done: bool, in_order: bool) -> None:
        await whole(self.link.close(done=done))

    async def close(self, *, may_remove: Callable[[], bool]) -> None:
        await self.link.close(done=False)

    async def give_way(self, step: StepId, name: str) -> None:
        await self.link.ask(GiveWay(step, name))

    async def reached(self, step: StepId, name: str, wait: Callable[[Changed | None], Awaitable[None]]) -> None:
        if self.state.tier(name) is self.state.tiers[0]:
            await wait(None)
        else:
            await self.link.ask(Reach(step, name))

    async def drained(self) -> None:
        await self.link.ask(Flush())
