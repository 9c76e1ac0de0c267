"""Reads the chunks of a restore, each from the nearest tier that has it intact, verified, straight into its target."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Iterable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby

import numpy as np
import numpy.typing as npt

from tieredckpt.blobs.base import GetDigested, Stretch
from tieredckpt.blobs.ram.slab import page_aligned
from tieredckpt.blobs.wrap import Overdue
from tieredckpt.concurrency import in_thread, side_by_side, together
from tieredckpt.engine import limits
from tieredckpt.engine.restoring.inlet import Inlet, landing_together
from tieredckpt.engine.restoring.pieces import NOTHING, Piece, Target, deliver, pieces_of, put_small
from tieredckpt.engine.restoring.source import StepSource, being_read, report_silent
from tieredckpt.engine.restoring.targets import check_targets
from tieredckpt.engine.state.state import State
from tieredckpt.engine.tier.ram import Ram
from tieredckpt.engine.tier.tier import Tier
from tieredckpt.errors import Corrupt, NotFound, TieredCkptError, TierUnavailable
from tieredckpt.format.digest import digest
from tieredckpt.format.encoding import Encoding
from tieredckpt.format.manifest import Chunk, StepId, StepRecord
from tieredckpt.tree.device_target import Filled

__all__ = ["Place", "Read", "fill", "place_of", "read_pieces"]

Bytes = npt.NDArray[np.uint8]

Place = tuple[str, int, bytes]
"""Place of a chunk: pack, offset and digest."""

_SCRATCH_RUNS = 3
"""Runs at a time that pass through scratch memory: few, so that it stays in the processor's cache."""
_REMOTE_READS = 8
"""Reads in flight where latency, and not the device, limits the speed."""
_RUN_GAP = 64 << 10
"""Largest gap between two extents, in bytes, that is read rather than skipped."""


@dataclass(frozen=True, slots=True)
class Read:
    """A step that was read: its record, its arrays by key, and the bytes that came from each tier."""

    id: StepId
    record: StepRecord
    arrays: dict[str, Filled]
    sources: dict[str, int]


@dataclass(slots=True)
class Run:
    """Extents of one pack that are read in one go."""

    path: str
    offset: int
    end: int
    pieces: list[Piece] = field(default_factory=list)


async def fill(state: State, source: StepSource, targets: Mapping[str, Target]) -> dict[str, int]:
    """Fill every target with the array, or box of an array, of its name; returns the bytes that came from each tier.

    Args:
        state: of the engine.
        source: the step.
        targets: as `tieredckpt.engine.restoring.pieces.pieces_of` takes them.

    Raises:
        Corrupt: a chunk is intact on no tier; the message names the array.
        NotFound: the step does not have all of a target.
    """
    larger, nbytes = await in_thread(put_small, source.index, targets, pool=state.pool)
    check_targets(source.index, larger, source.tier.name)
    sources: dict[str, int] = {source.tier.name: nbytes} if nbytes else {}
    pieces: list[Piece] = []
    damaged: list[Piece] = []
    inline: list[tuple[Piece, Bytes]] = []
    for piece in pieces_of(source.index, larger, Inlet(state.host_memory, state.scratch.slab)):
        where = piece.chunk.where
        if not isinstance(where, bytes):
            pieces.append(piece)
            continue
        if digest(where) != piece.chunk.digest:
            why = Corrupt(f"bytes of {piece.array!r} in the index are damaged")
            source.note(source.tier, piece.key, piece.chunk, why)
            damaged.append(piece)
            continue
        inline.append((piece, np.frombuffer(where, dtype=np.uint8)))
        sources[source.tier.name] = sources.get(source.tier.name, 0) + piece.wanted
    if inline:
        await in_thread(_put, inline, pool=state.pool)
    near, far = source.near_ones(pieces)
    for tier, some in near:
        far += await _counted(sources, tier, some, read_pieces(state, source, tier, some))
    if source.passing is not None:
        far = await source.passing(source, far, sources)
    tier, far, absent = await source.on_one_tier(far)
    absent += await _counted(sources, tier, far, read_pieces(state, source, tier, far))
    waiting = deque(await _from_other_tiers(state, source, tier, [*damaged, *absent], sources))

    async def from_elsewhere(piece: Piece) -> None:
        tier = await _from_elsewhere(state, source, piece)
        sources[tier.name] = sources.get(tier.name, 0) + piece.wanted

    async def one_by_one() -> None:
        while waiting:
            await from_elsewhere(waiting.popleft())

    if waiting:  # the first one decides whether anybody has them: each may take several deadlines
        await from_elsewhere(waiting.popleft())
    await together([one_by_one() for _ in range(min(_REMOTE_READS, len(waiting)))])
    return sources


async def _from_other_tiers(
    state: State, source: StepSource, asked: Tier, pieces: list[Piece], sources: dict[str, int]
) -> list[Piece]:
    """Read pieces that a tier did not deliver from the next tiers that hold the step; returns those that are left."""
    holders = [] if source.tier.derived else state.holders(source.step)
    for tier in holders:
        if not pieces:
            break
        if tier is asked or (source.near is not None and not tier.shared):
            continue
        async with AsyncExitStack() as stack:
            try:
                await stack.enter_async_context(being_read(tier, source.step))
            except (NotFound, TierUnavailable) as error:  # it left, or does not answer: the next tier may have it
                source.unreadable.append((tier, error))
                report_silent(state, tier, error)
                continue
            there, pieces = await source.on_another_tier(tier, pieces)
            pieces += await _counted(sources, tier, there, read_pieces(state, source, tier, there))
    return pieces


async def _counted(
    sources: dict[str, int], tier: Tier, pieces: list[Piece], reading: Awaitable[list[Piece]]
) -> list[Piece]:
    """Count the bytes of the pieces that were read; returns those that were not intact."""
    failed = await reading
    lost = {id(piece) for piece in failed}
    good = sum(piece.wanted for piece in pieces if id(piece) not in lost)
    if good:
        sources[tier.name] = sources.get(tier.name, 0) + good
    return failed


async def read_pieces(
    state: State, source: StepSource, tier: Tier, pieces: list[Piece], *, digested_reads: int = 0
) -> list[Piece]:
    """Read pieces from a tier into their targets, and verify them; notes as damage, and returns, those not intact.

    ``digested_reads``: runs read at a time from a store that digests what it reads; 0 for the store's own number.
    """
    if tier.ram is not None:
        return await _from_slab(state, source, tier, tier.ram, pieces)
    failed: list[Piece] = []
    in_each: dict[Encoding, list[Piece]] = {}
    for piece in pieces:
        in_each.setdefault(tier.encoding_of(piece.extent, piece.nbytes), []).append(piece)
    for encoding, some in in_each.items():
        failed += await _from_packs(state, source, tier, encoding, some, digested_reads)
    return failed


async def _from_slab(state: State, source: StepSource, tier: Tier, ram: Ram, pieces: list[Piece]) -> list[Piece]:
    waiting = deque(pieces)
    failed: list[Piece] = []

    @landing_together()
    def work() -> None:
        while True:
            try:
                piece = waiting.popleft()
            except IndexError:
                return
            try:
                intact = deliver(piece, ram.memory(piece.extent), ram.encoding)
            except (Corrupt, TierUnavailable):
                intact = False
            if not intact:
                failed.append(piece)
            if source.progress is not None:
                source.progress(piece.nbytes)

    threads = min(state.config.copy_threads, len(pieces))
    await side_by_side(threads, work, waiting.clear, state.pool)  # after which nothing writes into the caller's arrays
    gone = ram.slab.mapped is None
    for piece in failed:
        why: TieredCkptError = Corrupt(f"{source.step}: a chunk of {piece.array!r} changed in RAM")
        if gone:
            why = TierUnavailable(f"{source.step}: RAM went away while the step was read there")
        source.note(tier, piece.key, piece.chunk, why)
    return failed


def _chunk(piece: Piece) -> tuple[Chunk, int]:
    """Identify the chunk of a piece: pieces with one chunk share one read."""
    return piece.chunk, piece.nbytes


def place_of(piece: Piece) -> Place:
    """Place of a piece's chunk on its tier, and its digest."""
    extent = piece.extent
    return extent.path, extent.offset, piece.chunk.digest


def _runs(pieces: list[Piece], encoding: Encoding) -> list[Run]:
    runs: list[Run] = []
    for piece in sorted(pieces, key=place_of):
        where = piece.extent
        path, offset = where.path, where.offset
        end = offset + where.length - encoding.checksum_size
        last = runs[-1] if runs else None
        if last is None or not (
            _chunk(last.pieces[-1]) == _chunk(piece)
            or (
                last.path == path
                and last.end <= offset <= last.end + _RUN_GAP
                and end - last.offset <= limits.in_force.read_run
            )
        ):
            last = Run(path, offset, end)
            runs.append(last)
        last.end = end
        last.pieces.append(piece)
    return runs


async def _from_packs(
    state: State, source: StepSource, tier: Tier, encoding: Encoding, pieces: list[Piece], digested_reads: int
) -> list[Piece]:
    """Read runs of extents in one encoding, several at a time; returns the pieces that were not intact."""
    failed: list[Piece] = []
    waiting = deque(_runs(pieces, encoding))
    try:
        store = tier.store
    except TierUnavailable as error:  # it was disconnected since
        source.note_all(tier, [(piece.key, piece.chunk) for piece in pieces], error)
        return pieces
    traits = store.traits
    under_way = max(1, limits.in_force.reads_under_way // max(run.end - run.offset for run in waiting))
    if encoding.raw and traits.digested_reads and isinstance(store, GetDigested):
        read = partial(_digested, state, tier, through_scratch=asyncio.Semaphore(_SCRATCH_RUNS))
        runs_at_once = min(digested_reads or traits.digested_reads, under_way)
    else:
        reads = min(max(_REMOTE_READS, traits.digested_reads), under_way) if traits.remote else _REMOTE_READS
        # Besides what is being read, as much is being verified.
        read = partial(_through_scratch, state, tier, encoding, reading=asyncio.Semaphore(reads))
        runs_at_once = 2 * reads

    missed: set[str] = set()

    async def reader() -> None:
        while waiting:
            run = waiting.popleft()
            asked = run.pieces
            why: TieredCkptError | None = None
            try:
                bad = await read(run)
            except NotFound as error:
                if run.path not in missed:  # an answer may be wrong just once
                    missed.add(run.path)
                    waiting.append(run)
                    continue
                bad = asked = [*asked, *_taken(waiting, run.path)]
                why = error
            except (Corrupt, TierUnavailable) as error:
                if len(asked) > 1 and isinstance(error, Corrupt):
                    # Some of them may be there.
                    waiting.extend(one for piece in asked for one in _runs([piece], encoding))
                    continue
                bad, why = asked, error
            if bad:
                why = why or Corrupt(f"tier {tier.name!r}: bytes of {run.path} are not what was saved")
                source.note_all(tier, [(piece.key, piece.chunk) for piece in bad], why)
            failed.extend(bad)
            if source.progress is not None:
                source.progress(sum(piece.nbytes for piece in asked))
            if isinstance(why, Overdue):
                return  # and leaves the rest to others, or to another tier if none is answered

    await together([reader() for _ in range(min(runs_at_once, len(waiting)))])
    return failed + [piece for run in waiting for piece in run.pieces]


def _taken(waiting: deque[Run], path: str) -> list[Piece]:
    """Take the runs of a pack out of those that wait; returns their pieces."""
    taken = [piece for run in waiting if run.path == path for piece in run.pieces]
    others = [run for run in waiting if run.path != path]
    waiting.clear()
    waiting.extend(others)
    return taken


async def _digested(state: State, tier: Tier, run: Run, *, through_scratch: asyncio.Semaphore) -> list[Piece]:
    """Read a run straight into its targets and digest it on the way; returns the pieces that were not intact.

    Chunks that are wanted in part, or in several places, pass through scratch memory.
    """
    store = tier.store
    assert isinstance(store, GetDigested)
    chunks = [list(same) for _, same in groupby(run.pieces, _chunk)]
    passing = [page_aligned(same[0].nbytes) if len(same) > 1 or same[0].overlaps else 0 for same in chunks]
    async with AsyncExitStack() as lent:
        scratch = NOTHING
        if any(passing):
            await lent.enter_async_context(through_scratch)
            scratch = await lent.enter_async_context(state.scratch.lend(sum(passing)))
        places: list[Bytes] = []
        stretches: list[Stretch] = []
        for same, nbytes in zip(chunks, passing, strict=True):
            places.append(scratch[: same[0].nbytes] if nbytes else same[0].target)
            stretches.append(Stretch(same[0].extent.offset, same[0].nbytes, memoryview(places[-1])))
            scratch = scratch[nbytes:]
        digests = await store.get_digested(run.path, stretches)
        bad: list[Piece] = []
        good: list[tuple[Piece, Bytes]] = []
        for same, place, nbytes, found in zip(chunks, places, passing, digests, strict=True):
            if found != same[0].chunk.digest:
                bad += same
            elif nbytes:
                good += ((piece, place) for piece in same)
        if good:
            await in_thread(_put, good, pool=state.pool)
    return bad


@landing_together()
def _put(pieces: Iterable[tuple[Piece, Bytes]]) -> None:
    for piece, memory in pieces:
        piece.put(memory)


async def _through_scratch(
    state: State, tier: Tier, encoding: Encoding, run: Run, *, reading: asyncio.Semaphore
) -> list[Piece]:
    """Read a run into scratch memory and verify it there, beside other reads; returns pieces that were not intact."""

    @landing_together()
    def unpack(memory: Bytes) -> list[Piece]:
        bad = []
        for piece in run.pieces:
            start = piece.extent.offset - run.offset
            if not deliver(piece, memory[start : start + piece.extent.length - encoding.checksum_size], encoding):
                bad.append(piece)
        return bad

    async with state.scratch.lend(run.end - run.offset) as memory:
        async with reading:
            await tier.store.get_into(run.path, run.offset, memoryview(memory[: run.end - run.offset]))
        return await in_thread(unpack, memory, pool=state.pool)


async def _from_elsewhere(state: State, source: StepSource, piece: Piece) -> Tier:
    async with state.scratch.lend(page_aligned(piece.nbytes)) as memory:
        tier = await source.read(piece.key, piece.ordinal, memory, bad=source.tier)
        await in_thread(piece.put, memory[: piece.nbytes], pool=state.pool)
        return tier
