"""Scans a tier: steps by their manifests, chunks by the footers of packs, or both by catalogs."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tieredckpt.blobs.base import ALIGNMENT, BlobInfo
from tieredckpt.concurrency import together
from tieredckpt.engine import limits
from tieredckpt.engine.opening.catalog_read import Footers, believed, read_catalogs, stamp_of
from tieredckpt.engine.opening.unreadable import Reads
from tieredckpt.engine.tier import marker_file, pin_file, step_index
from tieredckpt.engine.tier.held import Held
from tieredckpt.engine.tier.index_cache import unique_extents
from tieredckpt.engine.tier.packs import Packs
from tieredckpt.engine.tier.ram import Ram
from tieredckpt.engine.tier.steps import IndeterminateDelete, Stale, Steps, Unreadable
from tieredckpt.engine.tier.tier import Tier
from tieredckpt.errors import Corrupt, NotFound, TieredCkptError, TierUnavailable
from tieredckpt.format import layout, ocdbt, pack
from tieredckpt.format.manifest import StepId, StepIndex, decode_step, find_record
from tieredckpt.format.ocdbt import Extent

__all__ = ["is_unchanged", "look_again", "pack_table", "scan_tier", "scan_tier_again", "step_folders"]

_log = logging.getLogger("tieredckpt")

_PARALLEL_READS = 16
_LISTINGS = 8
"""How often at most a tier is listed that keeps changing."""
_LARGE_INDEX = 32 << 20
"""Bytes from which on an index is read alone: indexes pass through memory whole."""


async def scan_tier(tier: Tier, store: str | None = None, listed: Sequence[BlobInfo] | None = None) -> None:
    """Scan the whole content of ``tier``. Raises as its blob store does.

    A step with a file that cannot be read, though the tier works, counts as damaged (`Unreadable`).

    Steps and packs that its catalogs have and its listing confirms are not read, except for the newest step that can
    be read: a restore takes that one. What was known before stays known until all is read, or if that fails.

    Args:
        tier: to be scanned.
        store: whose catalogs are believed.
        listed: all that the tier holds now; None to list it.
    """
    steps = tier.steps
    before, pinned = steps.known(), set(steps.pinned)
    steps.scanning = True
    read = replace(tier, steps=Steps(impaired=steps.impaired), packs=Packs())
    try:
        await _scan(read, store, listed)
        for step in before - steps.known():
            read.steps.drop(step)  # it left, perhaps after it was read
        read.steps.pinned -= pinned - steps.pinned
        _leave_in_doubt(steps, read)
        tier.exchange(read.steps, read.packs)
    finally:
        steps.scanning = False


def _leave_in_doubt(steps: Steps, read: Tier) -> None:
    """Take over the failed deletions, of which some may have ended after their steps were read."""
    for step, error in steps.damaged.items():
        if isinstance(error, IndeterminateDelete):
            if (held := read.steps.held.get(step)) is not None:
                read.quarantine(step, IndeterminateDelete(str(error), held))
            else:
                read.steps.damaged.setdefault(step, error)


async def _scan(tier: Tier, store: str | None, listed: Sequence[BlobInfo] | None) -> None:
    folders = await _list_steps(tier, listed)
    catalogs = []
    if (ram := tier.ram) is None:
        await _list_packs(tier, listed)
        tier.steps.pinned = pin_file.pinned(await _in_folder(tier, layout.PINS, listed))
        if store is not None:
            catalogs = await read_catalogs(tier, store, await _in_folder(tier, layout.CATALOGS, listed))
    footers, records = believed(tier, catalogs, folders)
    unread = sorted(_committed(folders) - records.keys())
    reads = Reads(tier)
    read = partial(_find_step, reads, folders)
    small: list[StepId] = []
    large: list[StepId] = []
    for step in unread:  # before any is read: one that is deleted meanwhile has no size any more
        (large if tier.steps.indexes.nbytes.get(step, 0) > _LARGE_INDEX else small).append(step)
    await together(map(read, small), _PARALLEL_READS)
    for step in large:
        await read(step)
    rest = sorted(records)
    while rest and (not tier.steps.held or max(tier.steps.held) < rest[-1]):
        await read(rest.pop())
    reads.check()
    for step, error in reads.unreadable.items():
        _quarantine(tier, step, error)
    for step in rest:
        record, btree_key = records[step]
        tier.steps.held[step] = Held(record, btree_key, whole=False)
    if ram is None:
        unlisted = tier.packs.sizes.keys() - tier.steps.catalogued.packs
        finding = [_find_chunks(reads, key, tier.packs.sizes[key], footers) for key in sorted(unlisted)]
        await together(finding, _PARALLEL_READS)
        tier.packs.duplicates.update(await asyncio.to_thread(_fill, tier, footers))
    elif ram.slab.writable:
        await _claim_extents(tier, ram)
        await _claim_unread(tier, ram)
        await _remove_strays(tier)


async def _in_folder(tier: Tier, folder: str, listed: Sequence[BlobInfo] | None) -> list[BlobInfo]:
    if listed is None:
        return [info async for info in tier.store.list(folder)]
    return [info for info in listed if info.key.startswith(folder)]


def step_folders(listed: Iterable[BlobInfo]) -> dict[StepId, dict[str, BlobInfo]]:
    """The files of each step's folder, by name, from a listing of ``steps/``."""
    found: dict[str, dict[str, BlobInfo]] = {}
    for info in listed:
        folder, _, name = info.key.rpartition("/")
        found.setdefault(folder, {})[name] = info
    parsed = {folder: layout.parse_step_folder(folder + "/") for folder in found}
    return {StepId(serial=of[1], step=of[0]): found[folder] for folder, of in parsed.items() if of is not None}


async def _list_steps(tier: Tier, listed: Sequence[BlobInfo] | None = None) -> dict[StepId, dict[str, BlobInfo]]:
    steps = step_folders(await _in_folder(tier, layout.STEPS, listed))
    for step, files in steps.items():
        if layout.MANIFEST in files:
            tier.steps.indexes.nbytes[step] = sum(info.size for info in files.values())
    return steps


def _committed(folders: Mapping[StepId, Mapping[str, BlobInfo]]) -> set[StepId]:
    return {step for step, files in folders.items() if layout.MANIFEST in files}


async def _pack_sizes(tier: Tier) -> dict[str, int]:
    return {info.key: info.size async for info in tier.store.list(layout.PACKS) if layout.parse_pack_key(info.key)}


async def scan_tier_again(tier: Tier, *, packs: bool = False, but: Collection[StepId] = ()) -> bool:
    """Find steps that came to a tier, left it or were committed again since `scan_tier`; reads those alone.

    The tier's writer knows these steps; this is for other processes. While a listing runs, a step may leave for one
    that comes too late to be listed: so the tier is listed until nothing changes. If every step seems to have left, it
    is listed `_LISTINGS` times: on a tier that keeps one step, each listing may miss the step of that moment.

    Args:
        tier: scanned before.
        packs: learn which packs there are as well, though not what they hold.
        but: steps to ignore.

    Returns:
        Whether the tier holds steps of another store.

    Raises as its blob store does; what was known stays known then.
    """
    foreign, had_some = False, bool(tier.steps.held)
    for _ in range(_LISTINGS):
        before = dict(tier.steps.held)
        await _list_again(tier, but)
        new = [held for step, held in tier.steps.held.items() if before.get(step) is not held]
        foreign |= tier.marker is not None and not all(tier.marker.owns(held.record.store) for held in new)
        if not new and before.keys() == tier.steps.held.keys() and (before or not had_some):
            break
    if packs and not tier.in_memory:
        sizes = await _pack_sizes(tier)
        for key in tier.packs.sizes.keys() - sizes.keys():
            del tier.packs.sizes[key]
        tier.packs.sizes.update(sizes)
    return foreign and not await marker_file.is_still(tier.store, tier.marker)


async def is_unchanged(tier: Tier) -> bool:
    """Whether a tier lists the steps and packs that are known there, and no others. Raises as its blob store does."""
    folders, packs = await _list_steps(tier), await _pack_sizes(tier)
    known = {*tier.steps.held, *tier.steps.parts, *tier.steps.damaged}
    return (
        _committed(folders) == known
        and packs == dict(tier.packs.sizes)
        and all(_is_known(tier, step, folders[step]) for step in tier.steps.held)
    )


async def _list_again(tier: Tier, but: Collection[StepId]) -> None:
    folders = await _list_steps(tier)
    committed = _committed(folders) - {*but}
    unknown = [step for step in committed if not _is_known(tier, step, folders[step])]
    reads, found = Reads(tier), dict[StepId, Held | TieredCkptError | None]()

    async def read(step: StepId) -> None:
        found[step] = await reads.of(step, partial(_read_step, tier, step))

    await together(map(read, unknown), _PARALLEL_READS)
    reads.check()
    for step, each in found.items():
        _apply(tier, step, folders[step], each)
    for step in (tier.steps.held.keys() | tier.steps.damaged.keys()) - committed:
        if tier.steps.has_own(step) or step in tier.steps.damaged:  # not what ranks have in RAM
            tier.steps.drop(step)


def _apply(tier: Tier, step: StepId, files: Mapping[str, BlobInfo], found: Held | TieredCkptError | None) -> None:
    known_problem = step in tier.steps.damaged
    tier.steps.drop(step)  # with all that is remembered of it
    if found is None:
        return
    tier.steps.indexes.nbytes[step] = sum(info.size for info in files.values())
    if isinstance(found, Held):
        tier.steps.held[step] = found
        if (stamp := stamp_of(found.btree_key.rpartition("/")[2], files)) is not None:
            tier.steps.catalogued.stamps[step] = stamp
        return
    tier.steps.damaged.quarantine(step, found, tier.packs.sizes)
    if not known_problem:
        _log.warning("tier %r: %s cannot be read there: %s", tier.name, step, found)


def _is_known(tier: Tier, step: StepId, files: Mapping[str, BlobInfo]) -> bool:
    held = tier.steps.held.get(step)
    if held is None:
        problem = tier.steps.damaged.get(step)  # a file that hangs would hold up each call
        if isinstance(problem, Stale):
            return stamp_of(problem.btree_key.rpartition("/")[2], files) == problem.stamp
        return isinstance(problem, Unreadable) and time.monotonic() - problem.since < limits.in_force.last_retry
    return stamp_of(held.btree_key.rpartition("/")[2], files) == tier.steps.catalogued.stamps.get(step)


async def _list_packs(tier: Tier, listed: Sequence[BlobInfo] | None) -> None:
    now = time.time()
    for info in await _in_folder(tier, layout.PACKS, listed):
        if layout.parse_pack_key(info.key) is not None:
            tier.packs.sizes[info.key] = info.size
            tier.packs.orphans[info.key] = info.modified or now


def _fill(tier: Tier, footers: Footers) -> dict[bytes, list[Extent]]:
    counts, tables = [np.empty(0, np.int64), *footers.counts], [np.empty(0, pack.RECORD), *footers.tables]
    return tier.packs.index.fill(footers.paths, np.concatenate(counts), np.concatenate(tables))


async def _find_step(reads: Reads, folders: Mapping[StepId, Mapping[str, BlobInfo]], step: StepId) -> None:
    tier = reads.tier
    found = await reads.of(step, partial(_read_step, tier, step))
    if isinstance(found, TieredCkptError) and step not in reads.unreadable:
        found = await reads.of(step, partial(_read_step, tier, step))  # what lies just once would cost the newest step
    match found:
        case Held() as held:
            tier.steps.held[step] = held
            stamp = stamp_of(held.btree_key.rpartition("/")[2], folders[step])
            if stamp is None:
                tier.steps.catalogued.timeless = True
            elif tier.steps.catalogued.stamps.setdefault(step, stamp) != stamp:
                tier.steps.catalogued.forget(step)
        case TieredCkptError() as error if step not in reads.unreadable:  # which shows when all are read
            _quarantine(tier, step, error)


def _quarantine(tier: Tier, step: StepId, error: TieredCkptError) -> None:
    tier.steps.damaged.quarantine(step, error, tier.packs.sizes)
    tier.steps.catalogued.forget(step)
    _log.warning("tier %r: %s cannot be read there: %s", tier.name, step, error)


async def _read_step(tier: Tier, step: StepId) -> Held | TieredCkptError | None:
    """The step as it is held, or the error of its commit; None when it is not there any more."""
    try:
        manifest, btree, btree_key = await step_index.read(tier, step)
        record = await asyncio.to_thread(find_record, manifest, btree, btree_key)
        step_index.check_record(tier, step, record)
    except (Corrupt, NotFound) as error:
        # Its writer may evict it while others read.
        return None if isinstance(error, NotFound) and not await step_index.is_committed(tier, step) else error
    return Held(record, btree_key)


async def look_again(tier: Tier, step: StepId) -> bool:
    """Read an unreadable commit once more: a medium may fail, or give wrong bytes, just once.

    Returns whether it turned out to be gone. Raises `TierUnavailable`.
    """
    before = tier.steps.damaged[step]
    if isinstance(before, (TierUnavailable, Stale)):
        return False  # it can be read, and is not to be
    found = await _read_step(tier, step)
    if tier.steps.damaged.get(step) is not before:
        return False  # meanwhile it was evicted, or committed anew
    if isinstance(found, Held):
        del tier.steps.damaged[step]
        tier.steps.held[step] = found
        _log.warning("tier %r: %s can be read there after all", tier.name, step)
    elif found is None:
        tier.steps.drop(step)
    elif isinstance(before, Unreadable):
        tier.steps.damaged.quarantine(step, found, tier.packs.sizes)
    else:
        tier.steps.damaged[step] = found
    return found is None


async def _claim_extents(tier: Tier, ram: Ram) -> None:
    """Claim the extents of every step in the slab, newest first; drop steps that are unreadable or overlap."""
    for step in sorted(tier.steps.held, reverse=True):
        try:
            index = await step_index.load(tier, step)
            if not _adopt(ram, index):
                raise Corrupt(f"tier {tier.name!r}: the extents of {step} do not fit the slab")
        except (Corrupt, NotFound) as error:
            tier.quarantine(step, error)
    for step, problem in tuple(tier.steps.damaged.items()):
        _log.warning("tier %r: %s was dropped from RAM, it cannot be read: %s", tier.name, step, problem)
        await asyncio.to_thread(ram.store.retire, step.manifest_key)
        tier.steps.drop(step)


async def _claim_unread(tier: Tier, ram: Ram) -> None:
    """Claim the extents of evicted steps that a process is still reading."""
    for left in await asyncio.to_thread(ram.store.still_read):
        try:
            index = await asyncio.to_thread(decode_step, left.manifest, left.index, ocdbt.read_root(left.manifest).path)
        except Corrupt as error:
            _log.warning("tier %r: a step that is still read there cannot be told: %s", tier.name, error)
            continue
        if _adopt(ram, index):
            ram.retracted.append((left.unread, list(unique_extents(index.arrays))))


async def _remove_strays(tier: Tier) -> None:
    """Delete files that no committed step refers to: RAM has one writer, so a dead writer has left them."""
    known = {held.btree_key for held in tier.steps.held.values()}
    known |= {step.manifest_key for step in tier.steps.held}
    async for info in tier.store.list(layout.STEPS):
        if info.key not in known:
            await tier.store.delete(info.key)


def _adopt(ram: Ram, index: StepIndex) -> bool:
    """Count the step's use of its chunks in the slab; False, and nothing counted, if they do not fit."""
    taken: list[bytes] = []
    extents = unique_extents(index.arrays)
    chunks = (chunk for array in index.arrays.values() for chunk in array.chunks)
    if any(isinstance(chunk.where, Extent) and extents[chunk.digest] != chunk.where for chunk in chunks):
        return False  # what lies at the other extent may belong to another step
    for digest, extent in extents.items():
        fits = extent.path == ram.store.slab_key and ram.index.adopt(digest, extent.offset, extent.length)
        if not fits:
            ram.index.drop(taken)
            return False
        taken.append(digest)
    return True


async def pack_table(tier: Tier, key: str, size: int) -> NDArray[Any]:
    """Entries in the footer of a pack, of dtype `RECORD`; the tier remembers whether they are compressed.

    Raises `Corrupt`, `NotFound`, `TierUnavailable`.
    """
    tail = bytearray(min(size, ALIGNMENT))
    await tier.store.get_into(key, size - len(tail), memoryview(tail))
    offset, length = pack.footer_range(bytes(tail), size)
    footer = tail[len(tail) - length :] if length <= len(tail) else bytearray(length)
    if length > len(tail):
        await tier.store.get_into(key, offset, memoryview(footer))
    table = pack.decode_table(bytes(footer), size)
    tier.packs.compressed |= pack.is_compressed(bytes(footer))
    return table


async def _find_chunks(reads: Reads, key: str, size: int, footers: Footers) -> None:
    tier = reads.tier
    try:
        table = await pack_table(tier, key, size)
    except (Corrupt, NotFound, TierUnavailable) as error:
        if isinstance(error, TierUnavailable):
            await reads.note(error)
        tier.packs.unlisted.add(key)
        _log.warning("tier %r: pack %s has no readable footer: %s", tier.name, key, error)
    else:
        footers.add([key], np.array([len(table)]), table)
