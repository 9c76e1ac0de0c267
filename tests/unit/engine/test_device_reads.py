"""Restores from a device: large runs are read in parts, few at a time, through little memory."""

from __future__ import annotations

from pathlib import Path

import pytest
from scenes import CHUNK, assert_same, config, folder, tree

from tieredckpt import CheckpointStore
from tieredckpt.blobs.base import BlobStore
from tieredckpt.engine import reader
from tieredckpt.engine.scratch import Scratch

PART = 3 << 12
RUN = 4 * CHUNK


class Watching:
    """Notes what is read of a tier's packs, and how much of it is under way at most."""

    def __init__(self, blobs: BlobStore, scratch: Scratch, patch: pytest.MonkeyPatch) -> None:
        self.read: list[tuple[str, int, int]] = []
        self.under_way = self.most = self.most_memory = 0
        self._get_into, self._scratch = blobs.get_into, scratch
        patch.setattr(blobs, "get_into", self.get_into)

    async def get_into(self, key: str, offset: int, memory: memoryview) -> None:
        self.read.append((key, offset, memory.nbytes))
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        self.most_memory = max(self.most_memory, self._scratch.slab.used)
        try:
            await self._get_into(key, offset, memory)
        finally:
            self.under_way -= 1


async def test_large_runs_are_read_in_equal_parts_once_each_and_few_are_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader, "_DEVICE_READ_SIZE", PART)
    monkeypatch.setattr(reader, "_RUN_SIZE", RUN)
    saved = tree(arrays=20)
    async with CheckpointStore.open(config({"disk": folder(tmp_path / "disk", direct=None)})) as store:
        await store.save(1, saved)
        state = store._engine.state
        blobs = state.tiers[0].store
        if not blobs.traits.direct_io:
            pytest.skip("the file system refuses direct I/O")
        watching = Watching(blobs, state.scratch, monkeypatch)
        restored = await store.restore()
        assert restored is not None
        assert_same(restored.tree, saved)
    ends: dict[str, int] = {}
    for key, offset, nbytes in sorted(watching.read):
        assert offset % 4096 == 0
        assert nbytes <= PART
        assert offset >= ends.get(key, 0)  # nothing is read twice
        ends[key] = offset + nbytes
    assert 1 < watching.most <= reader._DEVICE_READS
    assert watching.most_memory <= reader._DEVICE_RUNS * RUN
    assert sum(nbytes for _, _, nbytes in watching.read) >= 20 * 3 * CHUNK
