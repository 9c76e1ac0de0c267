"""Writes a save that RAM cannot hold to slower tiers: the interface, and the version for a process that saves alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import AsyncExitStack
from typing import Protocol

from tieredckpt.engine.keeping.collector import Collector
from tieredckpt.engine.keeping.full_tier import make_room
from tieredckpt.engine.promoting.dedupe import refer_to_intact
from tieredckpt.engine.state.state import State
from tieredckpt.engine.tier import commit_file
from tieredckpt.engine.tier.packs import WrittenPacks
from tieredckpt.engine.tier.tier import Tier
from tieredckpt.format.manifest import StepIndex
from tieredckpt.format.ocdbt import Extent

__all__ = ["OwnTiers", "SlowerTiers", "find_chunks"]


class SlowerTiers(Protocol):
    """What a save asks of the manager of a slower tier; each mode implements it. Lives on the engine's loop."""

    async def make_room(self, tier: Tier, nbytes: int) -> bool:
        """Whether so many bytes fit on the tier, after evictions if needed. Raises `TierUnavailable`."""
        ...

    async def hold_packs(self, tier: Tier, until_committed: AsyncExitStack) -> None:
        """Keep the tier's packs from collection until the stack is closed. Raises `TierUnavailable`."""
        ...

    async def find(self, tier: Tier, sizes: Mapping[bytes, int]) -> dict[bytes, Extent]:
        """Extents of those chunks that the tier has intact; ``sizes`` are the bytes of all chunks, by digest."""
        ...

    def add_packs(self, tier: Tier, written: WrittenPacks) -> None:
        """Record packs that this process has just written."""
        ...

    async def commit(self, tier: Tier, index: StepIndex, packs: Mapping[str, int]) -> None:
        """Commit the step, or this rank's part of it; ``packs`` are the bytes of the packs written for it, by key.

        Raises as `tieredckpt.engine.tier.commit_file.commit`; `Conflict` if packs are gone.
        """
        ...


class OwnTiers:
    """Slower tiers that this process manages itself."""

    def __init__(self, state: State, collector: Collector) -> None:
        self._state = state
        self._collector = collector

    async def make_room(self, tier: Tier, nbytes: int) -> bool:
        """See `SlowerTiers.make_room`."""
        return await make_room(self._state, self._collector, None, tier, nbytes)

    async def hold_packs(self, tier: Tier, until_committed: AsyncExitStack) -> None:
        """See `SlowerTiers.hold_packs`."""
        await until_committed.enter_async_context(tier.packs.guard)
        tier.check_known()

    async def find(self, tier: Tier, sizes: Mapping[bytes, int]) -> dict[bytes, Extent]:
        """See `SlowerTiers.find`."""
        return await find_chunks(self._state, tier, sizes, tier.packs.streamed_to)

    def add_packs(self, tier: Tier, written: WrittenPacks) -> None:
        """See `SlowerTiers.add_packs`."""
        tier.packs.add(written)

    async def commit(self, tier: Tier, index: StepIndex, packs: Mapping[str, int]) -> None:
        """See `SlowerTiers.commit`."""
        await commit_file.commit(tier, index.record, index.arrays)


async def find_chunks(state: State, tier: Tier, sizes: Mapping[bytes, int], noted: set[str]) -> dict[bytes, Extent]:
    """See `SlowerTiers.find`; for the process that manages the tier.

    Adds the packs of the chunks to ``noted`` before a collection can take them. The caller must keep the packs in
    ``noted`` from collection, as `Membership.packs_streamed_to` does.
    """
    noted |= _packs_with(tier, sizes)
    await refer_to_intact(state, tier, None, sizes)
    packs = tier.packs
    found = {digest: packs.index[digest] for digest, nbytes in sizes.items() if packs.has(digest, nbytes)}
    noted |= {extent.path for extent in found.values()}  # of another promotion meanwhile, too
    return found


def _packs_with(tier: Tier, digests: Iterable[bytes]) -> set[str]:
    """The packs that are known to have any of the chunks, or a copy of it."""
    chunks, duplicates = tier.packs.index, tier.packs.duplicates
    known = {chunks[digest].path for digest in digests if digest in chunks}
    return known | {extent.path for digest in duplicates.keys() & digests for extent in duplicates[digest]}
