"""Finds the marker of a tier, which has the store's UUID; a damaged one is made anew from the steps and other tiers."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import msgspec

from tieredckpt._decoders import from_json
from tieredckpt.engine.opening.scan import step_folders
from tieredckpt.engine.opening.unreadable import Reads
from tieredckpt.engine.tier import step_index
from tieredckpt.engine.tier.tier import Tier
from tieredckpt.errors import Corrupt, NotFound, TierUnavailable
from tieredckpt.format import layout
from tieredckpt.format.manifest import StepRecord, find_record
from tieredckpt.format.marker import StoreMarker

__all__ = ["SeenMarker", "corrected_by_steps", "known_elsewhere", "marker_of", "store_of_steps"]

_log = logging.getLogger("tieredckpt")

_STEPS_ASKED = 8


class _AnyMarker(msgspec.Struct, frozen=True):
    """The fields that markers of all versions have; later versions may add any others."""

    store: str
    format_version: int | str


class SeenMarker(NamedTuple):
    """The marker of a tier as it is at opening."""

    marker: StoreMarker | None
    """None where the tier is empty."""
    damaged: bool = False
    """Whether it was derived from the steps, or from another tier, and must be written again."""


async def marker_of(tier: Tier) -> SeenMarker:
    """The marker of a tier; if that cannot be read, as its steps tell it.

    Raises:
        Corrupt: it cannot be read, and the steps do not tell either; or it is of another format.
        Conflict: exact steps lie there in place of derived ones, or the reverse.
        TierUnavailable: as the blob store does.
    """
    problem: Corrupt | None = None
    try:
        marker = await tier.open()
    except Corrupt as error:
        if await _is_of_another_format(tier):
            raise
        marker, problem = None, error
    if marker is not None:
        return SeenMarker(marker)
    records = await _newest_records(tier)
    if records:
        if all((record.derived is not msgspec.UNSET) != tier.derived for record in records):
            raise tier.of_other_kind()
        store, *before = dict.fromkeys(record.store for record in records)
        _log.warning(
            "tier %r has lost its marker (%s); its steps are of store %s", tier.name, problem or "it is missing", store
        )
        return SeenMarker(StoreMarker(store=store, forked_from=tuple(before) or msgspec.UNSET), damaged=True)
    if problem is not None:
        raise problem
    return SeenMarker(None)


async def store_of_steps(tier: Tier) -> str | None:
    """The store that saved the newest step of a tier; None without steps. Older steps of a fork are of other stores."""
    return next((record.store for record in await _newest_records(tier)), None)


def known_elsewhere(marker: StoreMarker, known: Iterable[StoreMarker]) -> StoreMarker:
    """Replace a marker that was derived from steps by one that is known of the same store, if there is one.

    Steps do not tell of a later fork, nor of every store that theirs was forked from.
    """
    return next((each for each in known if each.owns(marker.store)), marker)


async def _newest_records(tier: Tier) -> list[StepRecord]:
    """Records of the newest steps that can be read, the newest first.

    Raises `TierUnavailable` if reads fail, and no step can be read.
    """
    folders = step_folders([info async for info in tier.store.list(layout.STEPS)])
    found = [step for step, files in folders.items() if layout.MANIFEST in files]
    records: list[StepRecord] = []
    reads = Reads(tier)
    for step in sorted(found, reverse=True)[:_STEPS_ASKED]:
        try:
            records.append(find_record(*await step_index.read(tier, step)))
        except TierUnavailable as error:
            await reads.note(error)
        except (Corrupt, NotFound):
            pass
    if reads.failed and not records:  # not to be taken for an empty tier
        raise reads.failed[0]
    return records


async def corrected_by_steps(tier: Tier, marker: StoreMarker, known: Mapping[str, StoreMarker]) -> StoreMarker:
    """The marker of a tier; if its steps contradict that, a ``known`` one of another tier that agrees with them."""
    if len(known) < 2:
        return marker  # the tiers name one store, or none: no steps are read
    try:
        store = await store_of_steps(tier)
    except TierUnavailable:
        return marker  # which is met again where it is reported
    if store is None or marker.owns(store) or store not in known:
        return marker
    _log.warning("tier %r: its marker says %s, its steps and another tier %s", tier.name, marker.store, store)
    return known[store]


async def _is_of_another_format(tier: Tier) -> bool:
    """Whether a marker that this version refuses is a sound one of another version, which must not be replaced."""
    try:
        data = await tier.store.get(layout.MARKER, limit=layout.MARKER_MAX)
        found = from_json(data, _AnyMarker, layout.MARKER)
    except (Corrupt, NotFound):
        return False
    return found.format_version not in layout.FORMAT_VERSIONS
