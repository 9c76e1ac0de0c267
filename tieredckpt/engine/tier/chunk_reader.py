"""Reads one chunk of a tier into memory, decoded and verified."""

from __future__ import annotations

from concurrent.futures import Executor

import numpy as np
import numpy.typing as npt

from tieredckpt.concurrency import in_thread
from tieredckpt.engine.tier.tier import Tier
from tieredckpt.errors import Corrupt
from tieredckpt.format.digest import digest_array
from tieredckpt.format.encoding import PLAIN
from tieredckpt.format.ocdbt import Extent

__all__ = ["read_chunk"]

Bytes = npt.NDArray[np.uint8]


async def read_chunk(tier: Tier, where: Extent | bytes, digest: bytes, into: Bytes, pool: Executor) -> None:
    """Fill ``into``, which is as long as the chunk, with one chunk of a tier, decoded and verified.

    ``where`` is its extent, or its bytes as an index has them. Raises as a blob store does, and `Corrupt`.
    """
    place = "the index"
    if isinstance(where, bytes):
        found = await in_thread(PLAIN.decode, np.frombuffer(where, dtype=np.uint8), into.size, into, pool=pool)
    else:
        place, encoding = where.path, tier.encoding_of(where, into.size)
        told = f"tier {tier.name!r}: a chunk of {into.size} bytes lies in {place} with {where.length}"
        if not encoding.fits(where.length, into.size):
            raise Corrupt(told)
        if encoding.raw:
            await tier.store.get_into(where.path, where.offset, memoryview(into))
            found = await in_thread(digest_array, into, pool=pool)
        else:
            # Not of scratch memory: who has some of it, as ``into`` may be, must not wait for more.
            frame = np.empty(where.length - encoding.checksum_size, dtype=np.uint8)
            await tier.store.get_into(where.path, where.offset, memoryview(frame))
            try:
                found = await in_thread(encoding.decode, frame, into.size, into, pool=pool)
            except Corrupt as error:
                raise Corrupt(f"{told}: {error}") from error
    if found != digest:
        raise Corrupt(f"tier {tier.name!r}: a chunk in {place} has digest {found.hex()}, not {digest.hex()}")
