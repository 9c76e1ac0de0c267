"""Identity of a store at opening: which store the tiers and the RAM of this machine belong to."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tieredckpt.blobs.ram.find import FoundRam
from tieredckpt.blobs.ram.owner import Place
from tieredckpt.blobs.ram.places import place_of, places_of
from tieredckpt.blobs.wrap import Below
from tieredckpt.config.checks import probable_mistakes
from tieredckpt.engine.opening.capacity import refuse_what_cannot_fit
from tieredckpt.engine.opening.connect import connect, move_to_earlier_place
from tieredckpt.engine.opening.markers import SeenMarker, corrected_by_steps, known_elsewhere, marker_of
from tieredckpt.engine.opening.ram import find, refuse_other_file_system
from tieredckpt.engine.opening.ram_choice import Choice, SeenTier, choose, is_of_name, notes
from tieredckpt.engine.opening.stale import set_stale_apart
from tieredckpt.engine.state.membership import Role
from tieredckpt.engine.state.state import State
from tieredckpt.engine.tier import marker_file
from tieredckpt.engine.tier.tier import Tier
from tieredckpt.errors import Conflict, TieredCkptError
from tieredckpt.events import RamLeftAlone
from tieredckpt.format import layout
from tieredckpt.format.manifest import StepId
from tieredckpt.format.marker import StoreMarker
from tieredckpt.settings import explain

__all__ = ["identify"]

_log = logging.getLogger("tieredckpt")


async def identify(
    state: State, found: Sequence[FoundRam] | None = None, folder: Path | None = None
) -> list[tuple[Tier, TieredCkptError]]:
    """Open every tier and decide which store it is; returns the tiers that could not be opened, and why.

    ``found`` is the RAM on the machines of all ranks, None to look on this one. For an agent, ``folder`` is the only
    RAM that counts.

    Raises `Conflict` where the tiers belong to two stores, or a writer's are a copy of another's, or an exact one has
    lossy copies alone.
    """
    if not state.read_only:
        _warn_of_mistakes(state)
    state.identity.places = await places_of(state.config)
    if found is None:
        found = await find(state.config, state.identity.places.values())
    if folder is not None:
        found = [each for each in found if each.folder == str(folder)]
    state.identity.noted = _noted_elsewhere(found)
    # Where exact steps are lost, a tier of derived ones tells whose they were.
    slower = [_Opening(tier) for tier in (*state.tiers, *state.derived) if not tier.in_memory]
    await asyncio.gather(*(_read_marker(state, each) for each in slower))
    await _correct_markers(state, slower, found)
    await _look_at_earlier_places(state, slower, found)
    choice = _chosen(state, slower, found)
    if choice.marker is None:
        await _refuse_derived_alone(slower)
    _take_identity(state, choice, found)
    await asyncio.gather(*(_connect(state, each) for each in slower if each.error is None))
    ram = [_Opening(tier) for tier in state.tiers[:1] if tier.in_memory]
    for each in ram:  # last, for its note is to tell which of the others have the store
        await _connect(state, each)
    await set_stale_apart(state)
    if not state.read_only:
        refuse_what_cannot_fit(state)
        _warn_of_other_ram(state, choice)
    return [(each.tier, each.error) for each in (*slower, *ram) if each.error is not None]


@dataclass(slots=True)
class _Opening:
    """A tier while the store is opened."""

    tier: Tier
    seen: SeenMarker | None = None
    """Its marker as it was read; None if `connect` is to read it."""
    marker: StoreMarker | None = None
    """The same, corrected by what is known of the store elsewhere; None where it is empty, or does not answer."""
    error: TieredCkptError | None = None
    """Why it does not answer, or is not connected."""


async def _read_marker(state: State, opening: _Opening) -> None:
    try:
        await refuse_other_file_system(state, opening.tier)
        opening.seen = await marker_of(opening.tier)
        opening.marker = opening.seen.marker
    except TieredCkptError as error:
        opening.error = error


async def _correct_markers(state: State, slower: Sequence[_Opening], found: Sequence[FoundRam]) -> None:
    """Correct markers that were derived from steps, and those that contradict the steps beside them."""
    seen = [each.seen for each in slower if each.seen is not None]
    intact = [marker for marker, damaged in seen if marker is not None and not damaged]
    for each in slower:
        if each.seen is not None and each.seen.damaged and each.marker is not None:
            at = [place] if (place := state.identity.places.get(each.tier.name)) is not None else []
            each.marker = known_elsewhere(each.marker, [*intact, *(ram.marker for ram in found if notes([ram], at))])
    known = {each.marker.store: each.marker for each in reversed(slower) if each.marker is not None}
    for each in slower:
        if each.marker is not None:
            each.marker = await corrected_by_steps(each.tier, each.marker, known)


async def _look_at_earlier_places(state: State, slower: Sequence[_Opening], found: Sequence[FoundRam]) -> None:
    """Look for the store at the places that earlier versions gave to tiers, where a tier has no marker."""
    silent = any(each.error is not None for each in slower)
    known = {each.marker.store for each in slower if each.marker is not None}
    if not known and not silent and len(slower) > 1:
        return  # all answer and are empty, so it is a new store
    stores = known or (None if silent else {each.store for each in found if is_of_name(each, state.config)})
    for each in slower:
        if each.marker is not None or each.error is not None:
            continue
        try:
            each.marker = await move_to_earlier_place(state, each.tier, stores)
            if each.marker is not None:
                each.seen = None  # which was of the place that it left
                if (place := await place_of(each.tier.config)) is not None:
                    state.identity.places[each.tier.name] = place
        except TieredCkptError as error:
            each.error = error


async def _refuse_derived_alone(slower: Sequence[_Opening]) -> None:
    """Raise `Conflict` for an empty exact tier at whose place derived steps lie, as where two folders were swapped.

    For tiers that tell no identity: of their own store, there would be a marker.
    """
    for tier in (each.tier for each in slower if each.seen is not None and not each.tier.derived):
        try:
            theirs = await marker_file.read_unless_empty(Below(tier.store, layout.DERIVED))
        except TieredCkptError:
            continue  # the tier's own root answered, and is empty
        if theirs is not None:
            raise Conflict(
                f"tier {tier.name!r} at {tier.store.location} holds nothing but lossy copies of steps of store "
                f"{theirs.store}, in the folder `derived`; name the place of its exact steps (were two tiers "
                f"swapped?), or give the tier a place of its own"
            )


async def _connect(state: State, opening: _Opening) -> None:
    try:
        await connect(state, opening.tier, opening.seen)
    except TieredCkptError as error:
        opening.error = error


def _take_identity(state: State, choice: Choice, found: Sequence[FoundRam]) -> None:
    """Give the state the identity that was chosen, or a new one to a writer of a new store."""
    identity = state.identity
    identity.marker = None if choice.marker is None else choice.marker.of_store
    identity.made_up = choice.provisional
    if state.membership.role is Role.AGENT and identity.marker is None:  # whose trainer knows better
        identity.marker = next((each.marker for each in found), None)
    elif identity.marker is None and not state.read_only:
        identity.marker, identity.made_up = StoreMarker(store=str(uuid.uuid4())), True
    own = [each for each in found if identity.marker is not None and each.store == identity.marker.store]
    identity.noted = _noted_elsewhere(own)


def _chosen(state: State, slower: Sequence[_Opening], found: Sequence[FoundRam]) -> Choice:
    places = state.identity.places
    seen = [
        SeenTier(each.tier.name, places.get(each.tier.name) or Place(location=""), each.error is None, each.marker)
        for each in slower
    ]
    try:
        return choose(seen, found, state.config)
    except Conflict:
        if not state.read_only:
            raise
    store = next(tier.marker.store for tier in seen if tier.marker is not None)  # a reader takes the nearest
    return choose([tier for tier in seen if tier.marker is None or tier.marker.store == store], found, state.config)


def _noted_elsewhere(found: Iterable[FoundRam]) -> dict[str, Place]:
    """Places that the notes of RAM name and where another file system is mounted now."""
    return {
        place.location: place
        for each in found
        if each.owner is not None
        for place in each.owner.places
        if place.location in each.elsewhere
    }


def _warn_of_mistakes(state: State) -> None:
    for mistake in probable_mistakes(state.config):
        _log.warning("configuration: %s", explain([mistake]))
    ram = state.config.ram
    if state.membership.size == 1 and ram is not None and ram.replicas > 1:
        _log.warning("tier %r keeps no replicas: this store was opened by one rank alone", ram.name)


def _warn_of_other_ram(state: State, choice: Choice) -> None:
    """Warn of RAM that used to belong to this folder and belongs to another store; say what to do with it."""
    ram = state.config.ram
    rooted = f" --root {ram.path}" if ram is not None and ram.path is not None else ""
    for store, group in choice.left.items():
        steps = sorted({step for each in group for step in each.steps})
        if not steps:
            continue
        newest = StepId(*steps[-1])
        where = _common_place(state, group)
        _log.warning(
            "RAM at %s holds %d steps of another store (%s), up to %s, which was at %s before; it is left alone: "
            "`tieredckpt adopt %s --ram %s%s` continues that store there, `tieredckpt forget %s%s` frees the memory",
            *(group[0].folder, len(steps), store, newest, where, where, store, rooted, store, rooted),
        )
        state.events.emit(RamLeftAlone(store, group[0].folder, len(steps), newest.step, newest.serial))


def _common_place(state: State, group: Sequence[FoundRam]) -> str:
    """A location that both this store and RAM of another have."""
    owner = group[0].owner
    noted = [place.location for place in owner.places] if owner is not None else []
    ours = {place.location for place in state.identity.places.values()}
    return next((where for where in noted if where in ours), noted[0] if noted else "")
