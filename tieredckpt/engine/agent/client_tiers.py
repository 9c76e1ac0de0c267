"""Streams a step that RAM cannot hold to a tier of the agent: the trainer writes packs, the agent commits.

The agent makes room, says which chunks the tier has, and collects nothing there until the commit.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AsyncExitStack, suppress

from tieredckpt.engine.agent import messages
from tieredckpt.engine.agent.client import AgentClient
from tieredckpt.engine.tier import commit_file
from tieredckpt.engine.tier.tier import Tier
from tieredckpt.engine.tier.written_packs import WrittenPacks
from tieredckpt.errors import TierUnavailable
from tieredckpt.format import layout
from tieredckpt.format.manifest import StepIndex
from tieredckpt.format.ocdbt import Extent

__all__ = ["AgentTiers"]


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
            await self._link.ask(messages.GiveBack(tier.name), again=False)

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
        step = index.record.id
        key = layout.btree_key(step.step, step.serial)
        encoded = (await commit_file.encode(tier, index.record, index.arrays, key)).index
        await self._link.ask(messages.Commit(tier.name, encoded.manifest, encoded.btree, key, dict(packs)), again=False)
