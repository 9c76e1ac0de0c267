"""A process that saves and promotes alone: it manages every tier, and a save of it is a whole step."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
from support.insight import tier_of
from support.scenes import CHUNK, config, files_under, folder, ram, tree

from tieredckpt import CheckpointStore, Invalid, Shard
from tieredckpt.engine.tier.slab_index import slab_size


@pytest.fixture
async def store(shared_memory: Path, tmp_path: Path) -> AsyncIterator[CheckpointStore]:
    tiers = {"ram": ram(shared_memory, capacity=5 * slab_size(CHUNK)), "disk": folder(tmp_path / "disk")}
    async with CheckpointStore.open(config(tiers), ranks=None) as store:
        yield store


async def test_pieces_that_are_not_all_of_an_array_are_refused_before_anything_is_stored(
    store: CheckpointStore, tmp_path: Path
) -> None:
    await store.save(1, {"w": np.zeros(8)})
    await store.flush()
    before = files_under(tmp_path)
    half = Shard(np.zeros((4, 8)), (8, 8), (0, 0))
    with pytest.raises(Invalid):
        await store.save(2, {"w": half})
    await store.flush()
    assert await store.all_steps() == (1,)
    assert files_under(tmp_path) == before


async def test_no_pack_of_a_tier_is_collected_while_a_save_streams_there(store: CheckpointStore) -> None:
    disk, held = tier_of(store, "disk"), []
    add = disk.packs.add
    disk.packs.add = lambda written: (held.append(disk.packs.guard.locked()), add(written))[1]
    await store.save(1, tree(1))  # larger than the slab
    assert held
    assert all(held)
    assert not disk.packs.guard.locked()
    assert await store.where(1) == ("disk",)


async def test_a_wait_for_a_tier_needs_no_other_process(store: CheckpointStore) -> None:
    ckpt = await store.save(1, {"w": np.zeros(8)})
    await ckpt.reached("disk")
    assert await store.where(1) == ("ram", "disk")
