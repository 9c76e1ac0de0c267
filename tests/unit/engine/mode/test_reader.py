"""A process that only reads: it changes nothing, and every call sees what the writer has done since."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.scenes import assert_restored, files_under, tree

from tieredckpt import CheckpointStore, Invalid, StoreConfig


async def test_every_call_sees_what_was_saved_and_evicted_since_the_one_before(tiers: StoreConfig) -> None:
    async with CheckpointStore.open(tiers) as writer, CheckpointStore.open(tiers, read_only=True) as reader:
        for step in (1, 2):
            await writer.save(step, tree(step))
            await writer.flush()
            assert await reader.latest_step() == step
        await writer.evict(1, "disk")
        assert await reader.steps() == await writer.steps()
        assert_restored(await reader.restore(), tree(2))


async def test_it_changes_nothing_when_it_is_used_and_closed(
    tiers: StoreConfig, shared_memory: Path, tmp_path: Path
) -> None:
    async with CheckpointStore.open(tiers) as writer:
        await writer.save(1, tree(1))
        await writer.flush()
        before = files_under(tmp_path), files_under(shared_memory)
        async with CheckpointStore.open(tiers, read_only=True) as reader:
            await reader.restore()
            await reader.flush()
            with pytest.raises(Invalid, match="read_only"):
                await reader.save(2, tree(2))
            with pytest.raises(Invalid, match="read_only"):
                await reader.evict(1, "disk")
        assert (files_under(tmp_path), files_under(shared_memory)) == before
