"""How a trainer streams a step that RAM cannot hold to a tier of its agent: it writes the packs, the agent commits.

The agent makes the room, tells which chunks the tier has, and collects nothing there until the commit.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AsyncExitStack, suppress

from tieredckpt.concurrency import in_thread
from tieredckpt.engine.agent import messages as said
from tieredckpt.engine.agent.client import Link
from tieredckpt.engine.state.state import State
from tieredckpt.engine.tier.tier import Tier
from tieredckpt.errors import TierUnavailable
from tieredckpt.format import layout
from tieredckpt.format.manifest import StepIndex, encode_step
from tieredckpt.format.ocdbt import Extent

__all__ = ["AgentsTiers"]


class AgentsTiers:
    """At the trainer: the tiers that its agent manages. Lives on the engine's loop."""

    def __init__(self, state: State, link: Link) -> None:
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
        tier.chunks.clear()  # nothing here hears of what becomes of them
        tier.packs.clear()
        with suppress(TierUnavailable):  # an agent that has ended keeps nothing
            await self._link.ask(said.GiveBack(tier.name), again=False)

    async def find(self, tier: Tier, sizes: Mapping[bytes, int]) -> None:
        """Know of those chunks which the tier has intact."""
        unknown = {digest: nbytes for digest, nbytes in sizes.items() if digest not in tier.chunks}
        found: list[tuple[bytes, str, int, int]]
        found = await self._link.ask(said.Find(tier.name, unknown), list[tuple[bytes, str, int, int]], again=False)
        tier.chunks.update({digest: Extent(pack, offset, length) for digest, pack, offset, length in found})

    async def commit(self, tier: Tier, index: StepIndex) -> None:
        """Have a step committed whose packs are written.

        Raises as `manifests.commit`; `Conflict` where packs are gone.
        """
        step = index.record.id
        key = layout.btree_key(step.step, step.serial)
        encoded = await in_thread(_encode, index, key, pool=self._state.pool)
        await self._link.ask(said.Commit(tier.name, *encoded, key, dict(tier.packs)), again=False)


def _encode(index: StepIndex, key: str) -> tuple[bytes, bytes]:
    encoded = encode_step(index.record, index.arrays, btree_path=key, checksum=True)
    return encoded.manifest, encoded.btree
