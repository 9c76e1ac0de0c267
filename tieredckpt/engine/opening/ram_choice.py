"""Chooses the RAM that a store uses: pure rules over what its tiers say and what RAM its machines have.

A store is known by the UUID in the markers of its slower tiers. RAM with that UUID is used, unless this store is a
copy of the folder that the RAM belongs to, and that folder is still there. If no tier has a UUID, because they are
empty or do not answer, RAM is known by the places that it notes.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tieredckpt.blobs.ram.find import FoundRam, by_store
from tieredckpt.blobs.ram.folder import shared_memory_root
from tieredckpt.blobs.ram.owner import Place, shares
from tieredckpt.config import StoreConfig
from tieredckpt.errors import Conflict
from tieredckpt.format.marker import StoreMarker

__all__ = ["Choice", "SeenTier", "choose", "is_copy", "is_of_name", "is_of_ram_alone", "may_return", "notes"]


@dataclass(frozen=True, slots=True)
class SeenTier:
    """A slower tier as it is at opening."""

    name: str
    place: Place
    answers: bool
    marker: StoreMarker | None
    """None where it is empty, or does not answer."""


@dataclass(frozen=True, slots=True)
class Choice:
    """The store's identity."""

    marker: StoreMarker | None = None
    """None where a new one is to be made up."""
    provisional: bool = False
    """No slower tier ever had this identity: if one comes back with another, that one counts."""
    left: Mapping[str, Sequence[FoundRam]] = field(default_factory=dict)
    """RAM of other stores, by UUID, that notes a location of this one; it is left alone."""


def choose(tiers: Sequence[SeenTier], found: Sequence[FoundRam], config: StoreConfig) -> Choice:
    """Decide which store the tiers and the RAM belong to.

    Args:
        tiers: the slower ones, nearest first.
        found: RAM of this user, on any machine of the ranks; see `FoundRam`. `judged`, where it notes a location.
        config: of the store; its ``name`` is the identity of one of RAM alone.

    Raises:
        Conflict: two tiers have markers of two stores.
    """
    stores = by_store(found)
    ours = [tier.place for tier in tiers]
    near = {store: group for store, group in stores.items() if notes(group, ours)}
    marked = [tier for tier in tiers if tier.marker is not None]
    if marked:
        first = marked[0]
        assert first.marker is not None
        for other in marked[1:]:
            assert other.marker is not None
            if other.marker.store != first.marker.store:
                raise Conflict(
                    f"tier {first.name!r} at {first.place.location} belongs to store {first.marker.store}, and tier "
                    f"{other.name!r} at {other.place.location} to store {other.marker.store}; point one of them to a "
                    f"folder of its own"
                )
        return Choice(first.marker, left={store: group for store, group in near.items() if store != first.marker.store})
    if not tiers:
        near = {store: group for store, group in stores.items() if is_of_ram_alone(group, config)}
    elif all(tier.answers for tier in tiers):
        usable = {store: group for store, group in near.items() if may_return(group, ours)}
        return _from_ram(usable, {store: group for store, group in near.items() if store not in usable})
    elif config.name is None:
        near |= {store: group for store, group in stores.items() if all(_is_earlier(each, config) for each in group)}
    return _from_ram(near, {})


def notes(group: Sequence[FoundRam], ours: Collection[Place]) -> bool:
    """Whether RAM notes a tier that is one of ours."""
    return any(each.owner is not None and shares(each.owner.places, ours) for each in group)


def is_copy(found: FoundRam, ours: Collection[Place]) -> str:
    """The place of the store that RAM of our UUID belongs to, if our tiers are a copy of it; empty if they are not."""
    if found.owner is None or not found.owner.places or shares(found.owner.places, ours):
        return ""
    # Where none still holds it, the store was moved. A bucket's service has many names, and older notes have none.
    urls = {_bucket(place.location) for place in ours}
    return next((where for where in found.holding if where.startswith("/") or _bucket(where) not in urls), "")


def _bucket(url: str) -> str:
    return url.partition(" at ")[0]


def _from_ram(candidates: Mapping[str, Sequence[FoundRam]], left: dict[str, Sequence[FoundRam]]) -> Choice:
    """Continue the store with a whole step in the RAM that was used last; otherwise begin a new one."""
    if not candidates:
        return Choice(left=left)
    best = max(candidates, key=lambda store: (_has_whole_step(candidates[store]), _used_at(candidates[store]), store))
    group = candidates[best]
    seen = any(place.seen for each in group if each.owner is not None for place in each.owner.places)
    rest = {store: others for store, others in candidates.items() if store != best}
    marker = max(group, key=lambda each: each.used_at).marker
    return Choice(marker, not seen, {**left, **rest})


def may_return(group: Sequence[FoundRam], ours: Sequence[Place]) -> bool:
    """Whether empty tiers may be those of a store in RAM: one never had its marker, or has another file system now.

    Otherwise a person removed what was there, and means to start afresh.
    """
    locations = {place.location for place in ours}
    noted = [place for each in group if each.owner is not None for place in each.owner.places]
    mine = [place for place in noted if place.location in locations]
    mine = [place for place in mine if place.lasting] or mine  # others come back empty with every job
    empty = {place.location for place in ours if place.inode is None}
    return any(not place.seen for place in mine) or any(not empty.isdisjoint(each.elsewhere) for each in group)


def is_of_ram_alone(group: Sequence[FoundRam], config: StoreConfig) -> bool:
    """Whether RAM is of a store without other tiers, and of this name."""
    owners = [each.owner for each in group if each.owner is not None]
    if not owners:
        return any(_is_earlier(each, config) for each in group)
    return all(not owner.places and owner.label == config.name for owner in owners)


def is_of_name(found: FoundRam, config: StoreConfig) -> bool:
    """Whether RAM is of a store with the name of this one."""
    label = found.owner.label if found.owner is not None else None
    return config.name is not None and (label == config.name or _is_earlier(found, config))


def _is_earlier(found: FoundRam, config: StoreConfig) -> bool:
    """Whether RAM lies where an earlier version put the RAM of this configuration."""
    earlier = (config.ram and config.ram.path) or shared_memory_root() / config.identity
    return found.owner is None and earlier in (Path(found.folder), Path(found.folder).parent)


def _has_whole_step(group: Sequence[FoundRam]) -> bool:
    """Whether the parts of some step are all there."""
    ranks = max((each.owner.ranks for each in group if each.owner is not None), default=1)
    parts: dict[tuple[int, int], set[int]] = {}
    for each in group:
        for step in each.steps:
            if each.rank is None:
                return True
            parts.setdefault(step, set()).add(each.rank)
    return any(len(having) >= ranks for having in parts.values())


def _used_at(group: Sequence[FoundRam]) -> float:
    return max(each.used_at for each in group)
