"""From a tier's configuration to its blob store, and from a store's tiers to one identity."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

from tieredckpt.blobs.base import BlobStore, Survives
from tieredckpt.blobs.posix import PosixStore
from tieredckpt.blobs.ram import RANK_FOLDER, RamStore, shared_memory_root
from tieredckpt.blobs.settle import in_thread, left_behind_after, whole
from tieredckpt.blobs.wrap import Deadline, Limited, Metered, Paced, Retrying
from tieredckpt.config import ChfsTier, KvstoreTier, PosixTier, RamTier, StoreConfig, TierConfig
from tieredckpt.engine.forks import drop_left_behind
from tieredckpt.engine.identity import agreed, marker_of, store_of_steps
from tieredckpt.engine.lease import Lease
from tieredckpt.engine.state import State
from tieredckpt.engine.survey import survey
from tieredckpt.engine.tier import MARKER_MAX, Tier
from tieredckpt.errors import Conflict, Corrupt, Invalid, NotFound, TieredCkptError, TierUnavailable
from tieredckpt.feasible import doubtful
from tieredckpt.format import layout
from tieredckpt.format.manifest import StoreMarker, decode_marker
from tieredckpt.settings import explain
from tieredckpt.units import format_size

__all__ = ["connect", "identify", "make_tiers", "open_slower", "ram_folder", "reopen"]

_log = logging.getLogger("tieredckpt")

_OPERATIONS_IN_FLIGHT = 16
_BYTES_IN_FLIGHT = 1 << 30


def make_tiers(
    config: StoreConfig, *, read_only: bool, attach: bool = False, rank: int | None = None, sharers: int = 1
) -> tuple[Tier, ...]:
    """The tiers of a store, not connected yet.

    Args:
        config: of the store.
        read_only: to be looked at only.
        attach: RAM alone is to be looked at.
        rank: whose RAM it is, where there are several.
        sharers: how many ranks share the memory of this machine.
    """
    return tuple(
        Tier(tier.name, index, tier, _connector(config, tier, read_only, attach, rank, sharers))
        for index, tier in enumerate(config.tiers)
    )


def ram_folder(config: StoreConfig, tier: RamTier) -> Path:
    """Where the RAM tier is; of several ranks, each has a folder in it."""
    return tier.path or shared_memory_root() / config.identity


def _connector(
    config: StoreConfig, tier: TierConfig, read_only: bool, attach: bool, rank: int | None, sharers: int
) -> Callable[[], Awaitable[BlobStore]]:
    async def connect_ram() -> BlobStore:
        assert isinstance(tier, RamTier)
        folder = ram_folder(config, tier)
        if rank is not None:
            folder /= f"{RANK_FOLDER}{rank}"
        if read_only or attach:
            return await asyncio.to_thread(RamStore.attach, folder)
        capacity = tier.capacity if isinstance(tier.capacity, int) else None
        # What each rank keeps for others takes as much again for every replica.
        shares = sharers * tier.replicas if rank is not None else 1
        return await in_thread(partial(RamStore.open, folder, capacity, sharers=shares))

    async def connect_slower() -> BlobStore:
        if read_only and isinstance(tier, PosixTier) and not await _is_there(tier):
            raise NotFound(f"tier {tier.name!r}: there is no folder {tier.path}")  # nobody makes one to look at it
        store: BlobStore = await open_slower(tier)
        store = Deadline(store, tier.name, base=tier.deadline, min_bandwidth=tier.min_bandwidth)
        store = Retrying(store, attempts=tier.retries + 1)
        store = Limited(store, operations=_OPERATIONS_IN_FLIGHT, nbytes=_BYTES_IN_FLIGHT)
        if tier.rate_limit is not None:
            store = Paced(store, rate=tier.rate_limit)
        return Metered(store)

    return connect_ram if isinstance(tier, RamTier) else connect_slower


async def open_slower(tier: TierConfig) -> BlobStore:
    """The bare blob store of a tier other than RAM, without the wrappers that retry, limit and time."""
    if isinstance(tier, PosixTier):
        make = partial(
            PosixStore,
            tier.path,
            survives=Survives.named(tier.survives),
            fsync=tier.fsync,
            direct=tier.direct,
            threads=tier.threads,
        )
        return await left_behind_after(tier.deadline, tier.name, f"opening {tier.path}", make)
    if isinstance(tier, ChfsTier):
        from tieredckpt.blobs.chfs.choice import open_chfs

        return await open_chfs(tier, survives=Survives.named(tier.survives))
    from tieredckpt.blobs.kvstore import KvStoreBlobs  # loads tensorstore, which other tiers do without

    assert isinstance(tier, KvstoreTier)
    return await KvStoreBlobs.open(tier.spec, survives=None if tier.survives is None else Survives.named(tier.survives))


async def _is_there(tier: PosixTier) -> bool:
    return await left_behind_after(tier.deadline, tier.name, f"looking for {tier.path}", tier.path.is_dir)


async def connect(state: State, tier: Tier) -> None:
    """Open a tier, see that it belongs to this store and to no other writer, and learn what it holds.

    Raises:
        Conflict: it belongs to another store, or another writer holds it.
        NotFound: it is a RAM tier with what another store left, and not to be written to.
        TierUnavailable, Corrupt: it cannot be read.
    """
    marker, damaged = await marker_of(tier)
    if state.marker is not None and marker is not None and marker.store != state.marker.store:
        if await store_of_steps(tier) == state.marker.store:
            marker, damaged = state.marker, True
        elif tier.ram is None and state.made_up and not any(other.held for other in state.tiers if other.ram is None):
            await _adopt(state, marker)
        elif tier.ram is None:
            raise Conflict(
                f"tier {tier.name!r} at {tier.store.location} belongs to another store ({marker.store}, this one is "
                f"{state.marker.store}); point the tier to a folder of its own"
            )
        elif state.read_only or not state.manages(tier):
            raise NotFound(f"tier {tier.name!r} at {tier.store.location} holds the steps of another store")
        else:
            await _refuse_to_lose(state, tier, marker)
            _log.warning(
                "tier %r: what another store (%s) left at %s is removed", tier.name, marker.store, tier.store.location
            )
            await tier.wipe()
            marker = None
    writes = not state.read_only and state.manages(tier)
    if writes and tier.ram is None and tier.lease is None:
        lease = Lease(tier.store, tier.name, state.config.lease_ttl)
        await lease.acquire()
        tier.lease = lease
    elif tier.lease is not None:
        await tier.lease.renew()
    if (marker is None or damaged) and state.marker is not None and writes:
        await tier.mark(state.marker)
    async with tier.guards_packs:  # a collector that saw half of a survey would take the packs of the rest for dead
        known = marker or state.marker
        await survey(tier, known.store if known is not None else None)
        if state.ranks > 1 and tier.ram is not None:
            tier.set_apart()
        tier.marker = known


async def _refuse_to_lose(state: State, tier: Tier, marker: StoreMarker) -> None:
    """Raise `Conflict` if what another store left in RAM is newer than all that the other tiers hold.

    It may be the only copy of what was saved while those could not be reached.
    """
    newest = max((held.record.saved_at for other in state.tiers for held in other.held.values()), default=0.0)
    async for info in tier.store.list(layout.STEPS):
        if info.key.endswith(f"/{layout.MANIFEST}") and info.modified > newest:
            raise Conflict(
                f"tier {tier.name!r} at {tier.store.location} holds steps of another store ({marker.store}) that are "
                f"newer than anything on the other tiers; delete that folder if nobody needs them, or give this store "
                f"a name or RAM path of its own"
            )


async def reopen(state: State, tier: Tier) -> bool:
    """Open a slower tier once more beside its store that fails, as after its file system was mounted anew.

    True when the marker is there: the new store has taken the place of the old one. A folder without it may be the
    place where a file system is to be mounted, and is left alone. Raises as opening does.
    """
    if isinstance(tier.config, PosixTier) and not await _is_there(tier.config):
        return False
    return await whole(_reopen(state, tier))


async def _reopen(state: State, tier: Tier) -> bool:
    blobs = await tier.connect()
    try:
        found = decode_marker(await blobs.get(layout.MARKER, limit=MARKER_MAX), blobs.location)
    except (NotFound, Corrupt, TierUnavailable):
        found = None
    if found is None or found != state.marker:
        await blobs.close()
        return False
    old, tier.blobs = tier.blobs, blobs
    if tier.lease is not None:
        tier.lease.store = blobs
    if old is not None:
        await old.close()
    return True


async def _adopt(state: State, marker: StoreMarker) -> None:
    """Take the identity of a tier that was silent at start, in place of one that was made up for steps in RAM."""
    state.marker, state.made_up = marker, False
    for tier in state.tiers:
        if tier.marker is not None and tier.marker != marker:
            tier.marker = marker
            if state.manages(tier):
                await tier.mark(marker)


async def identify(state: State) -> list[tuple[Tier, TieredCkptError]]:
    """Open every tier and settle whose store it is; returns the tiers that could not be, and why.

    The identity is that of the nearest durable tier, else that of RAM, else a new one. A RAM tier of another
    identity is a leftover and is emptied.
    """
    failures: list[tuple[Tier, TieredCkptError]] = []
    if not state.read_only:
        for doubt in doubtful(state.config):
            _log.warning("configuration: %s", explain([doubt]))
        first = state.config.tiers[0]
        if state.ranks == 1 and isinstance(first, RamTier) and first.replicas > 1:
            _log.warning("tier %r keeps no replicas: this store was opened by one rank alone", first.name)

    async def look(tier: Tier) -> StoreMarker | None:
        try:
            return (await marker_of(tier))[0]
        except TieredCkptError as error:
            failures.append((tier, error))
            return None

    markers = await agreed(state.tiers, await asyncio.gather(*(look(tier) for tier in state.tiers)))
    durable = [marker for tier, marker in zip(state.tiers, markers, strict=True) if marker and tier.ram is None]
    volatile = [marker for tier, marker in zip(state.tiers, markers, strict=True) if marker and tier.ram is not None]
    found = next(iter([*durable, *volatile]), None)
    state.marker, state.made_up = found, found is None and not state.read_only
    if state.made_up:
        state.marker = StoreMarker(store=str(uuid.uuid4()))
    failed = [tier for tier, _ in failures]

    async def join(tier: Tier) -> None:
        try:
            await connect(state, tier)
        except TieredCkptError as error:
            failures.append((tier, error))

    durable_ones = [tier for tier in state.tiers if tier not in failed and tier.ram is None]
    await asyncio.gather(*(join(tier) for tier in durable_ones))
    for tier in state.tiers:
        if tier.ram is not None and tier not in failed:
            await join(tier)  # last: what is left in RAM by another store is judged by what the others hold
    await drop_left_behind(state)
    if not state.read_only:
        _refuse_what_cannot_fit(state)
    return failures


def _refuse_what_cannot_fit(state: State) -> None:
    """Raise `Invalid` if no slower tier can hold a step as large as the newest; tell of single ones that cannot."""
    newest = next(reversed(state.records().items()), None)
    slower = [tier for tier in state.tiers if tier.config.kind != "ram"]
    if newest is None or not slower:
        return
    step, record = newest
    small = [
        (tier, tier.capacity)
        for tier in slower
        if tier.marker is not None  # else what it holds is not known
        and tier.capacity is not None
        and tier.capacity < record.nbytes
        and all(held.record.nbytes < record.nbytes for held in tier.held.values())  # else its chunks are shared ones
    ]
    told = [
        f"tier {tier.name!r} with its {format_size(capacity)} cannot hold a step as large as {step}, "
        f"{format_size(record.nbytes)}; raise its capacity, or take the tier out"
        for tier, capacity in small
    ]
    if len(small) == len(slower):
        raise Invalid("\n".join(told))
    for text in told:
        _log.warning("%s", text)
