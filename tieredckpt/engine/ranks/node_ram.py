"""Read access to the RAM of other ranks on this machine: of ranks that run, and of former ones."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Collection, Iterable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path

from tieredckpt.blobs.base import BlobStore
from tieredckpt.blobs.ram.folder import RANK_FOLDER, folders_in
from tieredckpt.blobs.ram.store import RamStore
from tieredckpt.concurrency import in_thread
from tieredckpt.engine.opening.ram import ram_folder
from tieredckpt.engine.opening.scan import scan_tier
from tieredckpt.engine.restoring.source import being_read
from tieredckpt.engine.state.state import Near, State
from tieredckpt.engine.tier import step_index
from tieredckpt.engine.tier.index_cache import unique_extents
from tieredckpt.engine.tier.tier import Tier
from tieredckpt.errors import Corrupt, NotFound, TieredCkptError, TierUnavailable
from tieredckpt.format.manifest import StepId
from tieredckpt.format.ocdbt import Extent

__all__ = ["attached", "folders_of_ranks", "look_into", "near"]

_log = logging.getLogger("tieredckpt")


def folders_of_ranks(state: State, *, but: Collection[int] = ()) -> list[Path]:
    """The RAM folders of this store on this machine, without those of the ranks ``but``. Blocks.

    Raises `TierUnavailable` if no file can be opened now.
    """
    if state.config.ram is None or state.identity.marker is None:
        return []
    top = ram_folder(state)
    skipped = {f"{RANK_FOLDER}{rank}" for rank in but}
    found = [path for path in sorted(folders_in(top)) if path.name.startswith(RANK_FOLDER) and path.name not in skipped]
    return [top, *found] if (top / "slab.json").is_file() else found


async def look_into(state: State, folder: Path) -> Tier | None:
    """Open a RAM folder of another rank to read its steps; None if it has no step of this store."""

    async def connect() -> BlobStore:
        return await asyncio.to_thread(RamStore.attach, folder)

    tier = Tier(state.tiers[0].name, 0, state.tiers[0].config, connect)
    async with AsyncExitStack() as unless_used:
        unless_used.push_async_callback(tier.disconnect)
        try:
            marker = await tier.open()
            if marker is not None and state.identity.marker is not None and marker.store == state.identity.marker.store:
                await scan_tier(tier)
            if tier.steps.held or tier.steps.damaged:
                unless_used.pop_all()
                return tier
        except TieredCkptError as error:
            _log.info("the RAM of another rank at %s cannot be read: %s", folder, error)
    return None


@asynccontextmanager
async def attached(state: State, step: StepId, known: Iterable[Tier] = ()) -> AsyncIterator[list[Tier]]:
    """All RAM on this machine with a part of a step, which stays inside the block; the ``known`` tiers come first."""
    found = [tier for tier in known if tier.in_memory and tier.steps.has_own(step)]
    async with AsyncExitStack() as until_read:
        for folder in await in_thread(folders_of_ranks, state):
            if any(tier.ram is not None and tier.store.location == str(folder) for tier in known):
                continue
            if (tier := await look_into(state, folder)) is not None:
                until_read.push_async_callback(tier.disconnect)
                if step in tier.steps.held:
                    found.append(tier)
        reads = AsyncExitStack()
        await until_read.enter_async_context(reads)
        staying = []
        for tier in found:
            with suppress(TieredCkptError):  # it has just left
                await reads.enter_async_context(being_read(tier, step))
                staying.append(tier)
        yield staying


@asynccontextmanager
async def near(state: State, step: StepId, known: Iterable[Tier] = ()) -> AsyncIterator[Near]:
    """Places of a step's chunks in the RAM of this machine, by digest; they stay valid inside the block."""
    found: dict[bytes, tuple[Tier, Extent]] = {}
    async with attached(state, step, tuple(known)) as folders:
        for tier in folders:
            try:
                index = await step_index.load(tier, step)
            except (Corrupt, NotFound, TierUnavailable) as error:
                _log.warning("%s: a part in RAM cannot be opened: %s", step, error)
                continue
            for digest, extent in unique_extents(index.arrays).items():
                found.setdefault(digest, (tier, extent))
        yield found
