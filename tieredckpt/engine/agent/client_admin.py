"""Manual operations beside an agent: this process carries out those on RAM, the agent all others."""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import suppress

from tieredckpt.engine.admin import Admin
from tieredckpt.engine.agent import messages
from tieredckpt.engine.agent.client import AgentClient
from tieredckpt.engine.keeping.collector import Collected, Collector
from tieredckpt.engine.keeping.safety import check_unread
from tieredckpt.engine.repairing.verify import Verified
from tieredckpt.engine.state.state import State
from tieredckpt.engine.tier.tier import Tier
from tieredckpt.errors import Invalid, NotFound, TierUnavailable
from tieredckpt.format.manifest import StepId

__all__ = ["AgentAdmin"]


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

    async def verify(
        self,
        number: int | None,
        serial: int | None,
        name: str | None,
        *,
        repair: bool,
        progress: Callable[[int], None] | None,
    ) -> list[Verified]:
        """See `Admin.verify`."""
        derived = {each.target.name: each for each in self._state.derivations}
        state = derived.get(name or "", self._state)
        step = state.find(number, serial, damaged=number is not None)
        tiers = self._state.every_tier if name is None else (self._state.any_tier(name),)
        holding = [tier.name for tier in tiers if step in tier.steps.held or step in tier.steps.damaged]
        if not holding:
            raise NotFound(f"{step} is not on {'any tier' if name is None else f'tier {name!r}'}")
        found: list[Verified] = []
        for each in holding:
            if self._is_ours(each):
                found += await super().verify(step.step, step.serial, each, repair=repair, progress=progress)
            else:
                operation = messages.Verify(step.step, step.serial, each, repair)
                found += await self._link.ask(operation, list[Verified], progress=progress)
        return found

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
