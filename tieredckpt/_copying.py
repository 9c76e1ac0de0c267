"""Copies steps from one store to another: only what the other lacks, each chunk verified on its way."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from tieredckpt._arguments import checked_step
from tieredckpt.concurrency import whole
from tieredckpt.config import StoreConfig, load
from tieredckpt.engine.engine import Engine
from tieredckpt.engine.loop import EngineLoop
from tieredckpt.engine.promoting.copy_step import copy_step
from tieredckpt.engine.restoring.moved import Moved
from tieredckpt.engine.tier import marker_file
from tieredckpt.errors import Conflict, Corrupt, Invalid, NotFound
from tieredckpt.events import Events
from tieredckpt.format.manifest import StepId, StepRecord, StoreMarker

__all__ = ["Copied", "copy_steps"]

_log = logging.getLogger("tieredckpt")

Source = str | os.PathLike[str] | Mapping[str, Any] | StoreConfig
"""What `tieredckpt.CheckpointStore.open` takes."""


@dataclass(frozen=True, slots=True)
class Copied:
    """A step that is in both stores now."""

    step: int
    serial: int
    nbytes: int
    """Bytes of all its arrays."""
    written: int
    """Bytes that were written for it; 0 if the other store had them all."""


async def copy_steps(
    source: Source,
    target: Source,
    steps: Sequence[int] | None = None,
    *,
    progress: Callable[[Copied], None] | None = None,
) -> list[Copied]:
    """Copy steps to another store, oldest save first, with metrics, provenance and branches.

    Nothing of the source is changed, and a training may go on there. Of the target, the nearest tier that is not RAM is
    written, where chunks and steps that it has already stay as they are; so a copy that was cut off is repeated. A
    target that holds no steps gets an identity of its own, as `tieredckpt fork` gives.

    Args:
        source: as `CheckpointStore.open` takes it.
        target: as well; its policies decide later which steps stay.
        steps: which, by number; None for all, those off the branch included.
        progress: called with each step that has been copied, or was there, from another thread.

    Raises:
        NotFound: there is no such store, or no such step.
        Invalid: of the configurations, or both are in one place.
        Conflict: another process writes to the target; or it holds steps of another store, or another step under the
            same number and serial.
        Corrupt: a chunk is intact nowhere in the source; the array is named. Steps with such chunks are not copied, and
            all others were.
        NoSpace, TierUnavailable: of the target, or of the source if nothing of it answers.
    """
    numbers = None if steps is None else [checked_step(step) for step in steps]
    there, here = load(source), load(target)
    here = here.model_copy(update={"tiers": here.slower, "promote_in": "trainer"})
    if not here.tiers:
        raise Invalid("a store of RAM alone cannot be copied to: give a folder or a URL, or a configuration with one")
    if common := {tier.location for tier in there.slower} & {tier.location for tier in here.tiers}:
        raise Invalid(f"both stores are at {', '.join(map(str, common))}; copy to a place of its own")
    loop = EngineLoop("tieredckpt copy")
    try:
        return await loop.call(_copy(there, here, numbers, progress))
    finally:
        loop.soon(loop.thread.end)
        await loop.joined()


async def _copy(
    there: StoreConfig,
    here: StoreConfig,
    numbers: Collection[int] | None,
    progress: Callable[[Copied], None] | None,
) -> list[Copied]:
    source, target = Engine(there, Events(), read_only=True), Engine(here, Events(), read_only=False)
    await source.start()
    try:
        if source.state.identity.marker is None:
            raise NotFound(f"there is no store at {', '.join(str(tier.location) for tier in there.slower)}")
        await target.start()
        try:
            return await _copy_all(source, target, numbers, progress)
        finally:
            await whole(target.close(flush=True, keep_ram=True))
    finally:
        await whole(source.close(flush=False, keep_ram=True))


async def _copy_all(
    source: Engine, target: Engine, numbers: Collection[int] | None, progress: Callable[[Copied], None] | None
) -> list[Copied]:
    records, damaged = dict(source.state.records()), set[StepId]()
    if numbers is None:
        damaged = {step for tier in source.state.tiers for step in tier.steps.damaged} - records.keys()
    else:
        records = {step: records[step] for step in {source.state.find(number) for number in numbers}}
    await _belong(source, target, {record.store for record in records.values()})
    copied: list[Copied] = []
    corrupt = [f"{step} cannot be read: its commit is damaged" for step in sorted(damaged)]
    for step, record in sorted(records.items()):
        try:
            written = await source.looking(partial(_copy_one, source, target, step, record))
        except Corrupt as error:
            _log.error("%s is not copied: %s", step, error)
            corrupt.append(str(error))
        except (Moved, NotFound):
            if numbers is not None:
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


async def _copy_one(source: Engine, target: Engine, step: StepId, record: StepRecord) -> int:
    tier = target.state.tiers[0]
    if (held := tier.steps.held.get(step)) is not None:
        if (held.record.store, held.record.saved_at) != (record.store, record.saved_at):
            raise Conflict(
                f"tier {tier.name!r} at {tier.store.location} holds another {step}, with this serial, which was saved "
                f"there since the store was copied; copy to a place of its own"
            )
        return 0
    return await copy_step(target.state, target.collector, step, tier, origin=source.state)


async def _belong(source: Engine, target: Engine, stores: Collection[str]) -> None:
    """See that steps of those stores belong to the target. Raises `Conflict`."""
    tier, identity, theirs = target.state.tiers[0], target.state.identity, source.state.identity.marker
    assert identity.marker is not None
    assert theirs is not None
    if all(map(identity.marker.owns, stores)):
        return
    if any(each.steps.held or each.steps.damaged for each in target.state.tiers):
        raise Conflict(
            f"tier {tier.name!r} at {tier.store.location} holds steps of another store ({identity.marker.store}; the "
            f"source is {theirs.store}); copy to a place of its own"
        )
    identity.marker = StoreMarker(store=identity.marker.store, forked_from=(theirs.store, *theirs.ancestors))
    for each in target.state.tiers:
        if each.marker is not None:
            await marker_file.write(each.store, identity.marker)
            each.marker = identity.marker
