"""Identity of a store at opening: which store the tiers and the RAM of this machine belong to."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tieredckpt.blobs.ram.find import FoundRam
from tieredckpt.blobs.ram.owner import Place
from tieredckpt.blobs.ram.places import place_of, places_of
from tieredckpt.config.checks import probable_mistakes
from tieredckpt.engine.opening.capacity import refuse_what_cannot_fit
from tieredckpt.engine.opening.connect import connect, move_to_earlier_place
from tieredckpt.engine.opening.identity import SeenMarker, consistent_markers, known_elsewhere, marker_of
from tieredckpt.engine.opening.ram import find, refuse_other_file_system
from tieredckpt.engine.opening.ram_choice import Choice, SeenTier, choose, is_of_name, notes
from tieredckpt.engine.opening.stale import set_stale_apart
from tieredckpt.engine.state.membership import Role
from tieredckpt.engine.state.state import State
from tieredckpt.engine.tier.tier import Tier
from tieredckpt.errors import Conflict, TieredCkptError
from tieredckpt.events import RamLeftAlone
from tieredckpt.format.manifest import StepId
from tieredckpt.format.marker import StoreMarker
from tieredckpt.settings import explain

__all__ = ["identify"]

_log = logging.getLogger("tieredckpt")


async def identify(
    state: State, found: Sequence[FoundRam] | None = None, folder: Path | None = None
) -> list[tuple[Tier, TieredCkptError]]:
    """Open every tier and decide which store it is; returns the tiers that could not be opened, and why.

    Args:
        state: of the store.
        found: the RAM that there is on the machines of all ranks; None to look on this one.
        folder: the only RAM that counts, for an agent.

    Raises `Conflict` where the tiers belong to two stores, or a writer's are a copy of another's.
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
    slower = _SlowerTiers(state, [tier for tier in (*state.tiers, *state.derived) if not tier.in_memory])
    await slower.read_markers(found)
    await slower.look_at_earlier_places(found)
    choice = _chosen(state, slower.seen_tiers(), found)
    _take_identity(state, choice, found)
    await slower.connect()
    if state.tiers[0].in_memory:
        await slower.join(state.tiers[0])  # last, for its note is to tell which of the others have the store
    await set_stale_apart(state)
    if not state.read_only:
        refuse_what_cannot_fit(state)
        _warn_of_other_ram(state, choice)
    return slower.failures


@dataclass
class _SlowerTiers:
    """The tiers below RAM while the store is opened: their markers, and the failures of those that do not answer."""

    state: State
    tiers: list[Tier]
    failures: list[tuple[Tier, TieredCkptError]] = field(default_factory=list)
    _markers: list[StoreMarker | None] = field(default_factory=list)
    """In the order of the tiers."""
    _seen: dict[str, SeenMarker] = field(default_factory=dict)
    """Result of reading each tier's marker, by name."""

    def _answering(self) -> list[Tier]:
        failed = [tier for tier, _ in self.failures]
        return [tier for tier in self.tiers if tier not in failed]

    async def read_markers(self, found: Sequence[FoundRam]) -> None:
        """Read the marker of each tier, and correct those that contradict the steps beside them."""
        markers = list(await asyncio.gather(*(self._read_marker(tier) for tier in self.tiers)))
        intact = [marker for marker, damaged in self._seen.values() if marker is not None and not damaged]
        for i, (tier, marker) in enumerate(zip(self.tiers, markers, strict=True)):
            if marker is not None and self._seen[tier.name][1]:
                at = [place] if (place := self.state.identity.places.get(tier.name)) is not None else []
                markers[i] = known_elsewhere(marker, [*intact, *(each.marker for each in found if notes([each], at))])
        self._markers = await consistent_markers(self.tiers, markers)

    async def _read_marker(self, tier: Tier) -> StoreMarker | None:
        try:
            await refuse_other_file_system(self.state, tier)
            self._seen[tier.name] = await marker_of(tier)
            return self._seen[tier.name][0]
        except TieredCkptError as error:
            self.failures.append((tier, error))
            return None

    async def look_at_earlier_places(self, found: Sequence[FoundRam]) -> None:
        """Look for the store at the places that earlier versions gave to tiers, where a tier has no marker."""
        config, answering = self.state.config, self._answering()
        silent = len(answering) < len(self.tiers)
        known = {marker.store for marker in self._markers if marker is not None}
        if not known and not silent and len(self.tiers) > 1:
            return  # all answer and are empty, so it is a new store
        stores = known or (None if silent else {each.store for each in found if is_of_name(each, config)})
        for i, tier in enumerate(self.tiers):
            if self._markers[i] is not None or tier not in answering:
                continue
            try:
                self._markers[i] = await move_to_earlier_place(self.state, tier, stores)
                if self._markers[i] is not None:
                    del self._seen[tier.name]  # which was of the place that it left
                    if (place := await place_of(tier.config)) is not None:
                        self.state.identity.places[tier.name] = place
            except TieredCkptError as error:
                self.failures.append((tier, error))

    def seen_tiers(self) -> list[SeenTier]:
        """The tiers as `choose` takes them."""
        places, answering = self.state.identity.places, self._answering()
        return [
            SeenTier(tier.name, places.get(tier.name) or Place(location=""), tier in answering, marker)
            for tier, marker in zip(self.tiers, self._markers, strict=True)
        ]

    async def connect(self) -> None:
        """Connect the tiers that answer to the store."""
        await asyncio.gather(*(self.join(tier) for tier in self._answering()))

    async def join(self, tier: Tier) -> None:
        """Connect a tier; a failure is noted."""
        try:
            await connect(self.state, tier, self._seen.get(tier.name))
        except TieredCkptError as error:
            self.failures.append((tier, error))


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


def _chosen(state: State, seen: list[SeenTier], found: Sequence[FoundRam]) -> Choice:
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
