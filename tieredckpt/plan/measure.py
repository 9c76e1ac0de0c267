"""Measure the inputs of a plan on this machine: the speed of memory copies, and of a tier's writes and reads."""

from __future__ import annotations

import secrets
import time
import timeit

import numpy as np

from tieredckpt.blobs.checkup import CHECKUP, random_memory, warm_memory
from tieredckpt.blobs.tier_checkup import missing_folders, remove_empty
from tieredckpt.concurrency import on_own_thread
from tieredckpt.config import TierConfig
from tieredckpt.config.kinds import kind_of

__all__ = ["measure_copy", "measure_tier"]

_ROUNDS = 3


async def measure_copy(nbytes: int) -> float:
    """Bytes a second at which warm memory is copied by one thread; the best of three."""

    def best() -> float:
        source, target = warm_memory(nbytes), warm_memory(nbytes)
        return min(timeit.repeat(lambda: np.copyto(target, source), repeat=_ROUNDS, number=1))

    return nbytes / await on_own_thread("measurement", best)


async def measure_tier(tier: TierConfig, nbytes: int) -> tuple[float, float]:
    """Bytes a second at which one object of ``nbytes`` is written to the tier and read; both leave nothing there.

    Raises:
        TieredCkptError: what is wrong with the tier.
    """
    data = await on_own_thread("measurement", random_memory, nbytes)
    missing = await missing_folders(tier)
    store = await kind_of(tier).open(tier)
    key = f"{CHECKUP}{secrets.token_hex(8)}/measure"
    try:
        begin = time.perf_counter()
        await store.put(key, [memoryview(data)])
        written = time.perf_counter()
        await store.get_into(key, 0, memoryview(data))
        read = time.perf_counter()
    finally:
        try:
            await store.delete(key)
        finally:
            await store.close()
            await remove_empty(tier, missing)
    return nbytes / (written - begin), nbytes / (read - written)
