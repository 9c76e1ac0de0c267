"""Repairs damaged chunks and commits of a step on a tier, with what other tiers or this process have of it."""

from __future__ import annotations

import logging
from collections.abc import Container, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tieredckpt.blobs.ram.slab import page_aligned
from tieredckpt.concurrency import in_thread, whole
from tieredckpt.engine.keeping.collector import Collector
from tieredckpt.engine.promoting.copy_step import copy_step
from tieredckpt.engine.restoring.deriving import open_source
from tieredckpt.engine.restoring.source import Damage, StepSource
from tieredckpt.engine.state.state import State
from tieredckpt.engine.tier import commit_file, step_index
from tieredckpt.engine.tier.chunk_reader import read_chunk
from tieredckpt.engine.tier.index_cache import unique_extents
from tieredckpt.engine.tier.ram import Ram
from tieredckpt.engine.tier.tier import Tier
from tieredckpt.errors import Corrupt, NotFound, TieredCkptError, TierUnavailable
from tieredckpt.events import ChunkRepaired
from tieredckpt.format import layout
from tieredckpt.format.digest import digest
from tieredckpt.format.manifest import ArrayIndex, Chunk, StepId, StepIndex
from tieredckpt.format.ocdbt import Extent

__all__ = ["Unrepaired", "repair_chunks", "repair_index"]

_log = logging.getLogger("tieredckpt")


@dataclass(frozen=True, slots=True)
class Unrepaired:
    """Chunks that stay damaged on a tier, and why. With a `Corrupt` they are intact nowhere: lost."""

    digests: tuple[bytes, ...]
    error: TieredCkptError


async def repair_chunks(state: State, collector: Collector, step: StepId, damage: Iterable[Damage]) -> list[Unrepaired]:
    """Repair damaged chunks on every tier; returns those that could not be repaired, which do not stop the others."""
    by_tier: dict[str, dict[bytes, Damage]] = {}
    for found in damage:
        by_tier.setdefault(found.tier.name, {}).setdefault(found.digest, found)  # that of the step's own place first
    unrepaired: list[Unrepaired] = []
    for name, chunks in by_tier.items():
        tier, digests = state.tier(name), frozenset(chunks)
        try:
            left = await _repair_inline(state, collector, step, tier, chunks)
            if tier.ram is not None:
                left += await _repair_slab(state, step, tier, tier.ram, chunks)
            else:
                left += await _repair_packs(state, collector, step, tier, chunks)
        except TieredCkptError as error:
            if not tier.steps.keeps(step):
                continue  # evicted meanwhile, and nothing is left to repair
            left = [Unrepaired(tuple(digests), error)]
        tier.steps.mend(step, digests.difference(*(each.digests for each in left)))
        for each in left:
            # Where a chunk is lost, no copy is good, nor can mend another.
            for other in state.tiers if isinstance(each.error, Corrupt) else (tier,):
                other.steps.impair(step, each.digests)
                other.packs.doubt(each.digests)
            _log.error("%s could not be repaired on tier %r: %s", step, name, each.error)
        unrepaired += left
    return unrepaired


async def _repair_inline(
    state: State, collector: Collector, step: StepId, tier: Tier, chunks: dict[bytes, Damage]
) -> list[Unrepaired]:
    """Repair chunks inside the index: commit a new index with the chunks of another tier."""
    left: list[Unrepaired] = []
    repaired: dict[str, ArrayIndex] = {}
    origin: list[tuple[str, str, int]] = []
    async with open_source(state, step, tier) as source:
        held = tier.steps.own(step)
        for key, array, ordinal, chunk in _places(source, chunks):
            if isinstance(chunk.where, Extent) or digest(chunk.where) == chunk.digest:  # as repaired since
                continue
            nbytes = array.grid.cell_nbytes
            async with state.scratch.lend(page_aligned(nbytes)) as memory:
                if (good := await _read_good(source, chunks[chunk.digest], key, ordinal, memory, left)) is None:
                    continue
                origin.append((key, good.name, nbytes))
                better = [*repaired.get(key, array).chunks]
                better[ordinal] = Chunk(chunk.digest, memory[:nbytes].tobytes())
                repaired[key] = ArrayIndex(array.grid, array.dtype, better)
    if repaired:
        index = StepIndex(source.index.record, {**source.index.arrays, **repaired})
        why = Corrupt(f"tier {tier.name!r}, {step}: bytes of {next(iter(repaired))!r} in the index are damaged")
        anew = step_index.is_replaced(tier, step, held)
        if anew or not await repair_index(state, collector, step, tier, why, index):
            return await _repair_inline(state, collector, step, tier, chunks)  # from the index that is there by now
        for key, name, nbytes in origin:
            state.events.emit(ChunkRepaired(step.step, layout.array_key(key), tier.name, name, nbytes))
    return left


async def _repair_slab(
    state: State, step: StepId, tier: Tier, ram: Ram, chunks: dict[bytes, Damage]
) -> list[Unrepaired]:
    left: list[Unrepaired] = []
    async with open_source(state, step, tier) as source:
        for key, array, ordinal, chunk in _places(source, chunks):
            if not isinstance(chunk.where, Extent):
                continue
            found = chunks.pop(chunk.digest)
            nbytes = array.grid.cell_nbytes
            async with state.scratch.lend(page_aligned(nbytes)) as memory:
                if (good := await _read_good(source, found, key, ordinal, memory, left)) is None:
                    continue
                lies_at = ram.memory(chunk.where)[:nbytes]
                await in_thread(np.copyto, lies_at, memory[:nbytes], pool=state.pool)
                ram.index.trust(chunk.digest, chunk.where.offset)
            state.events.emit(ChunkRepaired(step.step, layout.array_key(key), tier.name, good.name, nbytes))
    return left


async def _repair_packs(
    state: State, collector: Collector, step: StepId, tier: Tier, chunks: dict[bytes, Damage]
) -> list[Unrepaired]:
    """Write intact bytes of chunks into a new pack, and commit an index that points there: packs are immutable."""
    lost: dict[bytes, Extent] = {}
    origin: dict[bytes, tuple[str, int]] = {}
    left: list[Unrepaired] = []
    known = {digest: tier.packs.index.get(digest) for digest in chunks}
    async with open_source(state, step, tier) as source:
        held = tier.steps.own(step)
        for key, array, ordinal, chunk in _places(source, chunks):
            if not isinstance(chunk.where, Extent) or chunk.digest in origin or chunk.digest in lost:
                continue
            if chunks[chunk.digest].where not in (None, chunk.where):
                continue  # it was repaired since
            nbytes = array.grid.cell_nbytes
            async with state.scratch.lend(page_aligned(nbytes)) as memory:
                if (good := await _read_good(source, chunks[chunk.digest], key, ordinal, memory, left)) is None:
                    lost[chunk.digest] = chunk.where
                else:
                    origin[chunk.digest] = good.name, nbytes
    async with tier.packs.guard:
        if not (anew := step_index.is_replaced(tier, step, held)):
            for digest, found in chunks.items():
                # Also what is lost: a step to come that has it writes it anew. Not what another has written since.
                there = tier.packs.index.get(digest)
                if there == known[digest] if digest in lost else found.where in (None, there):
                    tier.packs.forget(digest)
    if anew:  # with what was lost, perhaps
        return await _repair_packs(state, collector, step, tier, chunks)
    if not origin:
        return left
    known_lost = tier.steps.lacking(step) - origin.keys()
    lost |= {digest: where for digest, where in unique_extents(source.index.arrays).items() if digest in known_lost}
    await copy_step(state, collector, step, tier, again=True, lost=lost)
    for digest, (name, nbytes) in origin.items():
        state.events.emit(ChunkRepaired(step.step, chunks[digest].key, tier.name, name, nbytes))
    with suppress(TieredCkptError):  # what they leave behind goes with another collection
        await collector.collect(tier, orphans=False)
    return left


def _places(source: StepSource, chunks: Container[bytes]) -> Iterator[tuple[str, ArrayIndex, int, Chunk]]:
    """Where the damaged chunks are: key of the array, the array, ordinal in it, and the chunk."""
    for key, array in source.index.arrays.items():
        for ordinal, chunk in enumerate(array.chunks):
            if chunk.digest in chunks:
                yield key, array, ordinal, chunk


async def _read_good(
    source: StepSource, found: Damage, key: str, ordinal: int, memory: npt.NDArray[np.uint8], left: list[Unrepaired]
) -> Tier | None:
    """Fill ``memory`` with the intact bytes of a damaged chunk; the tier read, or None with an entry in ``left``.

    Other places come in the order of `StepSource.candidates`, and last the damaged one.
    """
    try:
        return await source.read(key, ordinal, memory, bad=found.tier)
    except (Corrupt, TierUnavailable) as error:
        if isinstance(found.error, Corrupt):  # the bytes may have come wrong just once
            array = source.index.arrays[key]
            chunk, into = array.chunks[ordinal], memory[: array.grid.cell_nbytes]
            with suppress(Corrupt, NotFound, TierUnavailable):
                await read_chunk(found.tier, chunk.where, chunk.digest, into, source.state.pool)
                return found.tier
        left.append(Unrepaired((found.digest,), error))
        return None


async def repair_index(
    state: State,
    collector: Collector,
    step: StepId,
    tier: Tier,
    error: TieredCkptError,
    remembered: StepIndex | None = None,
) -> bool:
    """Repair an unreadable commit: commit again, from memory or from another tier, or drop the step from RAM.

    ``error`` is what is wrong with the commit, ``remembered`` the index as this process wrote or read it before.

    Nothing is done to a step that was evicted meanwhile. False if the step was committed anew before its turn came:
    what is ``remembered`` may name packs that are gone.
    """
    remembered = remembered or tier.steps.indexes.get(step)
    if remembered is not None:
        held = tier.steps.own(step)
        async with tier.packs.guard:
            if step_index.is_replaced(tier, step, held):
                return False
            try:
                if tier.ram is not None:
                    await whole(_commit_beside_readers(tier, tier.ram, step, remembered))
                else:
                    await commit_file.commit(tier, remembered.record, remembered.arrays, only_anew=True)
            finally:
                if held is not None and tier.steps.own(step) is held:  # it failed; either commit has the same chunks
                    tier.steps.indexes.remember(step, remembered)
    elif tier.in_memory:
        await collector.evictor.drop_unreadable(step, tier)
    elif tier.steps.keeps(step):  # else it was evicted since it could not be read
        tier.quarantine(step, error)
        if state.holders(step):
            await copy_step(state, collector, step, tier)
    return True


async def _commit_beside_readers(tier: Tier, ram: Ram, step: StepId, index: StepIndex) -> None:
    """Commit a step in RAM anew; its chunks stay for those who read it by the old commit, as they lock no other one."""
    async with tier.steps.turn(step):
        if not tier.steps.keeps(step):
            return
        good = await commit_file.encode(tier, index.record, index.arrays, commit_file.free_btree_key(tier, step))
        old = await in_thread(ram.store.keep, step.manifest_key)
        chunks = unique_extents(index.arrays)
        kept = [digest for digest, where in chunks.items() if ram.index.adopt(digest, where.offset, where.length)]
    try:
        await in_thread(old.note, good.index.manifest, good.index.btree)
        await commit_file.commit(tier, index.record, index.arrays, only_anew=True)
    finally:
        ram.retracted.append((old.unread, kept))  # not before: until it is replaced, more may read by it
    await ram.reclaim()
