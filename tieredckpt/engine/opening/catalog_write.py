"""Writes the catalogs of a tier in the background: new entries since the last one, and small catalogs merged."""

from __future__ import annotations

import asyncio
import math
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
from numpy.typing import NDArray

from tieredckpt.blobs.base import BlobInfo
from tieredckpt.concurrency import together
from tieredckpt.engine import limits
from tieredckpt.engine.opening.catalog_read import stamp_of
from tieredckpt.engine.tier.catalog_cache import CatalogFile, Stamp
from tieredckpt.engine.tier.tier import Tier
from tieredckpt.format import layout
from tieredckpt.format.catalog import MAX_CATALOG, Catalog, CatalogStep, encode_catalog
from tieredckpt.format.manifest import StepId, StepRecord

__all__ = ["write_catalog"]

_CHUNKS_EACH = 2 << 20
"""About how many chunks one catalog lists, in 64 MiB."""
_STEP_BYTES_EACH = 64 << 20
"""About how many bytes of steps one catalog has: then none of several is larger than a reader takes."""
_LISTED_WITH_IT = 8
"""All steps are listed at once if the tier holds at most so many for each step that is looked for."""
_LARGE = 32 << 20
"""Bytes from which on a catalog is not merged with new entries."""


@dataclass(frozen=True, slots=True)
class _Plan:
    packs: Sequence[str]
    steps: Sequence[StepId]
    replaces: Sequence[str]
    """Catalogs to delete: the new one has their entries that are still of use."""


async def write_catalog(tier: Tier, store: str) -> bool:
    """Write a catalog of new entries if there are enough, and rewrite one that is mostly obsolete; whether it did.

    New entries are merged with the catalogs that are at most twice as large. So there are few catalogs, and each pack
    and step is written a few times altogether. Raises as the tier's store does.
    """
    if _plan(tier) is None:
        return False
    async with tier.packs.guard:  # nothing is committed or collected while the entries are gathered
        known = tier.steps.catalogued
        known.packs &= tier.packs.sizes.keys()
        known.steps &= tier.steps.held.keys()
        await _stamp(tier, tier.steps.held.keys() - known.steps)
        plan = _plan(tier)
        if plan is None:
            return False
        sizes = np.array([tier.packs.sizes[key] for key in plan.packs], np.uint64)
        stamps = [known.stamps[step] for step in plan.steps]  # before the await: a step may be evicted meanwhile
        steps = [_entry(step, tier.steps.held[step].record, known.stamps[step]) for step in plan.steps]
        duplicates = [(digest, at) for digest, places in tier.packs.duplicates.items() for at in places]
        counts, table = await asyncio.to_thread(tier.packs.index.listed, plan.packs, duplicates)
    nbytes = await asyncio.to_thread(lambda: np.array([len(msgspec.msgpack.encode(step)) for step in steps], np.int64))
    for packs, rows, some in _shares(counts, nbytes):
        catalog = Catalog(
            store,
            plan.packs[packs],
            sizes[packs],
            counts[packs].astype(np.uint32),
            table[rows],
            steps[some],
        )
        await _put(tier, catalog, dict(zip(plan.steps[some], stamps[some], strict=True)))
    for key in plan.replaces:
        await tier.store.delete(key)
        tier.steps.catalogued.files.pop(key, None)
    return True


def _plan(tier: Tier) -> _Plan | None:
    """The catalog to write; None if that can wait."""
    known = tier.steps.catalogued
    packs = tier.packs.sizes.keys() - known.packs - tier.packs.unlisted
    steps = set() if known.timeless else tier.steps.held.keys() - known.steps
    new = len(packs) + len(steps)
    due = new >= (1 if tier.store.traits.remote else limits.in_force.catalog_entries)
    replaces: list[str] = []
    alive = {
        key: (file.packs & tier.packs.sizes.keys(), file.steps & known.steps & tier.steps.held.keys())
        for key, file in known.files.items()
    }
    for key in sorted(alive, key=lambda key: sum(map(len, alive[key]))):
        its_packs, its_steps = alive[key]
        size, file = len(its_packs) + len(its_steps), known.files[key]
        mostly_gone = 2 * size <= file.listed
        if mostly_gone or (size <= 2 * (len(packs) + len(steps)) and file.nbytes < _LARGE):
            due |= mostly_gone
            replaces.append(key)
            packs |= its_packs
            steps |= its_steps
    return _Plan(sorted(packs), sorted(steps & known.stamps.keys()), replaces) if due else None


async def _stamp(tier: Tier, steps: set[StepId]) -> None:
    """Look up the stamps (size and time of the manifest) of steps that were committed since the tier was opened."""
    known = tier.steps.catalogued
    unknown = steps - known.stamps.keys()
    if known.timeless or not unknown:
        return
    folders = {step.folder: step for step in unknown}
    # One listing of all tells more than one of each, and takes longer where most are known.
    prefixes = [layout.STEPS] if len(unknown) * _LISTED_WITH_IT >= len(tier.steps.held) else list(folders)
    files: dict[StepId, dict[str, BlobInfo]] = {}

    async def look(prefix: str) -> None:
        async for info in tier.store.list(prefix):
            folder, _, name = info.key.rpartition("/")
            if (step := folders.get(folder + "/")) is not None:
                files.setdefault(step, {})[name] = info

    await together([look(prefix) for prefix in prefixes])
    for step, found in files.items():
        held = tier.steps.held.get(step)
        name = held.btree_key.rpartition("/")[2] if held is not None else ""
        if layout.MANIFEST not in found or name not in found:
            continue  # it is being retracted, or was committed anew meanwhile
        stamp = stamp_of(name, found)
        if stamp is None:
            known.timeless = True
        else:
            known.stamps[step] = stamp


def _shares(counts: NDArray[np.int64], nbytes: NDArray[np.int64]) -> Iterator[tuple[slice, slice, slice]]:
    """Divide packs, their chunks and steps among catalogs; one catalog is enough unless there is very much.

    ``counts`` has the chunks of each pack, ``nbytes`` the bytes of each step.
    """
    chunks, steps = (np.concatenate([[0], np.cumsum(each)]) for each in (counts, nbytes))
    pack = step = 0
    while pack < len(counts) or step < len(nbytes):
        last, end = _reach(chunks, pack, _CHUNKS_EACH), _reach(steps, step, _STEP_BYTES_EACH)
        yield slice(pack, last), slice(int(chunks[pack]), int(chunks[last])), slice(step, end)
        pack, step = last, end


def _reach(ends: NDArray[np.int64], start: int, most: int) -> int:
    return min(max(start + 1, int(np.searchsorted(ends, ends[start] + most, "right")) - 1), len(ends) - 1)


def _entry(step: StepId, record: StepRecord, stamp: Stamp) -> CatalogStep:
    return CatalogStep(
        step.step,
        step.serial,
        *stamp,
        line=record.line,
        restored_from=record.restored_from,
        saved_at=record.saved_at,
        nbytes=record.nbytes,
        metrics=record.metrics,
        ranks=record.ranks,
        store=record.store,
        run=record.run,
        began_after=None if math.isinf(record.began_after) else int(record.began_after),
    )


async def _put(tier: Tier, catalog: Catalog, stamps: Mapping[StepId, Stamp]) -> None:
    key = layout.catalog_key(secrets.token_hex(16))
    data = await asyncio.to_thread(encode_catalog, catalog)
    if len(data) > MAX_CATALOG:
        return  # one step with metrics beyond all measure: it is read at each opening
    await tier.store.put(key, [data])
    known = tier.steps.catalogued
    # What was committed anew meanwhile has another stamp, or none yet.
    steps = frozenset(step for step, stamp in stamps.items() if known.stamps.get(step) == stamp)
    packs = frozenset(catalog.packs)
    known.files[key] = CatalogFile(len(data), packs, steps, len(packs) + len(stamps))
    known.packs |= packs
    known.steps |= steps
