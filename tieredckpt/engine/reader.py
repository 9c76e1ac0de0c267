"""Restores: every chunk from the nearest tier that has it intact, straight into its place, verified."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from tieredckpt.blobs.settle import in_thread, settle, together
from tieredckpt.blobs.slab import aligned
from tieredckpt.engine.pieces import NOTHING, Piece, deliver, pieces_of
from tieredckpt.engine.scan import Place, Scan
from tieredckpt.engine.source import StepSource
from tieredckpt.engine.state import State
from tieredckpt.engine.targets import check_targets
from tieredckpt.engine.tier import Tier
from tieredckpt.errors import Corrupt, NotFound, TierUnavailable
from tieredckpt.format.digest import digest
from tieredckpt.format.manifest import StepId, StepRecord
from tieredckpt.format.ocdbt import Extent

__all__ = ["Read", "check", "fill"]

Bytes = npt.NDArray[np.uint8]

_DEVICE_READS = 6
"""Direct reads asked for at a time, all of three runs: a thread of the tier that ends one finds the next, and need not
wait until the end was noticed. With as many as the tier has threads, which are four, 1 GiB took a tenth longer."""
_DEVICE_READ_SIZE = 8 << 20
"""Bytes of a direct read at most; one of a larger run is two reads or more."""
_DEVICE_RUNS = 3
"""Runs in memory at a time, the one included that is being verified. Memory that is soon used again stays in the
processor's cache: through 64 MiB of it the reference machine read 1 GiB in 0.38 to 0.43 s, through 32 MiB in 0.30."""
_REMOTE_READS = 8
"""Reads in flight where latency, and not the device, is what one waits for."""
_RUN_SIZE = 16 << 20
"""Small neighbouring extents are read together up to this size."""
_RUN_GAP = 64 << 10
"""Bytes between two extents that are read rather than skipped."""


@dataclass(frozen=True, slots=True)
class Read:
    """A step that was read: its record, its arrays by key, and the bytes that came from each tier."""

    id: StepId
    record: StepRecord
    arrays: dict[str, npt.NDArray[Any]]
    sources: dict[str, int]


@dataclass(slots=True)
class Run:
    """Extents of one pack that are read in one go."""

    path: str
    offset: int
    end: int
    pieces: list[Piece] = field(default_factory=list)


async def fill(state: State, source: StepSource, targets: Mapping[str, npt.NDArray[Any]]) -> dict[str, int]:
    """Fill every target array with the array, or box of an array, of its name; the bytes that came from each tier.

    Args:
        state: of the engine.
        source: the step.
        targets: as `tieredckpt.engine.pieces.pieces_of` takes them.

    Raises:
        Corrupt: a chunk is intact on no tier; the message names the array.
        NotFound: the step does not have all of a target.
    """
    check_targets(source.index, targets, source.tier.name)
    sources: dict[str, int] = {}
    pieces: list[Piece] = []
    damaged: list[Piece] = []
    for piece in pieces_of(source.index, targets):
        where = piece.chunk.where
        if not isinstance(where, bytes):
            pieces.append(piece)
            continue
        if digest(where) != piece.chunk.digest:
            source.note(
                source.tier, piece.key, piece.chunk, Corrupt(f"bytes of {piece.array!r} in the index are damaged")
            )
            damaged.append(piece)
            continue
        piece.put(np.frombuffer(where, dtype=np.uint8))
        sources[source.tier.name] = sources.get(source.tier.name, 0) + piece.wanted
    near, far = source.near_ones(pieces)
    for tier, some in near:
        far += await _counted(sources, tier, some, _from_slab(state, source, tier, some))
    if source.passing is not None:
        far = await source.passing(source, far, sources)
    tier, far, absent = await source.on_one_tier(far)
    absent += await _counted(sources, tier, far, (_from_slab if tier.ram else _from_packs)(state, source, tier, far))
    for piece in [*damaged, *absent]:
        tier = await _from_elsewhere(state, source, piece)
        sources[tier.name] = sources.get(tier.name, 0) + piece.wanted
    return sources


async def _counted(
    sources: dict[str, int], tier: Tier, pieces: list[Piece], reading: Awaitable[list[Piece]]
) -> list[Piece]:
    """Count the bytes of what was read; what was not intact."""
    failed = await reading
    lost = {id(piece) for piece in failed}
    good = sum(piece.wanted for piece in pieces if id(piece) not in lost)
    if good:
        sources[tier.name] = sources.get(tier.name, 0) + good
    return failed


async def check(state: State, source: StepSource, scan: Scan) -> None:
    """Read and verify all of a step on its tier, keeping nothing; what is not intact is noted as damage.

    What ``scan`` has seen already is not read again.
    """
    pieces = [
        Piece(key, ordinal, array.grid.cell_nbytes, chunk, NOTHING)
        for key, array in source.index.arrays.items()
        for ordinal, chunk in enumerate(array.chunks)
    ]
    stored = [piece for piece in pieces if isinstance(piece.chunk.where, Extent)]
    for piece in pieces:
        if isinstance(piece.chunk.where, bytes) and digest(piece.chunk.where) != piece.chunk.digest:
            source.note(
                source.tier,
                piece.key,
                piece.chunk,
                Corrupt(f"bytes of {piece.array!r} in the index are damaged"),
            )
    if source.progress is not None:
        source.progress(sum(piece.nbytes for piece in pieces if isinstance(piece.chunk.where, bytes)))
    read = _from_slab if source.tier.ram is not None else _from_packs
    unread = {_place(piece): piece for piece in stored if _place(piece) not in scan.intact}
    for batch in scan.batches((unread[place], unread[place].nbytes) for place in sorted(unread)):
        await scan.turn(sum(piece.nbytes for piece in batch))
        failed = {id(piece) for piece in await read(state, source, source.tier, batch)}
        if source.silence is not None:
            return  # what was not read is not known to be damaged
        scan.intact.update((_place(piece), id(piece) not in failed) for piece in batch)
    for piece in stored:
        if not scan.intact[_place(piece)] and unread.get(_place(piece)) is not piece:
            source.note(source.tier, piece.key, piece.chunk, Corrupt("its bytes are damaged, as another step showed"))


def _place(piece: Piece) -> Place:
    assert isinstance(piece.chunk.where, Extent)
    return piece.chunk.where.path, piece.chunk.where.offset, piece.chunk.digest


async def _from_slab(state: State, source: StepSource, tier: Tier, pieces: list[Piece]) -> list[Piece]:
    assert tier.ram is not None
    slab = tier.ram.slab
    waiting = deque(pieces)
    failed: list[Piece] = []

    def work() -> None:
        while True:
            try:
                piece = waiting.popleft()
            except IndexError:
                return
            assert isinstance(piece.chunk.where, Extent)
            try:
                memory = slab.bytes_at(piece.chunk.where.offset, piece.nbytes)
                intact = deliver(piece, memory)
            except Corrupt:
                intact = False
            if not intact:
                failed.append(piece)
            if source.progress is not None:
                source.progress(piece.nbytes)

    loop = asyncio.get_running_loop()
    threads = min(state.config.copy_threads, len(pieces))
    everyone = asyncio.gather(*(loop.run_in_executor(state.pool, work) for _ in range(threads)))
    await settle(everyone, waiting.clear)  # nobody writes into the caller's arrays any more
    for piece in failed:
        source.note(
            tier,
            piece.key,
            piece.chunk,
            Corrupt(f"{source.step}: a chunk of {piece.array!r} changed in RAM"),
        )
    return failed


def _runs(pieces: list[Piece]) -> list[Run]:
    runs: list[Run] = []

    def place(piece: Piece) -> tuple[str, int]:
        assert isinstance(piece.chunk.where, Extent)
        return piece.chunk.where.path, piece.chunk.where.offset

    for piece in sorted(pieces, key=place):
        path, offset = place(piece)
        end = offset + piece.nbytes
        last = runs[-1] if runs else None
        if last and last.path == path and offset - last.end <= _RUN_GAP and end - last.offset <= _RUN_SIZE:
            last.end = max(last.end, end)
        else:
            last = Run(path, offset, end)
            runs.append(last)
        last.pieces.append(piece)
    return runs


async def _from_packs(state: State, source: StepSource, tier: Tier, pieces: list[Piece]) -> list[Piece]:
    """Read runs of extents through scratch memory, several at a time, as much as that holds."""
    failed: list[Piece] = []
    if not pieces:
        return failed
    direct = tier.store.traits.direct_io
    # Besides what is being read from afar, as much is being verified.
    runs_at_once = _DEVICE_RUNS if direct else 2 * _REMOTE_READS
    reading = asyncio.Semaphore(_DEVICE_READS if direct else _REMOTE_READS)

    def unpack(run: Run, memory: Bytes) -> list[Piece]:
        bad = []
        for piece in run.pieces:
            assert isinstance(piece.chunk.where, Extent)
            start = piece.chunk.where.offset - run.offset
            if not deliver(piece, memory[start : start + piece.nbytes]):
                bad.append(piece)
        return bad

    async def fetch(run: Run, start: int, memory: Bytes) -> None:
        async with reading:
            await tier.store.get_into(run.path, run.offset + start, memoryview(memory))

    async def read(run: Run) -> None:
        size = run.end - run.offset
        step = _part(size) if direct else size
        async with state.scratch.lend(size) as memory:
            try:
                await together(
                    [fetch(run, start, memory[start : min(start + step, size)]) for start in range(0, size, step)]
                )
            except (Corrupt, NotFound, TierUnavailable) as error:
                if len(run.pieces) > 1 and not isinstance(error, TierUnavailable):
                    waiting.extend(one for piece in run.pieces for one in _runs([piece]))  # some of them may be there
                    return
                bad, why = run.pieces, error
            else:
                bad = await in_thread(unpack, run, memory, pool=state.pool)
                why = Corrupt(f"tier {tier.name!r}: bytes of {run.path} are not what was saved")
        for piece in bad:
            source.note(tier, piece.key, piece.chunk, why)
        failed.extend(bad)
        if source.progress is not None:
            source.progress(sum(piece.nbytes for piece in run.pieces))

    waiting = deque(_runs(pieces))

    async def reader() -> None:
        while waiting:
            await read(waiting.popleft())

    await together([reader() for _ in range(min(runs_at_once, len(waiting)))])
    return failed


def _part(size: int) -> int:
    """Bytes of each direct read of a run of ``size`` bytes: as many as there are in the others, whole pages."""
    return aligned(-(-size // -(-size // _DEVICE_READ_SIZE)))


async def _from_elsewhere(state: State, source: StepSource, piece: Piece) -> Tier:
    async with state.scratch.lend(aligned(piece.nbytes)) as memory:
        tier = await source.read(piece.key, piece.ordinal, memory, bad=source.tier)
        await in_thread(piece.put, memory[: piece.nbytes], pool=state.pool)
        return tier
