"""Connections: opens the blob store of a tier, checks whose store is there, and lists what it holds."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from tieredckpt.blobs.base import BlobInfo, BlobStore
from tieredckpt.blobs.codecs import CODECS
from tieredckpt.blobs.ram.store import RamStore
from tieredckpt.blobs.wrap import Below, Deadline, Limited, Metered, Pace, Paced, Retrying, mapped
from tieredckpt.concurrency import whole
from tieredckpt.config import StoreConfig, TierConfig
from tieredckpt.config.kinds import exists, kind_of
from tieredckpt.engine.opening.markers import SeenMarker, marker_of, store_of_steps
from tieredckpt.engine.opening.ram import attach_ram, mark_ram, note_owner, open_ram, refuse_other_file_system
from tieredckpt.engine.opening.scan import scan_tier
from tieredckpt.engine.opening.stale import compare_with_slower
from tieredckpt.engine.state.adoption import adopt_late_tier
from tieredckpt.engine.state.state import State
from tieredckpt.engine.tier import marker_file
from tieredckpt.engine.tier.lease import Lease, everything_at_once
from tieredckpt.engine.tier.tier import Tier
from tieredckpt.errors import Conflict, Corrupt, NoSpace, NotFound, TieredCkptError, TierUnavailable
from tieredckpt.events import Events, TierHangs
from tieredckpt.format import layout
from tieredckpt.format.marker import StoreMarker

__all__ = ["connect", "connect_late", "connect_ram", "make_tiers", "move_to_earlier_place", "reopen"]

_log = logging.getLogger("tieredckpt")

_OPERATIONS_IN_FLIGHT = 16
_BYTES_IN_FLIGHT = 1 << 30


def make_tiers(config: StoreConfig, *, read_only: bool, events: Events) -> tuple[tuple[Tier, ...], tuple[Tier, ...]]:
    """Make the tiers of a store, not connected yet: those for exact steps, and those with lossy rules.

    RAM waits for `connect_ram`: the other tiers tell which store it belongs to. ``events`` gets `TierHangs`.
    """
    names = [tier.name for tier in config.tiers]
    connect = partial(_connect, read_only=read_only, events=events)

    def made(of: Sequence[TierConfig]) -> tuple[Tier, ...]:
        return tuple(
            Tier(tier.name, index, tier, partial(connect, tier, set()), place=names.index(tier.name))
            for index, tier in enumerate(of)
        )

    return made(config.exact), made(config.derived)


def connect_ram(state: State, *, sharers: int, folder: Path | None = None) -> None:
    """Make the RAM tier connect to this store's RAM, once the identity of the store is known.

    ``sharers`` counts the ranks that share the memory of this machine; ``folder`` is where an agent found its trainer's
    RAM, which it reads.
    """
    first = state.tiers[0]
    if state.config.ram is None:
        return

    async def connect() -> BlobStore:
        if folder is not None:
            return await asyncio.to_thread(RamStore.attach, folder)
        if state.identity.marker is None:
            raise NotFound(f"tier {first.name!r}: there is no RAM of a store that is not there yet")
        return await (attach_ram(state) if state.read_only else open_ram(state, sharers=sharers))

    first.connect = connect


async def _connect(tier: TierConfig, logged: set[type[Exception]], *, read_only: bool, events: Events) -> BlobStore:
    """Open the store of a tier; ``logged`` as for `mapped`, however often it is opened."""
    with mapped(f"tier {tier.name!r}", logged):
        store = await kind_of(tier).open(tier, read_only=read_only)
    if tier.lossy:
        store = Below(store, layout.DERIVED)
    traits = store.traits
    puts = traits.parallel_puts if traits.remote else 1
    # Puts that are under way together share the link.
    limits = {"base": tier.deadline, "min_bandwidth": tier.min_bandwidth / puts}
    store = Deadline(store, tier.name, **limits, tell=lambda calls: events.emit(TierHangs(tier.name, calls)))
    store = Retrying(store, attempts=tier.retries + 1, logged=logged)
    # With room beside packs, for leases that must not wait for them.
    operations = 2 * puts if traits.remote else _OPERATIONS_IN_FLIGHT
    nbytes = max(_BYTES_IN_FLIGHT, 2 * puts * traits.object_size if traits.remote else 0)
    store = Limited(store, operations=operations, nbytes=nbytes)
    if tier.rate_limit is not None:
        store = Paced(store, Pace(tier.rate_limit))
    return Metered(store)


async def connect(state: State, tier: Tier, seen: SeenMarker | None = None) -> None:
    """Open a tier, check that it belongs to this store and to no other writer, and scan its content.

    ``seen`` is the result of `marker_of` from a moment ago; None if it was not called.

    Raises:
        Conflict: it belongs to another store, or another writer holds it.
        NotFound: there is no RAM of this store, and none to be made.
        TierUnavailable, Corrupt: it cannot be read.
        NoSpace: its device is full; what it holds is known where ``tier.marker`` is set, and can be read.
    """
    if (full := await _connect_unless_full(state, tier, seen)) is not None:
        raise full


async def connect_late(state: State, tier: Tier) -> None:
    """`connect` a tier of an open store, and take up the steps that it has, also if its device is full."""
    full = await _connect_unless_full(state, tier)
    await compare_with_slower(state, tier)
    adopt_late_tier(state, tier)
    if full is not None:
        raise full


async def _connect_unless_full(state: State, tier: Tier, seen: SeenMarker | None = None) -> NoSpace | None:
    """As `connect`; returns the error of a full device if what that holds is known."""
    await refuse_other_file_system(state, tier)
    marker, damaged = await _marker_of_this_store(state, tier, seen)
    writes = not state.read_only and state.manages(tier)
    listed: Sequence[BlobInfo] | None = None
    full: NoSpace | None = None
    if not tier.in_memory:
        try:  # before anything is written or deleted
            listed = await (_take_lease(state, tier) if writes else everything_at_once(tier.store))
        except NoSpace as error:
            full = error
    async with tier.packs.guard:  # a collector that saw half of a scan would take the packs of the rest for dead
        # Without a marker it has no catalogs; without its own, the footers tell its version, which catalogs do not.
        intact, ours = None if damaged else marker, state.identity.marker
        if tier.lease is not None and full is None and tier.lease.taken_over:
            await tier.lease.renew()
            tier.lease.taken_over = False  # all that it holds is read now; who waited for the guard till now must know
        await scan_tier(tier, None if intact is None else intact.store, listed)
        if state.membership.size > 1 and not tier.shared:
            tier.steps.set_apart()
        tier.packs.encoding = CODECS[tier.config.codec]
        known = intact or (ours if writes else None) or marker or ours
        if known is not None and writes and (intact is None or intact.format_version < tier.format_version):
            known = known.at_version(tier.format_version)
            try:  # before the first compressed chunk; earlier versions refuse it
                await marker_file.write(tier.store, known)
            except NoSpace as error:
                if marker is None:  # an empty tier, which is not to be noted as seen
                    raise
                full = error  # the marker there is another one, so the tier is opened again
                tier.packs.encoding = CODECS["none"]  # till then
        tier.marker = known
    state.changed.notify()  # who waits for a step may find it now
    if (ram := tier.ram) is not None:
        await note_owner(state)
        if writes and ram.store.notice and state.membership.size == 1:  # of several, rank 0 says it for all
            _log.warning("%s", ram.store.notice)
    return full


async def _marker_of_this_store(state: State, tier: Tier, seen: SeenMarker | None) -> SeenMarker:
    """The marker of a tier that belongs to this store, or is empty. Raises as `connect`."""
    if seen is None:
        seen = await marker_of(tier)
    elif seen.marker is None:
        seen = SeenMarker(await tier.open())  # another may have come since
    known = state.identity.marker
    if seen.marker is None and known is not None and await move_to_earlier_place(state, tier, {known.store}):
        seen = await marker_of(tier)
    if known is None or seen.marker is None or seen.marker.store == known.store:
        return seen
    writes_ram = tier.ram is not None and tier.ram.slab.writable  # whose folder is called by this store's UUID
    if writes_ram or known.owns(await store_of_steps(tier)):
        return SeenMarker(known, damaged=True)
    if tier.in_memory:
        raise NotFound(f"tier {tier.name!r} at {tier.store.location} holds the steps of another store")
    if state.identity.made_up and not any(other.steps.held for other in state.tiers if not other.in_memory):
        await _adopt(state, seen.marker)
        return seen
    raise Conflict(
        f"tier {tier.name!r} at {tier.store.location} belongs to another store ({seen.marker.store}, this one is "
        f"{known.store}); point the tier to a folder of its own"
    )


async def _take_lease(state: State, tier: Tier) -> Sequence[BlobInfo] | None:
    """Take the lease of a tier to write there, or renew it; returns a listing of the tier, if one request gives it.

    Raises `Conflict`, and `NoSpace` if a full device has no room for the lease, which `Lease.renew` takes later.
    """
    if (lease := tier.lease) is not None:
        await lease.renew()
        return None
    lease = Lease(tier.store, tier.name, state.config.lease_ttl)
    try:
        listed = await lease.acquire()
    except NoSpace:
        tier.lease = lease
        raise
    tier.lease = lease
    return listed


async def reopen(state: State, tier: Tier) -> bool:
    """Open a slower tier again beside its failing blob store, as after its file system was mounted again.

    True if the marker is there: the new blob store has replaced the old one. A folder without a marker may be an empty
    mount point, and is left alone. False for RAM, which nobody mounts: it is made anew. Raises as opening does.
    """
    if tier.in_memory:
        return False
    with mapped(f"tier {tier.name!r}", set()):
        if not await exists(tier.config):
            return False
    return await whole(_reopen(state, tier))


async def _reopen(state: State, tier: Tier) -> bool:
    blobs = await tier.connect()
    try:
        found = await marker_file.read(blobs)
    except (NotFound, Corrupt, TierUnavailable):
        found = None
    except BaseException:
        await blobs.close()
        raise
    if found is None or state.identity.marker is None or found.store != state.identity.marker.store:
        await blobs.close()
        return False
    old, tier.blobs = tier.blobs, blobs
    if tier.lease is not None:
        tier.lease.store = blobs
    if old is not None:
        await old.close()
    return True


async def move_to_earlier_place(state: State, tier: Tier, stores: Collection[str] | None) -> StoreMarker | None:
    """Move a tier to the default place of earlier versions if one of ``stores`` lies there; returns its marker.

    ``stores`` is None if a silent tier may belong to any store.
    """
    earlier = state.config.tiers[tier.place].earlier()
    if tier.derived or earlier is None or tier.config == earlier:
        return None
    connect = partial(_connect, earlier, set(), read_only=state.read_only, events=state.events)
    try:
        blobs = await connect()
    except TierUnavailable as error:
        if stores is None:
            raise
        _log.warning("tier %r: whether the store lies at %s is not known: %s", tier.name, earlier.location, error)
        return None
    try:
        marker = await marker_file.read(blobs)
    except (NotFound, Corrupt):
        marker = None
    except BaseException:
        await blobs.close()
        raise
    if marker is None or (stores is not None and marker.store not in stores):
        await blobs.close()
        if marker is not None and not stores:
            _log.warning(
                "tier %r: a store lies at %s, where versions before put all that named no path, and nothing tells that "
                "it is this one; if it is, let the tier say its path",
                *(tier.name, earlier.location),
            )
        return None
    old = tier.blobs
    tier.config, tier.connect, tier.blobs = earlier, connect, blobs
    if old is not None:
        await old.close()
    _log.info("tier %r: the store lies at %s, where versions before put it", tier.name, earlier.location)
    return marker


async def _adopt(state: State, marker: StoreMarker) -> None:
    """Take the identity of a tier that was silent at start, in place of one that was made up for steps in RAM."""
    state.identity.marker, state.identity.made_up = marker.of_store, False
    for tier in (*state.tiers, *state.derived):
        own = None if tier.marker is None else marker.at_version(tier.marker.format_version)
        if not tier.in_memory and own is not None and tier.marker != own:
            tier.marker = own
            if state.manages(tier):
                with suppress(TieredCkptError):  # it shows again at the next use, and is no failure of this tier
                    await marker_file.write(tier.store, own)
    await mark_ram(state)
