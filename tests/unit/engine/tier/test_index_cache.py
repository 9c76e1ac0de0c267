"""The cache of step indexes is bounded by the memory that they take, not by the size of their files."""

from __future__ import annotations

import gc
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.scenes import config, folder

from tieredckpt import CheckpointStore
from tieredckpt.engine.tier.index_cache import RecentIndexes, memory_of
from tieredckpt.format import ocdbt
from tieredckpt.format.manifest import ArrayIndex, Chunk, StepId, StepIndex, decode_step

CELL = 4096


async def files_of_step(disk: Path, arrays: int, chunks: int) -> tuple[bytes, bytes, str]:
    saved = {f"w{i}": np.random.default_rng(i).integers(0, 255, (chunks, CELL), np.uint8) for i in range(arrays)}
    async with CheckpointStore.open(config({"disk": folder(disk)}, chunk_size=CELL)) as store:
        await store.save(1, saved)
    (path,) = disk.glob("steps/*/manifest.ocdbt")
    manifest = path.read_bytes()
    btree = ocdbt.read_root(manifest).path
    return manifest, (disk / btree).read_bytes(), btree


@pytest.mark.parametrize(("arrays", "chunks"), [(2, 500), (250, 2)])
async def test_the_memory_of_an_index_is_told_within_a_half(tmp_path: Path, arrays: int, chunks: int) -> None:
    files = await files_of_step(tmp_path / "disk", arrays, chunks)
    decode_step(*files)  # what is made once for all
    gc.collect()
    tracemalloc.start()
    try:
        index = decode_step(*files)
        gc.collect()
        taken = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert taken / 1.5 <= memory_of(index.arrays) <= taken * 1.5


def index_of(chunks: int) -> StepIndex:
    nothing: Any = None
    return StepIndex(nothing, {"w": ArrayIndex(nothing, nothing, [Chunk(b"", nothing)] * chunks)})


@pytest.mark.parametrize(("chunks", "kept"), [(100, 64), (20_000, 8), (1_000_000, 2)])
def test_many_small_indexes_are_kept_or_few_large_ones(chunks: int, kept: int) -> None:
    indexes, index = RecentIndexes(), index_of(chunks)
    for serial in range(100):
        indexes.nbytes[StepId(serial, serial)] = 1  # of well compressed files
        indexes.remember(StepId(serial, serial), index)
    assert list(indexes) == [StepId(serial, serial) for serial in range(100 - kept, 100)]
