"""A chunk is read whole and as it was saved, or refused: by the extent that says where it lies, and by its digest."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.insight import flip_chunk, index_of, tier_of
from support.scenes import CHUNK, assert_same, config, folder, ram

from tieredckpt import CheckpointStore
from tieredckpt.engine.tier.chunk_reader import read_chunk
from tieredckpt.errors import Corrupt
from tieredckpt.format.ocdbt import Extent


def saved(seed: int = 0) -> dict[str, Any]:
    return {"w": np.random.default_rng(seed).integers(0, 256, 3 * CHUNK, dtype=np.uint8), "b": np.arange(9)}


@pytest.fixture
def tiers(shared_memory: Path, tmp_path: Path) -> dict[str, Any]:
    disk, far = (folder(tmp_path / name, promote="never") for name in ("disk", "far"))
    return {"ram": ram(shared_memory), "disk": disk, "far": far}


@pytest.mark.parametrize("name", ["ram", "disk"])
async def test_a_chunk_is_read_as_it_was_saved_or_refused(tiers: dict[str, Any], name: str) -> None:
    async with CheckpointStore.open(config(tiers)) as store:
        await store.save(1, saved())
        await store.promote(1, "disk")
        tier, pool = tier_of(store, name), store._life.engine.state.pool
        digest, where = (await index_of(store, name, 1))["w"].chunks[1]
        assert isinstance(where, Extent)

        async def read(where: Extent | bytes, digest: bytes = digest, nbytes: int = CHUNK) -> bytes:
            into = np.zeros(nbytes, np.uint8)
            await store._life.loop.call(read_chunk(tier, where, digest, into, pool))
            return into.tobytes()

        chunk = saved()["w"][CHUNK : 2 * CHUNK].tobytes()
        assert await read(where) == await read(chunk) == chunk
        for length in (1, where.length - 1, where.length + 1, 1 << 62):
            with pytest.raises(Corrupt, match=f"tier '{name}': a chunk of {CHUNK} bytes lies in"):
                await read(Extent(where.path, where.offset, length))
        for nbytes in (CHUNK - 1, CHUNK + 1):
            with pytest.raises(Corrupt, match=f"a chunk of {nbytes} bytes"):
                await read(where, nbytes=nbytes)
        for wrong in (chunk[:-1], chunk + b"\0", chunk[::-1]):
            with pytest.raises(Corrupt):
                await read(wrong)
        with pytest.raises(Corrupt, match="has digest"):
            await read(where, digest=bytes(16))
        if name == "ram":
            assert tier.ram is not None
            assert tier.ram.memory(where).tobytes() == chunk
            with pytest.raises(Corrupt, match="outside the slab"):
                tier.ram.memory(Extent(where.path, 1 << 40, CHUNK))
        await flip_chunk(store, name, 1, "w", 1)
        with pytest.raises(Corrupt, match="has digest"):
            await read(where)


@pytest.mark.parametrize("elsewhere", [True, False], ids=["intact elsewhere", "intact nowhere"])
async def test_a_chunk_that_is_damaged_on_a_slower_tier_is_never_promoted_as_it_is(
    tiers: dict[str, Any], tmp_path: Path, elsewhere: bool
) -> None:
    tiers["last"] = folder(tmp_path / "last", promote="never")
    async with CheckpointStore.open(config(tiers)) as store:
        await store.save(1, saved())
        for name in ("disk", "far") if elsewhere else ("disk",):
            await store.promote(1, name)
        await store.evict(1, "ram")
        await flip_chunk(store, "disk", 1, "w", 2)
        if not elsewhere:
            with pytest.raises(Corrupt, match="'w'"):
                await store.promote(1, "last")
            assert await store.where(1) == ("disk",)
            return
        await store.promote(1, "last")
        for name in ("disk", "far"):
            await store.evict(1, name)
        restored = await store.restore()
        assert restored is not None
        assert set(restored.sources) == {"last"}
        assert_same(restored.tree, saved())
