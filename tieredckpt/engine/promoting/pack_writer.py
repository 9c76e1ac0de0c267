"""Chunks on their way to a durable tier: verified, encoded, and written as packs."""

from __future__ import annotations

import asyncio
import mmap
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import Executor
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tieredckpt.blobs.base import Buffer
from tieredckpt.blobs.codecs import BLOSC
from tieredckpt.concurrency import side_by_side
from tieredckpt.engine.scratch import Scratch
from tieredckpt.engine.state.state import State
from tieredckpt.engine.state.views import write_bandwidth
from tieredckpt.engine.tier.packs import WrittenPacks
from tieredckpt.engine.tier.tier import Tier
from tieredckpt.format import layout
from tieredckpt.format.encoding import Encoded, Encoding
from tieredckpt.format.layout import aligned
from tieredckpt.format.ocdbt import Extent
from tieredckpt.format.pack import PackEntry, encode_footer

__all__ = ["Batch", "Encoder", "Need", "Payload", "seal", "seal_all", "write_packs"]


_BLOCK = 256 << 10
"""Bytes that are borrowed at a time to carve pages from."""


class Need(NamedTuple):
    """A chunk of a step that a tier lacks, and one place where it occurs."""

    digest: bytes
    key: str
    """Of the array."""
    ordinal: int
    """Of the chunk in the array."""
    nbytes: int


@dataclass(frozen=True, slots=True)
class Payload:
    """A chunk to write: its digest, its bytes (``nbytes`` of page-aligned ``memory``), and the bytes of one item.

    ``room`` is further memory for `Encoding.encode`; None if that may write behind the chunk, or needs none.
    """

    digest: bytes
    nbytes: int
    itemsize: int
    memory: npt.NDArray[np.uint8]
    room: npt.NDArray[np.uint8] | None = None


def seal(payload: Payload, encoding: Encoding) -> Encoded | None:
    """Encode a chunk in the pass that verifies its digest; None on a mismatch."""
    encoded = encoding.encode(payload.memory, payload.nbytes, payload.itemsize, payload.room)
    return encoded if encoded.digest == payload.digest else None


async def seal_all(
    payloads: Sequence[Payload], encoding: Encoding, pool: Executor, threads: int
) -> list[Encoded | None]:
    """`seal` every chunk on ``threads`` threads of ``pool``; returns the result of each."""
    waiting = deque(enumerate(payloads))
    sealed: list[Encoded | None] = [None] * len(payloads)

    def work() -> None:
        while True:
            try:
                number, payload = waiting.popleft()
            except IndexError:
                return
            sealed[number] = seal(payload, encoding)

    await side_by_side(min(threads, len(payloads)), work, waiting.clear, pool)
    return sealed


@dataclass(slots=True)
class Batch:
    """Encoded chunks that become one pack, and the memory that was lent for them until it is written."""

    compressed: bool
    """Whether its chunks are in frames."""
    key: str = field(default_factory=lambda: layout.pack_key(layout.new_pack_id()))
    """Of the pack."""
    parts: list[Buffer] = field(default_factory=list)
    """Buffers to write, in whole pages."""
    places: list[tuple[bytes, Extent]] = field(default_factory=list)
    """Digest and future place of each chunk."""
    lent: AsyncExitStack = field(default_factory=AsyncExitStack)
    size: int = 0
    """Bytes of the pack before its footer."""
    block: npt.NDArray[np.uint8] = field(default_factory=lambda: np.empty(0, dtype=np.uint8))
    """Rest of the last block that pages were carved from."""

    async def borrow(self, scratch: Scratch, nbytes: int) -> npt.NDArray[np.uint8]:
        """Memory of ``nbytes``, in whole pages, until the pack is written."""
        return await self.lent.enter_async_context(scratch.lend(nbytes))

    async def carve(self, scratch: Scratch | None, nbytes: int) -> npt.NDArray[np.uint8]:
        """Take a few pages from a block, where `borrow` for each would cost more than the work with them.

        New memory where there is no scratch memory to wait for.
        """
        if self.block.nbytes < nbytes and scratch is None:
            self.block = np.frombuffer(mmap.mmap(-1, max(nbytes, _BLOCK)), np.uint8)
        elif self.block.nbytes < nbytes:
            assert scratch is not None
            self.block = await self.borrow(scratch, max(nbytes, _BLOCK))
        carved, self.block = self.block[:nbytes], self.block[nbytes:]
        return carved

    def add(self, encoded: Encoded) -> None:
        self.parts += map(memoryview, encoded.parts)
        self.places.append((encoded.digest, Extent(self.key, self.size, encoded.length)))
        self.size += aligned(encoded.length)


async def write_packs(
    tier: Tier,
    batches: AsyncIterator[Batch],
    written: WrittenPacks,
    meanwhile: Callable[[dict[bytes, Extent]], Awaitable[None]] | None = None,
) -> None:
    """Write every batch as a pack. Each is added to ``written`` once it is stored, also where another one fails.

    The process that manages the tier has to record the packs there. The next batch is pulled while others are being
    written; ``meanwhile`` is called with the places of all chunks when there is no next one.
    """
    slots = asyncio.Semaphore(tier.store.traits.parallel_puts)

    async def write(batch: Batch) -> None:
        try:
            async with batch.lent:
                await _write_pack(tier, batch, written)
        finally:
            slots.release()

    taken: list[Batch] = []
    try:
        async with asyncio.TaskGroup() as group:
            async for batch in batches:
                taken.append(batch)
                await slots.acquire()
                group.create_task(write(batch))
            if meanwhile is not None:
                await meanwhile(dict(place for batch in taken for place in batch.places))
    except ExceptionGroup as errors:
        first = _first(errors)
        raise first from first.__cause__  # which `from None` would take away
    finally:
        for batch in taken:  # one that was cancelled before it began has given nothing back
            await batch.lent.aclose()


def _first(errors: BaseException) -> BaseException:
    return _first(errors.exceptions[0]) if isinstance(errors, BaseExceptionGroup) else errors


async def _write_pack(tier: Tier, batch: Batch, written: WrittenPacks) -> None:
    entries = [PackEntry(digest, at.offset, at.length) for digest, at in batch.places]
    footer = encode_footer(entries, batch.size, compressed=batch.compressed)
    await tier.store.put(batch.key, [*batch.parts, footer])
    written.sizes[batch.key] = batch.size + len(footer)
    written.extents.update(batch.places)


class Encoder:
    """Encodes the chunks that one copy of a step brings to a tier. Lives on the engine's loop."""

    def __init__(self, state: State, tier: Tier, encoding: Encoding, is_awaited: Callable[[], bool]) -> None:
        """``is_awaited`` returns whether a caller waits for the copy to end."""
        self._state, self._tier, self._encoding, self._is_awaited = state, tier, encoding, is_awaited
        self._nbytes = 0
        self._seconds = 0.0

    @property
    def encoding(self) -> Encoding:
        """Encoding of the next chunks: uncompressed if the device is faster than compression, and somebody waits.

        Sizes and framing are those of the tier's own encoding at any time.
        """
        if self._encoding.raw or not self._seconds:
            return self._encoding
        bandwidth = write_bandwidth(self._tier)
        slows = bandwidth is not None and self._nbytes / self._seconds < bandwidth
        return BLOSC if slows and self._is_awaited() else self._encoding

    async def seal(self, payloads: Sequence[Payload], threads: int) -> list[Encoded | None]:
        """`seal_all` the chunks, compressed on the tier's own number of threads, any other way on ``threads``."""
        encoding = self.encoding
        compresses = not encoding.raw and encoding is not BLOSC
        begin = time.monotonic()
        pool, at_most = self._state.pool, self._tier.config.codec_threads if compresses else threads
        sealed = await seal_all(payloads, encoding, pool, at_most)
        if compresses:
            self._nbytes += sum(payload.nbytes for payload in payloads)
            self._seconds += time.monotonic() - begin
        return sealed
