"""Finds the RAM of a store on this machine, opens it, and keeps its note of where the store's other tiers are.

`ram_choice` decides which store the RAM belongs to. A reader changes nothing of it. A writer moves RAM that an earlier
version put elsewhere, and is refused if this store is a copy of the folder that the RAM belongs to.
"""

from __future__ import annotations

import errno
import logging
import time
from collections.abc import Collection
from contextlib import suppress
from functools import partial
from pathlib import Path

import msgspec

from tieredckpt.blobs.base import Survives
from tieredckpt.blobs.ram.find import FoundRam, find_ram, judged, store_in
from tieredckpt.blobs.ram.folder import RANK_FOLDER, keep_earlier_versions_out, move_in, ram_root, unfinished_moves
from tieredckpt.blobs.ram.owner import Owner, Place, is_removed, read_owner, write_owner
from tieredckpt.blobs.ram.places import place_of, places_of
from tieredckpt.blobs.ram.store import RamStore
from tieredckpt.concurrency import being_cancelled, in_thread, on_own_thread_within
from tieredckpt.config import StoreConfig
from tieredckpt.engine.opening.ram_choice import is_copy, is_of_ram_alone, notes
from tieredckpt.engine.state.membership import Role
from tieredckpt.engine.state.state import State
from tieredckpt.engine.tier import marker_file
from tieredckpt.engine.tier.tier import Tier
from tieredckpt.errors import Conflict, NoSpace, NotFound, TieredCkptError, TierUnavailable

__all__ = [
    "attach_ram",
    "find",
    "is_of_a_copy",
    "judged_within",
    "keep_noted",
    "mark_ram",
    "note_owner",
    "open_ram",
    "ram_folder",
    "ram_of",
    "refuse_other_file_system",
]

_log = logging.getLogger("tieredckpt")


def ram_folder(state: State) -> Path:
    """The folder of this store's RAM on this machine; with several ranks, each has a folder in it."""
    if (ram := state.tiers[0].ram) is not None:
        folder = Path(ram.store.location)
        return folder.parent if folder.name.startswith(RANK_FOLDER) else folder
    assert state.config.ram is not None
    assert state.identity.marker is not None
    return ram_root(state.config.ram.path) / state.identity.marker.store


async def find(config: StoreConfig, places: Collection[Place]) -> list[FoundRam]:
    """Find this user's RAM on this machine, below the root of the store's RAM; `judged`, if it notes a place."""
    if config.ram is None:
        return []
    found = await in_thread(find_ram, ram_root(config.ram.path))
    return [await _judged(config, each) if notes([each], places) else each for each in found if not each.lost]


async def ram_of(config: StoreConfig) -> list[FoundRam]:
    """The RAM on this machine that notes a tier of a configuration; if that has RAM alone, the RAM with its name."""
    places = tuple((await places_of(config)).values())
    found = await find(config, places)
    return [each for each in found if notes([each], places) or (not places and is_of_ram_alone([each], config))]


async def _judged(config: StoreConfig, found: FoundRam) -> FoundRam:
    return await judged_within(min(tier.deadline for tier in config.tiers), found)


async def judged_within(seconds: float, found: FoundRam) -> FoundRam:
    """Check which of the places that RAM notes still hold its store; a place that is too slow counts as holding it."""
    try:
        return await on_own_thread_within(seconds, "ram", f"looking whose {found.folder} is", judged, found)
    except TierUnavailable:
        assert found.owner is not None
        return msgspec.structs.replace(found, holding=tuple(place.location for place in found.owner.places))


# -- opening ----------------------------------------------------------------------------------------------


async def open_ram(state: State, *, sharers: int) -> RamStore:
    """Open the RAM tier to write to it, or make it, in memory that ``sharers`` ranks of this machine share.

    ``state`` is of a store whose identity is known.

    Raises:
        Conflict: another process writes to it, or this store is a copy of the folder that the RAM belongs to.
        As `RamStore.open` else.
    """
    tier = state.config.ram
    assert tier is not None
    assert state.identity.marker is not None
    top = ram_root(tier.path) / state.identity.marker.store
    places = tuple(state.identity.places.values())
    mine = await _of_this_store(state)
    for each in mine:
        if other := is_copy(each, places):
            raise Conflict(
                f"{_shown(places)} is a copy of the store at {other}, whose steps are in RAM at {each.folder}: two "
                f"stores cannot go on under one identity; say `tieredckpt fork` with either folder to give it its own"
            )
    folder = top if state.membership.size == 1 else top / f"{RANK_FOLDER}{state.membership.rank}"
    await in_thread(_move_in, state, top, mine)
    there = await in_thread(store_in, folder)
    if there is not None and there.store != state.identity.marker.store:
        raise Conflict(f"the RAM at {folder} is of another store, {there.store}; open that one, and it is moved")
    capacity = tier.capacity if isinstance(tier.capacity, int) else None
    store = await in_thread(partial(RamStore.open, folder, capacity, sharers=sharers))
    try:
        await in_thread(keep_earlier_versions_out, top.parent, None if tier.path else state.config.identity, top.name)
    except Exception as error:  # the store would be lost, and its lock with it
        _log.warning("a version before this one would not be refused the RAM at %s: %s", top, error)
    return store


async def attach_ram(state: State) -> RamStore:
    """Open the RAM tier to read it beside its writer. Raises `NotFound` where there is none of this store's."""
    places = tuple(state.identity.places.values())
    found = [each for each in await _of_this_store(state) if each.rank is None]
    for each in found:
        if other := is_copy(each, places):
            raise NotFound(f"the RAM at {each.folder} is of the store at {other}, of which {_shown(places)} is a copy")
    if not found:
        raise NotFound(f"there is no RAM of this store below {ram_folder(state).parent}")
    return await in_thread(RamStore.attach, Path(max(found, key=lambda each: each.used_at).folder))


async def is_of_a_copy(state: State) -> bool:
    """Whether this store is a copy of another folder, and RAM with its identity belongs to that one."""
    return any(is_copy(each, state.identity.places.values()) for each in await _of_this_store(state))


async def _of_this_store(state: State) -> list[FoundRam]:
    """The store's RAM on this machine, that of other ranks included, `judged`."""
    assert state.identity.marker is not None
    tier = state.config.ram
    assert tier is not None
    found = await in_thread(find_ram, ram_root(tier.path))
    return [
        await _judged(state.config, each)
        for each in found
        if each.store == state.identity.marker.store and not each.lost
    ]


def _move_in(state: State, top: Path, found: Collection[FoundRam]) -> None:
    """Move RAM from other places to the store's folder; each rank moves its own, the first rank all others'."""
    local_ranks = {f"{RANK_FOLDER}{rank}" for rank in state.membership.local_ranks}
    left_over = unfinished_moves(top.parent).get(top.name)
    for old in [*([left_over] if left_over else []), *(Path(each.folder) for each in found)]:
        is_mine = (
            old.name == f"{RANK_FOLDER}{state.membership.rank}"
            if old.name in local_ranks
            else state.membership.is_first_of_node
        )
        new = top / old.name if old.name.startswith(RANK_FOLDER) else top
        if not is_mine or old == new or not old.is_dir():
            continue
        if old != left_over and _is_taken(new):
            _log.warning(
                "the RAM at %s is of this store, and so is %s, which is used; the other is left alone", old, new
            )
            continue
        _log.info("the RAM at %s is moved to %s", old, new)
        try:
            move_in(old, new)
        except OSError as error:
            kind = NoSpace if error.errno == errno.ENOSPC else TierUnavailable
            raise kind(f"the RAM at {old} cannot be moved to {new}: {error.strerror}; move it by hand") from error


def _is_taken(folder: Path) -> bool:
    """Whether a store's folder holds anything but folders of ranks."""
    return folder.is_dir() and any(not path.name.startswith(RANK_FOLDER) for path in folder.iterdir())


def _shown(places: Collection[Place]) -> str:
    return ", ".join(place.location for place in places) or "this store"


async def mark_ram(state: State) -> None:
    """Mark RAM with the identity of the store. A failure shows again at the next use."""
    tier, marker = state.tiers[0], state.identity.marker
    if tier.ram is None or not tier.ram.slab.writable or marker is None:
        return
    if tier.marker is not None and not marker.owns(tier.marker.store):  # by which its folder is called
        marker = msgspec.structs.replace(marker, forked_from=(tier.marker.store, *marker.ancestors))
    tier.marker = marker
    with suppress(TieredCkptError):
        await marker_file.write(tier.store, marker)


# -- the note ---------------------------------------------------------------------------------------------


async def note_owner(state: State) -> None:
    """Write the owner's note into RAM, if it changed. Raises nothing: without a note RAM is only harder to find."""
    ram = state.tiers[0].ram
    if ram is None or state.read_only or not ram.slab.writable:
        return
    folder = Path(ram.store.location)
    try:
        before = await in_thread(read_owner, folder)
        known = {place.location: place for place in before.places} if before is not None else {}
        places = [await _noted(state, tier, known) for tier in state.tiers[1:]]
        owner = Owner(
            label=state.config.name,
            ranks=state.membership.size,
            places=tuple(place for place in places if place is not None),
            used_at=time.time(),
        )
        state.identity.noted = {place.location: place for place in owner.places}
        await in_thread(write_owner, folder, owner)
    except (OSError, TierUnavailable, UnicodeError) as error:  # the last of a path that is bytes, and no text
        _log.warning("it could not be noted whose the RAM at %s is: %s", folder, error)


async def _noted(state: State, tier: Tier, known: dict[str, Place]) -> Place | None:
    """The place of a tier; as noted before if the tier does not answer now."""
    place = state.identity.places.get(tier.name) if tier.marker is None else await place_of(tier.config)
    if place is None:
        return None
    noted = known.get(place.location)
    if noted is not None and noted.seen and place.inode is None and place.location.startswith("/"):
        return noted  # what is seen now is not what the tier has: it is not mounted, or does not answer
    if tier.marker is None or not (place.inode or _is_marked(state, tier)):
        return known.get(place.location, msgspec.structs.replace(place, inode=None, seen=False))
    outlives = tier.survives if tier.blobs is not None else Survives.named(tier.config.survives or "process")
    return msgspec.structs.replace(place, seen=outlives >= Survives.NODE, lasting=outlives >= Survives.NODE)


def _is_marked(state: State, tier: Tier) -> bool:
    """Whether the marker of a tier is there: beside an agent it is only meant until the agent tells of the tier."""
    return state.membership.role is not Role.TRAINER or tier.remote.used is not None


async def keep_noted(state: State) -> None:
    """Write the note again whenever another tier becomes known, until cancelled."""
    noted: list[tuple[bool, bool]] | None = None  # what came while the store was opened may not be noted yet
    while not being_cancelled():
        known = [(tier.marker is not None, _is_marked(state, tier)) for tier in state.tiers[1:]]
        if known != noted:
            await note_owner(state)
            noted = known
        await state.changed.wait()


async def refuse_other_file_system(state: State, tier: Tier) -> None:
    """Raise `TierUnavailable` if a tier that had the store is empty now, and on another file system.

    Its own file system is not mounted, or was replaced. What is written now would fill the disk below, and be hidden
    by the mount.
    """
    if not state.identity.noted or tier.in_memory:
        return
    now = await place_of(tier.config)
    if now is None or not now.location.startswith("/"):
        return  # a bucket is not mounted
    noted = state.identity.noted.get(now.location)
    if noted is None or now.inode is not None or not noted.seen or is_removed(noted, now):
        return
    raise TierUnavailable(
        f"tier {tier.name!r}: {now.location} is empty and on another file system than the one that had the store; "
        f"mount that one, or say `tieredckpt adopt {now.location}` if this one takes its place"
    )
