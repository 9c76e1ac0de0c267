"""Changes a store's identity by hand: gives a copy its own (`fork`), or continues RAM in an empty folder (`adopt`)."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import chain
from pathlib import Path

from tieredckpt.blobs.ram.find import FoundRam, find_ram
from tieredckpt.blobs.ram.folder import is_store_folder, locked, ram_root
from tieredckpt.blobs.ram.places import places_of
from tieredckpt.concurrency import in_thread
from tieredckpt.config import StoreConfig
from tieredckpt.engine.opening.connect import make_tiers
from tieredckpt.engine.opening.markers import marker_of
from tieredckpt.engine.opening.ram_choice import notes
from tieredckpt.engine.tier import marker_file
from tieredckpt.engine.tier.lease import Lease
from tieredckpt.engine.tier.tier import Tier
from tieredckpt.errors import Conflict, Invalid, NotFound
from tieredckpt.events import Events
from tieredckpt.format import layout
from tieredckpt.format.marker import StoreMarker, encode_marker

__all__ = ["adopt", "fork"]


async def fork(config: StoreConfig) -> tuple[str, str]:
    """Give a store a new identity; its steps stay, and RAM of this machine that notes its tiers follows it.

    Returns the old and the new UUID.

    Raises:
        NotFound: no tier holds a store.
        Conflict: somebody writes to it or to its RAM, or its tiers are of two stores.
        TierUnavailable: a tier does not answer. Call it again to complete what was begun.
    """
    async with _tiers(config) as opened:
        marked = [(tier, marker) for tier, marker in opened if marker is not None]
        if not marked:
            raise NotFound(f"there is no store at {_where(opened)}, so there is nothing to fork")
        places = (await places_of(config)).values()
        mine = [each for each in await _ram(config) if notes([each], places)]
        old = marked[0][1]
        # A fork that was cut off has given some the new identity.
        begun = [each for each in (*(marker for _, marker in marked), *(ram.marker for ram in mine)) if each.ancestors]
        new = next((each for each in begun if any(each.ancestors[0] == marker.store for _, marker in marked)), None)
        if new is not None:
            old = StoreMarker(store=new.ancestors[0])
        else:
            new = old.fork(str(uuid.uuid4()))
        for tier, marker in marked:
            if marker.store not in (old.store, new.store):
                raise Conflict(
                    f"tier {marked[0][0].name!r} is of store {old.store} and tier {tier.name!r} of {marker.store}; "
                    f"fork each folder on its own"
                )
        # RAM first, or the other folder would take it for its own.
        await in_thread(_mark_ram, [each for each in mine if each.store == old.store], new.of_store)
        for tier, marker in marked:
            await marker_file.write(tier.store, new.at_version(marker.format_version))
    return old.store, new.store


async def adopt(config: StoreConfig, store: str | None = None) -> tuple[FoundRam, str]:
    """Mark empty slower tiers as those of a store that has steps in RAM, so that it continues there.

    ``store`` is its UUID; None for that of the RAM that notes one of the tiers. Returns the RAM, and where the tiers
    are.

    Raises:
        NotFound: there is no such RAM.
        Invalid: RAM of several stores notes the tiers.
        Conflict: a tier holds steps of another store, or somebody writes to it.
    """
    found = [each for each in await _ram(config) if each.steps and not each.lost]
    places = (await places_of(config)).values()
    noted = ", ".join(place.location for place in places)
    mine = [each for each in found if (notes([each], places) if store is None else each.store == store)]
    stores = sorted({each.store for each in mine})
    if not stores:
        raise NotFound(
            "no RAM on this machine "
            + (f"is of store {store}" if store else f"notes {noted or 'this place'}")
            + "; `tieredckpt ls --ram` lists what there is"
        )
    async with _tiers(config) as opened:
        if len(stores) > 1:  # all but what the tiers hold already
            stores = [each for each in stores if each not in {marker.store for _, marker in opened if marker}] or stores
        if len(stores) > 1:
            raise Invalid(f"RAM of several stores notes this place; choose one with --ram: {', '.join(stores)}")
        chosen = max((each for each in mine if each.store == stores[0]), key=lambda each: each.steps[-1])
        for tier, marker in opened:
            if marker is not None and marker.store != chosen.store and await _has_steps(tier):
                raise Conflict(
                    f"tier {tier.name!r} at {tier.store.location} holds steps of store {marker.store}; adopt into "
                    f"an empty folder, with `--ram {chosen.store}`"
                )
        for tier, marker in opened:
            if marker is None or marker.store != chosen.store:
                await marker_file.write(tier.store, chosen.marker.at_version(tier.format_version))
        return chosen, _where(opened)


@asynccontextmanager
async def _tiers(config: StoreConfig) -> AsyncIterator[Sequence[tuple[Tier, StoreMarker | None]]]:
    """The slower tiers with their markers, held against other writers meanwhile."""
    opened: list[tuple[Tier, StoreMarker | None]] = []
    async with AsyncExitStack() as until_done:
        for tier in chain(*make_tiers(config, read_only=False, events=Events())):
            if tier.in_memory:
                continue
            until_done.push_async_callback(tier.disconnect)
            opened.append((tier, (await marker_of(tier)).marker))
            lease = Lease(tier.store, tier.name, config.lease_ttl)
            await lease.acquire()
            until_done.push_async_callback(lease.release)
        yield opened


async def _ram(config: StoreConfig) -> list[FoundRam]:
    return await in_thread(find_ram, ram_root(config.ram.path if config.ram is not None else None))


async def _has_steps(tier: Tier) -> bool:
    async for info in tier.store.list(layout.STEPS):
        if info.key.endswith(f"/{layout.MANIFEST}"):
            return True
    return False


def _mark_ram(found: Sequence[FoundRam], marker: StoreMarker) -> None:
    """Write a marker into RAM folders. Blocking. Raises `Conflict`, and changes none, if somebody uses one."""
    with locked([Path(each.folder) for each in found]):
        for each in found:
            new = Path(each.folder, "marker.tmp")
            new.write_bytes(encode_marker(marker))
            new.replace(Path(each.folder, layout.MARKER))
        for top in {path for each in found for path in (Path(each.folder), Path(each.folder).parent)}:
            if is_store_folder(top.name):
                top.rename(top.with_name(marker.store))  # or who opens the other folder would look there


def _where(opened: Sequence[tuple[Tier, StoreMarker | None]]) -> str:
    return ", ".join(tier.store.location for tier, _ in opened)
