"""Copies steps from one store to another: only what the other lacks, each chunk verified on its way."""

from __future__ import annotations

import logging
import os
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, TypeVar

from tieredckpt._arguments import checked_step
from tieredckpt.blobs.ram.find import FoundRam, find_ram
from tieredckpt.blobs.ram.folder import ram_root
from tieredckpt.blobs.ram.owner import Place, shares
from tieredckpt.blobs.ram.places import place_of, places_of
from tieredckpt.blobs.wrap import Forward, Operation
from tieredckpt.concurrency import in_thread, whole
from tieredckpt.config import StoreConfig, TierConfig, load
from tieredckpt.engine.engine import Engine
from tieredckpt.engine.loop import EngineLoop
from tieredckpt.engine.opening.ram import judged_within
from tieredckpt.engine.opening.ram_choice import is_copy, notes
from tieredckpt.engine.promoting.copy_step import copy_step
from tieredckpt.engine.restoring.moved import Moved
from tieredckpt.engine.tier import marker_file
from tieredckpt.errors import Conflict, Corrupt, Invalid, NoSpace, NotFound, TierUnavailable
from tieredckpt.events import Events
from tieredckpt.format.manifest import StepId, StepRecord
from tieredckpt.format.marker import StoreMarker

__all__ = ["Copied", "copy_steps"]

T = TypeVar("T")

_log = logging.getLogger("tieredckpt")

Source = str | os.PathLike[str] | Mapping[str, Any] | StoreConfig
"""Everything that `tieredckpt.CheckpointStore.open` accepts."""


@dataclass(frozen=True, slots=True)
class Copied:
    """A step that is in both stores now."""

    step: int
    serial: int
    nbytes: int
    """Bytes of all its arrays."""
    written: int
    """Bytes that were written for it; 0 if the other store had them all."""


class _Target(Forward):
    """The blob store that is copied to: names it in its errors, so that none counts as damage of the source."""

    async def around(self, operation: Operation, call: Callable[[], Awaitable[T]]) -> T:
        try:
            return await call()
        except Corrupt as error:  # such as a link where a folder belongs
            if operation.verb != "put":
                raise
            raise TierUnavailable(f"the store that is copied to: {error}") from error
        except (NoSpace, TierUnavailable) as error:
            raise type(error)(f"the store that is copied to: {error}") from error


async def copy_steps(
    source: Source,
    target: Source,
    steps: Sequence[int] | None = None,
    *,
    progress: Callable[[Copied], None] | None = None,
) -> list[Copied]:
    """Copy steps to another store, oldest save first, with metrics, provenance and branches.

    The source is not changed, and training may go on there. The copy goes to the nearest tier of the target that is not
    RAM; chunks and steps that are there already stay as they are, so repeat a copy that was interrupted. A target
    without steps gets an identity of its own, as with `tieredckpt fork`.

    Args:
        source: as `CheckpointStore.open` takes it.
        target: likewise; its policies decide later which steps stay.
        steps: which, by number; None for all, those off the branch included.
        progress: called with each step that has been copied, or was there, from another thread.

    Raises:
        NotFound: there is no such store, or no such step.
        Invalid: a configuration is wrong, or both stores are in one place, or one in the other.
        Conflict: another process writes to the target; or it holds steps of another store, has gone on by itself since
            it was copied, or has steps in RAM alone.
        Corrupt: a chunk is intact nowhere in the source; the array is named. Steps with such chunks are not copied, and
            all others were.
        NoSpace: the target is full; a copy evicts nothing there. Copying a step begins only if the target has room for
            it, as far as its capacity and its file system tell.
        TierUnavailable: the target does not answer, or no tier of the source does.
    """
    numbers = None if steps is None else [checked_step(step) for step in steps]
    there, here = load(source), load(target)
    if not here.slower:
        raise Invalid("a store of RAM alone cannot be copied to: give a folder or a URL, or a configuration with one")
    await _refuse_one_place(there, here)
    loop = EngineLoop("tieredckpt copy")
    try:
        return await loop.call(_copy(there, here, numbers, progress))
    finally:
        loop.soon(loop.thread.end)
        await loop.joined()


async def _refuse_one_place(there: StoreConfig, here: StoreConfig) -> None:
    """Raise `Invalid` if a tier of one store is at a place of the other, or in its folder or prefix."""
    theirs = [(tier, place) for tier in there.slower if (place := await place_of(tier)) is not None]
    ours = [(tier, place) for tier in here.slower if (place := await place_of(tier)) is not None]
    for (source, their), (target, our) in product(theirs, ours):
        if shares([their], [our]):
            raise Invalid(f"both stores are at {our.location}; copy to a place of its own")
        one, other = _as_path(source, their), _as_path(target, our)
        if one in other.parents or other in one.parents:
            raise Invalid(f"{their.location} and {our.location} lie in each other; copy to a place of its own")


def _as_path(tier: TierConfig, place: Place) -> Path:
    """The place of a tier as a path; a URL as a relative one, which lies in no folder and begins with its service."""
    url = str(getattr(tier, "url", ""))
    return Path(place.location.removeprefix(url), url)


async def _copy(
    there: StoreConfig,
    here: StoreConfig,
    numbers: Collection[int] | None,
    progress: Callable[[Copied], None] | None,
) -> list[Copied]:
    source = Engine(there, Events(), read_only=True)
    await source.start()
    try:
        if source.state.identity.marker is None:
            raise NotFound(f"there is no store at {', '.join(str(tier.location) for tier in there.slower)}")
        records = dict(source.state.records())
        if numbers is not None:
            records = {step: records[step] for step in {source.state.find(number) for number in numbers}}
        places = tuple((await places_of(here)).values())
        ram = await _ram_of(here, places)
        here = here.model_copy(update={"tiers": here.slower, "promote_in": "trainer"})
        before = Engine(here, Events(), read_only=True)
        try:  # before anything is written, a marker included
            await before.start()
            _check(source, before, records, ram)
        finally:
            await whole(before.close(flush=False, keep_ram=True))
        target, begun = Engine(here, Events(), read_only=False), False
        await target.start()
        try:
            _check(source, target, records, ram)
            await _belong(source, target, records)
            if (tier := target.state.tiers[0]).blobs is not None:
                tier.blobs = _Target(tier.blobs)
            begun = True
            return await _copy_all(source, target, records, only=numbers is not None, progress=progress)
        finally:
            await whole(target.close(flush=begun, keep_ram=True))
    finally:
        await whole(source.close(flush=False, keep_ram=True))


async def _copy_all(
    source: Engine,
    target: Engine,
    records: Mapping[StepId, StepRecord],
    *,
    only: bool,
    progress: Callable[[Copied], None] | None,
) -> list[Copied]:
    """Copy the steps of ``records``; ``only`` these were asked for, so one that leaves the source is an error."""
    damaged = set[StepId]()
    if not only:
        damaged = {step for tier in source.state.tiers for step in tier.steps.damaged.not_stale()} - records.keys()
    copied: list[Copied] = []
    corrupt = [f"{step} cannot be read: its commit is damaged" for step in sorted(damaged)]
    for step, record in sorted(records.items()):
        try:
            written = await source.mode.looking(partial(_copy_one, source, target, step))
        except Corrupt as error:
            _log.error("%s is not copied: %s", step, error)
            corrupt.append(str(error))
        except (Moved, NotFound):
            if only:
                raise
            _log.warning("%s is not copied: it has left the source meanwhile", step)
        else:
            copied.append(Copied(step.step, step.serial, record.nbytes, written))
            if progress is not None:
                progress(copied[-1])
    if corrupt:
        raise Corrupt(
            f"{'; '.join(corrupt)}. {len(copied)} of {len(records) + len(damaged)} steps are in the other store"
        )
    return copied


async def _copy_one(source: Engine, target: Engine, step: StepId) -> int:
    tier = target.state.tiers[0]
    if step in tier.steps.held:
        return 0
    return await copy_step(target.state, target.collector, step, tier, origin=source.state)


async def _ram_of(here: StoreConfig, places: Collection[Place]) -> list[tuple[FoundRam, bool]]:
    """RAM on this machine that may be the target's; for each, whether its note names a place of the target."""
    seconds = min(tier.deadline for tier in here.tiers)
    found = await in_thread(find_ram, ram_root(here.ram.path if here.ram is not None else None))
    judged = [await judged_within(seconds, each) for each in found if each.steps and not each.lost]
    return [(each, notes([each], places)) for each in judged if not is_copy(each, places)]


def _check(
    source: Engine, target: Engine, records: Mapping[StepId, StepRecord], ram: Sequence[tuple[FoundRam, bool]]
) -> None:
    """Check that the target can take those steps beside its own. Raises `Conflict`."""
    state, marker, theirs = target.state, target.state.identity.marker, source.state.identity.marker
    tier, held = state.tiers[0], state.records()
    where = f"tier {tier.name!r} at {tier.config.location}"
    assert theirs is not None
    for each, noted in ram:
        alone = [StepId(*step) for step in each.steps if StepId(*step) not in held]
        if alone and (noted or (marker is not None and each.store == marker.store)):
            raise Conflict(
                f"the RAM at {each.folder} has {', '.join(map(str, alone))} of the store of {where}, which no tier "
                f"there holds; open that store once, so that they are promoted, or `tieredckpt forget` the RAM"
            )
    damaged = {step for each in state.tiers for step in each.steps.damaged}
    if marker is None or not (held or damaged):
        return
    if not all(marker.owns(record.store) for record in records.values()):
        raise Conflict(
            f"{where} holds steps of another store ({marker.store}; the source is {theirs.store}); copy to a place of "
            f"its own"
        )
    serials = {step.serial: step for step in (*damaged, *held)}
    first_own = min((step.serial for step, record in held.items() if not theirs.owns(record.store)), default=None)
    for step, record in sorted(records.items()):
        there = serials.get(step.serial)
        same = held.get(step)
        if (there is not None and there != step) or (
            same is not None and (same.store, same.saved_at) != (record.store, record.saved_at)
        ):
            raise Conflict(
                f"{where} holds another {there}, with the serial of {step}, which was saved there since the store was "
                f"copied; copy to a place of its own"
            )
        if there is None and first_own is not None and step.serial > first_own:
            raise Conflict(
                f"{where} has gone on by itself since the store was copied, from serial {first_own}, so {step} of the "
                f"source does not continue it; copy to a place of its own"
            )


async def _belong(source: Engine, target: Engine, records: Mapping[StepId, StepRecord]) -> None:
    """Name the source in the marker of a target without steps as a store that it was forked from."""
    identity, theirs = target.state.identity, source.state.identity.marker
    assert identity.marker is not None
    assert theirs is not None
    if all(identity.marker.owns(record.store) for record in records.values()):
        return
    identity.marker = StoreMarker(store=identity.marker.store, forked_from=(theirs.store, *theirs.ancestors))
    for each in target.state.tiers:
        if each.marker is not None:
            each.marker = identity.marker.at_version(each.format_version)
            await marker_file.write(each.store, each.marker)
