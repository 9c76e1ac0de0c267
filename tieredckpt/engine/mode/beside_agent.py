"""The mode of a trainer whose agent promotes: slower tiers are the agent's, RAM is the trainer's."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from tieredckpt.concurrency import whole
from tieredckpt.engine.admin import Admin
from tieredckpt.engine.agent.client import AgentClient
from tieredckpt.engine.agent.client_admin import AgentAdmin
from tieredckpt.engine.agent.client_tiers import AgentTiers
from tieredckpt.engine.agent.messages import GiveWay
from tieredckpt.engine.keeping.collector import Collector
from tieredckpt.engine.mode.alone import Alone, Changed
from tieredckpt.engine.ranks.restore.read_only_ram import open_read_only_ram
from tieredckpt.engine.saving.slower_tiers import SlowerTiers
from tieredckpt.engine.state.adoption import adopt_newest
from tieredckpt.engine.state.state import State
from tieredckpt.format.manifest import StepId

__all__ = ["BesideAgent"]


class BesideAgent(Alone):
    """See `Alone`; `link` asks the agent for work on its tiers."""

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
        await open_read_only_ram(self.state)
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
            await self.link.reached(step, name)

    async def drained(self) -> None:
        await self.link.flush()
