"""Chunks on their way to a durable tier: verified, sealed with a checksum, and written as packs."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import Executor
from contextlib import AsyncExitStack
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from tieredckpt.blobs.base import ALIGNMENT, Buffer
from tieredckpt.blobs.ram.slab import aligned
from tieredckpt.concurrency import settle
from tieredckpt.engine.scratch import Scratch
from tieredckpt.engine.tier.tier import Tier
from tieredckpt.format import layout
from tieredckpt.format.digest import digest_and_checksum
from tieredckpt.format.manifest import CHECKSUM_SIZE
from tieredckpt.format.ocdbt import Extent
from tieredckpt.format.pack import PackEntry, encode_footer

__all__ = ["PACK_SIZE", "Batch", "Payload", "seal", "seal_all", "stored_size", "tail_size", "write_pack", "write_packs"]

PACK_SIZE = 256 << 20
"""Bytes of a pack that is written from the slab."""

_BLOCK = 256 << 10
"""Bytes that are borrowed at a time to carve pages from."""

_PACKS_IN_FLIGHT = 2
"""One pack is sealed while another is written."""


@dataclass(frozen=True, slots=True)
class Payload:
    """A chunk to write: its digest, its bytes (``nbytes`` of ``memory``), and page-aligned room behind them.

    Where nothing may be written into that room, ``tail`` takes the place of what follows the last full page.
    """

    digest: bytes
    nbytes: int
    memory: npt.NDArray[np.uint8]
    tail: npt.NDArray[np.uint8] | None = None

    def parts(self) -> list[npt.NDArray[np.uint8]]:
        """What is written, in pages."""
        if self.tail is None:
            return [self.memory[: stored_size(self.nbytes)]]
        full = self.nbytes // ALIGNMENT * ALIGNMENT
        return [self.memory[:full], self.tail] if full else [self.tail]


def stored_size(nbytes: int) -> int:
    """Bytes that a chunk takes in a pack: with its checksum, up to the next page."""
    return aligned(nbytes + CHECKSUM_SIZE)


def tail_size(nbytes: int) -> int:
    """Bytes of a `Payload.tail`: the checksum may begin on one page and end on the next."""
    return stored_size(nbytes) - nbytes // ALIGNMENT * ALIGNMENT


def seal(payload: Payload) -> bool:
    """Write the chunk's checksum behind it, in the pass that verifies its digest; False on a mismatch."""
    digest, crc = digest_and_checksum(payload.memory[: payload.nbytes])
    room, end = payload.memory, payload.nbytes
    if payload.tail is not None:
        room, end = payload.tail, payload.nbytes % ALIGNMENT
        room[:end] = payload.memory[payload.nbytes - end : payload.nbytes]
    room[end : end + CHECKSUM_SIZE] = np.frombuffer(crc.to_bytes(CHECKSUM_SIZE, "little"), dtype=np.uint8)
    return digest == payload.digest


async def seal_all(payloads: Sequence[Payload], pool: Executor, threads: int) -> list[Payload]:
    """`seal` every chunk on ``threads`` threads of ``pool``; those that are not what their digest says."""
    waiting = deque(payloads)
    changed: list[Payload] = []

    def work() -> None:
        while True:
            try:
                payload = waiting.popleft()
            except IndexError:
                return
            if not seal(payload):
                changed.append(payload)

    loop = asyncio.get_running_loop()
    everyone = asyncio.gather(*(loop.run_in_executor(pool, work) for _ in range(min(threads, len(payloads)))))
    await settle(everyone, waiting.clear)
    return changed


@dataclass(slots=True)
class Batch:
    """Sealed chunks that become one pack, and the memory that was lent for them until it is written."""

    key: str = field(default_factory=lambda: layout.pack_key(layout.new_pack_id()))
    """Of the pack."""
    payloads: list[Payload] = field(default_factory=list)
    places: list[tuple[bytes, Extent]] = field(default_factory=list)
    """Of each payload, its digest and where it will be."""
    lent: AsyncExitStack = field(default_factory=AsyncExitStack)
    size: int = 0
    """Bytes of the pack before its footer."""
    borrowed: int = 0
    """Bytes of the memory that was lent."""
    block: npt.NDArray[np.uint8] = field(default_factory=lambda: np.empty(0, dtype=np.uint8))
    """What is left of the last block that pages were carved from."""

    async def borrow(self, scratch: Scratch, nbytes: int) -> npt.NDArray[np.uint8]:
        """Memory of ``nbytes``, in whole pages, until the pack is written."""
        memory = await self.lent.enter_async_context(scratch.lend(nbytes))
        self.borrowed += memory.nbytes
        return memory

    async def carve(self, scratch: Scratch, nbytes: int) -> npt.NDArray[np.uint8]:
        """As `borrow`, for so few pages that borrowing them one by one would cost more than what is done with them."""
        if self.block.nbytes < nbytes:
            self.block = await self.borrow(scratch, max(nbytes, _BLOCK))
        carved, self.block = self.block[:nbytes], self.block[nbytes:]
        return carved

    def add(self, payload: Payload) -> None:
        self.payloads.append(payload)
        self.places.append((payload.digest, Extent(self.key, self.size, payload.nbytes + CHECKSUM_SIZE)))
        self.size += stored_size(payload.nbytes)


async def write_packs(
    tier: Tier,
    batches: AsyncIterator[Batch],
    meanwhile: Callable[[dict[bytes, Extent]], Awaitable[None]] | None = None,
) -> int:
    """Write every batch as a pack and add its chunks to the tier's index; returns the bytes written.

    The caller holds ``tier.guards_packs``. The next batch is pulled while others are being written; ``meanwhile`` is
    told where every chunk will be, when there is no next one.
    """
    slots = asyncio.Semaphore(_PACKS_IN_FLIGHT)
    written = 0

    async def write(batch: Batch) -> None:
        nonlocal written
        try:
            async with batch.lent:
                nbytes = await write_pack(tier, batch)
                written += nbytes  # after the await, for another pack is counted meanwhile
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
    except* Exception as errors:
        raise _first(errors) from None
    finally:
        for batch in taken:  # one that was cancelled before it began has given nothing back
            await batch.lent.aclose()
    return written


def _first(errors: BaseException) -> BaseException:
    return _first(errors.exceptions[0]) if isinstance(errors, BaseExceptionGroup) else errors


async def write_pack(tier: Tier, batch: Batch) -> int:
    """Write one batch as a pack; its bytes. The caller holds ``tier.guards_packs``."""
    parts: list[Buffer] = [memoryview(part) for payload in batch.payloads for part in payload.parts()]
    entries = [PackEntry(digest, extent.offset, extent.length) for digest, extent in batch.places]
    parts.append(encode_footer(entries, batch.size))
    total = batch.size + len(parts[-1])
    await tier.store.put(batch.key, parts)
    tier.packs[batch.key] = total
    tier.orphans[batch.key] = time.time()  # until a commit refers to it
    for digest, extent in batch.places:
        tier.chunks[digest] = extent
    return total
