"""How one rank of several streams its part of a step to a shared tier: it writes packs, rank 0 commits the step."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AsyncExitStack

from tieredckpt.concurrency import in_thread
from tieredckpt.engine.saving.slower_tiers import OwnTiers
from tieredckpt.engine.state.membership import Streamed
from tieredckpt.engine.tier.index_cache import packs_of
from tieredckpt.engine.tier.tier import Tier
from tieredckpt.engine.tier.written_packs import WrittenPacks
from tieredckpt.format.manifest import StepIndex

__all__ = ["SharedTiers"]


class SharedTiers(OwnTiers):
    """Slower tiers that rank 0 manages for all ranks. Lives on the engine's loop."""

    async def hold_packs(self, tier: Tier, until_committed: AsyncExitStack) -> None:
        """Hold no lock: a commit holds it while it waits for a silent rank, and a save must not wait for that.

        ``tier.packs.streamed_to`` lists the packs that the save refers to, and so keeps them from collection.
        """

    def add_packs(self, tier: Tier, written: WrittenPacks) -> None:
        """See `SlowerTiers.add_packs`; rank 0 alone knows what a shared tier has."""
        if self._state.manages(tier):
            tier.packs.add(written)

    async def commit(self, tier: Tier, index: StepIndex, packs: Mapping[str, int]) -> None:
        """Keep this rank's part, which rank 0 commits with those of the others."""
        referred = await in_thread(packs_of, index.arrays, pool=self._state.pool)
        self._state.membership.streamed[index.record.id] = Streamed(tier, index, referred)
