"""Finds out what a tier holds: steps by their manifests, chunks by the footers of the packs."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable
from functools import partial

from tieredckpt.blobs.base import ALIGNMENT
from tieredckpt.blobs.settle import together
from tieredckpt.engine.indexes import unique_extents
from tieredckpt.engine.tier import Held, Tier
from tieredckpt.errors import Corrupt, NotFound
from tieredckpt.format import layout, pack
from tieredckpt.format.manifest import StepId, StepIndex, find_record
from tieredckpt.format.ocdbt import Extent

__all__ = ["look_again", "pack_entries", "survey"]

_log = logging.getLogger("tieredckpt")

_PARALLEL_READS = 16
_LARGE_INDEX = 32 << 20
"""Bytes of an index of which not many are read at a time: they pass through memory whole."""
_SPARES = 8
"""Copies of one chunk that are remembered; a pack may list any number."""


async def survey(tier: Tier) -> None:
    """Fill in what ``tier`` knows of its content, from nothing. Raises as its blob store does."""
    tier.clear()
    manifests: set[StepId] = set()
    sizes: dict[StepId, int] = {}
    async for info in tier.store.list(layout.STEPS):
        folder, _, name = info.key.rpartition("/")
        parsed = layout.parse_step_folder(folder + "/")
        if parsed is None:
            continue
        step = StepId(serial=parsed[1], step=parsed[0])
        sizes[step] = sizes.get(step, 0) + info.size
        if name == "manifest.ocdbt":
            manifests.add(step)
    tier.index_bytes.update((step, sizes[step]) for step in manifests)
    await _all(partial(_find_step, tier, step) for step in sorted(manifests) if sizes[step] <= _LARGE_INDEX)
    for step in sorted(manifests):
        if sizes[step] > _LARGE_INDEX:
            await _find_step(tier, step)
    if tier.slab_index is not None:
        await _claim_extents(tier)
        await _remove_strays(tier)
    elif tier.ram is None:
        await _find_packs(tier)


async def _all(works: Iterable[Callable[[], Awaitable[None]]]) -> None:
    """Run all, a few at a time; the first error ends the others."""
    limit = asyncio.Semaphore(_PARALLEL_READS)

    async def limited(work: Callable[[], Awaitable[None]]) -> None:
        async with limit:
            await work()

    await together([limited(work) for work in works])


async def _find_step(tier: Tier, step: StepId) -> None:
    try:
        manifest, btree, btree_key = await tier.read_index(step)
        record = await asyncio.to_thread(find_record, manifest, btree, btree_key)
        if record.id != step:
            raise Corrupt(f"tier {tier.name!r}: the folder of {step} holds {record.id}")
    except (Corrupt, NotFound) as error:
        if isinstance(error, NotFound) and await _left(tier, step):
            return
        tier.damaged[step] = error
        _log.warning("tier %r: %s cannot be read there: %s", tier.name, step, error)
    else:
        tier.held[step] = Held(record, btree_key)


async def look_again(tier: Tier, step: StepId) -> None:
    """Read a commit once more that could not be read: a medium may fail, or lie, just once. Raises what it raises."""
    await _find_step(tier, step)
    if step in tier.held:
        del tier.damaged[step]
        _log.warning("tier %r: %s can be read there after all", tier.name, step)


async def _left(tier: Tier, step: StepId) -> bool:
    """Whether the step's writer evicted it since it was listed: a reader beside it is no judge of that."""
    try:
        await tier.store.stat(layout.manifest_key(step.step, step.serial))
    except NotFound:
        return True
    return False


async def _claim_extents(tier: Tier) -> None:
    """Count what every step of the slab uses, the newest first; those that cannot be read, or do not fit, leave it."""
    assert tier.ram is not None
    for step in sorted(tier.held, reverse=True):
        try:
            index = await tier.load_index(step)
            if not _adopt(tier, index):
                raise Corrupt(f"tier {tier.name!r}: the extents of {step} do not fit the slab")
        except (Corrupt, NotFound) as error:
            tier.condemn(step, error)
    for step, problem in tuple(tier.damaged.items()):
        _log.warning("tier %r: %s was dropped from RAM, it cannot be read: %s", tier.name, step, problem)
        await asyncio.to_thread(tier.ram.retire, layout.manifest_key(step.step, step.serial))
        tier.drop(step)


async def _remove_strays(tier: Tier) -> None:
    """Delete what no committed step refers to: nobody else writes to RAM, so it was left by one that died."""
    known = {held.btree_key for held in tier.held.values()}
    known |= {layout.manifest_key(step.step, step.serial) for step in tier.held}
    async for info in tier.store.list(layout.STEPS):
        if info.key not in known:
            await tier.store.delete(info.key)


def _adopt(tier: Tier, index: StepIndex) -> bool:
    """Count the step's use of its chunks in the slab; False, and nothing counted, if they do not fit."""
    assert tier.slab_index is not None
    assert tier.ram is not None
    taken: list[bytes] = []
    extents = unique_extents(index.arrays)
    chunks = (chunk for array in index.arrays.values() for chunk in array.chunks)
    if any(isinstance(chunk.where, Extent) and extents[chunk.digest] != chunk.where for chunk in chunks):
        return False  # what lies at the other extent may belong to another step
    for digest, extent in extents.items():
        fits = extent.path == tier.ram.slab_key and tier.slab_index.adopt(digest, extent.offset, extent.length)
        if not fits:
            tier.slab_index.drop(taken)
            return False
        taken.append(digest)
    return True


async def _find_packs(tier: Tier) -> None:
    found = [info async for info in tier.store.list(layout.PACKS) if layout.parse_pack_key(info.key) is not None]
    for info in found:
        tier.packs[info.key] = info.size
        tier.orphans[info.key] = info.modified or time.time()
    await _all(partial(_find_chunks, tier, info.key, info.size) for info in found)


async def pack_entries(tier: Tier, key: str, size: int) -> list[pack.PackEntry]:
    """What the footer of a pack lists. Raises `Corrupt`, `NotFound`, `TierUnavailable`."""
    tail = bytearray(min(size, ALIGNMENT))
    await tier.store.get_into(key, size - len(tail), memoryview(tail))
    offset, length = pack.footer_range(bytes(tail), size)
    footer = tail[len(tail) - length :] if length <= len(tail) else bytearray(length)
    if length > len(tail):
        await tier.store.get_into(key, offset, memoryview(footer))
    return pack.decode_footer(bytes(footer), size)


async def _find_chunks(tier: Tier, key: str, size: int) -> None:
    try:
        entries = await pack_entries(tier, key, size)
    except (Corrupt, NotFound) as error:
        _log.warning("tier %r: pack %s has no readable footer: %s", tier.name, key, error)
        return
    for entry in entries:
        extent = Extent(key, entry.offset, entry.length)
        if tier.chunks.setdefault(entry.digest, extent) != extent:
            spares = tier.spares.setdefault(entry.digest, [])
            if len(spares) < _SPARES:
                spares.append(extent)
