"""How a trainer streams a step that RAM cannot hold to a tier of its agent: it writes the packs, the agent commits.

The agent makes the room, tells which chunks the tier has, and collects nothing there until the commit.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AsyncExitStack, suppress

from tieredckpt.engine.agent import messages as said
from tieredckpt.engine.agent.client import AgentClient
from tieredckpt.engine.state.state import State
from tieredckpt.engine.tier import commit_file
from tieredckpt.engine.tier.tier import Tier
from tieredckpt.errors import TierUnavailable
from tieredckpt.format import layout
from tieredckpt.format.manifest import StepIndex
from tieredckpt.format.ocdbt import Extent

__all__ = ["AgentSpill"]


class AgentSpill:
    """At the trainer: the tiers that its agent manages. Lives on the engine's loop."""

    def __init__(self, state: State, link: AgentClient) -> None:
        self._state = state
        self._link = link

    async def make_room(self, tier: Tier, nbytes: int) -> bool:
        """Whether so many bytes fit on the tier, after evictions where need be. Raises `TierUnavailable`."""
        return await self._link.ask(said.MakeRoom(tier.name, nbytes), bool)

    async def borrow(self, tier: Tier, until_committed: AsyncExitStack) -> None:
        """Have the tier's packs kept as they are until the step is committed, or given up."""
        until_committed.push_async_callback(self._give_back, tier)
        await self._link.ask(said.Lend(tier.name), again=False)

    async def _give_back(self, tier: Tier) -> None:
        with suppress(TierUnavailable):  # an agent that has ended keeps nothing
            await self._link.ask(said.GiveBack(tier.name), again=False)

    async def find(self, tier: Tier, sizes: Mapping[bytes, int]) -> dict[bytes, Extent]:
        """Where those of the chunks lie that the tier has intact."""
        found: list[tuple[bytes, str, int, int]]
        found = await self._link.ask(said.Find(tier.name, dict(sizes)), list[tuple[bytes, str, int, int]], again=False)
        return {digest: Extent(pack, offset, length) for digest, pack, offset, length in found}

    async def commit(self, tier: Tier, index: StepIndex, packs: Mapping[str, int]) -> None:
        """Have a step committed whose packs are written, of that many bytes each.

        Raises as `manifests.commit`; `Conflict` where packs are gone.
        """
        step = index.record.id
        key = layout.btree_key(step.step, step.serial)
        encoded = (await commit_file.encode(tier, index.record, index.arrays, key)).index
        await self._link.ask(said.Commit(tier.name, encoded.manifest, encoded.btree, key, dict(packs)), again=False)
