"""Promise 7: unchanged chunks are written once per tier, across arrays and steps, and after a restart."""

from __future__ import annotations

from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.insight import tier_of
from support.limits import limit
from support.scenes import CHUNK, Heard, assert_restored, config, crash, folder, pack_bytes, ram

from tieredckpt import CheckpointStore
from tieredckpt.config import StoreConfig
from tieredckpt.engine.promoting import dedupe
from tieredckpt.engine.saving.slower_tiers import find_chunks
from tieredckpt.events import StepPromoted, StepSaved
from tieredckpt.format.ocdbt import Extent

ARRAYS = 20


def state(seed: int = 0) -> dict[str, Any]:
    """Arrays of two chunks each, all different."""
    rng = np.random.default_rng(seed)
    return {f"w{i}": rng.integers(0, 255, 2 * CHUNK, dtype=np.uint8) for i in range(ARRAYS)}


@pytest.fixture
def far(tmp_path: Path) -> Path:
    return tmp_path / "far"


@pytest.fixture
def three_tiers(shared_memory: Path, tmp_path: Path, far: Path) -> StoreConfig:
    kvstore = {"kind": "kvstore", "spec": {"driver": "file", "path": f"{far}/"}, "retries": 0}
    return config({"ram": ram(shared_memory), "disk": folder(tmp_path / "disk"), "far": kvstore})


async def written(store: CheckpointStore, step: int, tree: Any) -> dict[str, int]:
    """Save, wait for every tier, and tell how many bytes of chunks each took."""
    heard = Heard(store)
    await store.save(step, tree)
    await store.flush()
    (saved,) = heard.of(StepSaved)
    return {"ram": saved.new_bytes} | {event.tier: event.written for event in heard.of(StepPromoted)}


async def test_the_same_state_again_writes_no_chunk_on_any_tier(
    three_tiers: StoreConfig, tmp_path: Path, far: Path
) -> None:
    tree = state()
    async with CheckpointStore.open(three_tiers) as store:
        first = await written(store, 1, tree)
        assert min(first.values()) >= ARRAYS * 2 * CHUNK
        before = pack_bytes(tmp_path / "disk"), pack_bytes(far)
        for step in (2, 3, 4):  # from the third save on, chunks are expected to be what they were
            assert await written(store, step, tree) == {"ram": 0, "disk": 0, "far": 0}
        assert (pack_bytes(tmp_path / "disk"), pack_bytes(far)) == before
        for info in await store.steps():
            assert_restored(await store.restore(info.step, resume=False), tree)


async def test_a_tenth_that_changed_costs_a_tenth_on_every_tier(three_tiers: StoreConfig) -> None:
    tree = state()
    async with CheckpointStore.open(three_tiers) as store:
        whole = await written(store, 1, tree)
        for step in (2, 3, 4):
            for i in range(ARRAYS // 10):
                tree[f"w{i}"][:] = np.random.default_rng(100 * step + i).integers(0, 255, 2 * CHUNK, dtype=np.uint8)
            part = await written(store, step, tree)
            assert part["ram"] == ARRAYS // 10 * 2 * CHUNK
            for tier in ("disk", "far"):
                # A pack's footer comes on top, and chunks fill their last page.
                assert 0.1 * whole[tier] <= part[tier] <= 0.13 * whole[tier]
        assert_restored(await store.restore(), tree)


async def test_one_changed_value_costs_one_chunk(three_tiers: StoreConfig) -> None:
    tree = state()
    async with CheckpointStore.open(three_tiers) as store:
        await written(store, 1, tree)
        tree["w3"][CHUNK + 5] ^= 1
        assert (await written(store, 2, tree))["ram"] == CHUNK


async def test_identical_arrays_are_stored_once(three_tiers: StoreConfig) -> None:
    one = state()["w0"]
    tree = {"a": one, "b": one.copy(), "deep": [one.copy(), {"c": one}]}
    async with CheckpointStore.open(three_tiers) as store:
        took = await written(store, 1, tree)
        assert took["ram"] == 2 * CHUNK
        assert max(took["disk"], took["far"]) < 3 * CHUNK
        assert_restored(await store.restore(), tree)


@pytest.mark.parametrize("meanwhile", ["nothing", "closed", "crashed"])
async def test_a_state_that_comes_back_is_not_written_again(three_tiers: StoreConfig, meanwhile: str) -> None:
    """Nor by a new process, which knows what every tier holds."""
    one = state(1)
    async with AsyncExitStack() as until_end:
        store = await until_end.enter_async_context(CheckpointStore.open(three_tiers))
        await written(store, 1, one)
        await written(store, 2, state(2))
        if meanwhile != "nothing":
            await (crash(store) if meanwhile == "crashed" else store.close())
            store = await until_end.enter_async_context(CheckpointStore.open(three_tiers))
        again = await written(store, 3, one)
        assert (again["disk"], again["far"]) == (0, 0)
        assert again["ram"] == (ARRAYS * 2 * CHUNK if meanwhile == "closed" else 0)  # a clean end gives the memory back
        assert_restored(await store.restore(), one)


async def test_a_promotion_tells_the_bytes_of_all_its_packs(
    shared_memory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit(monkeypatch, pack_size=4 * CHUNK)
    disk = tmp_path / "disk"
    tiers = config({"ram": ram(shared_memory), "disk": folder(disk)})
    async with CheckpointStore.open(tiers) as store:
        assert (await written(store, 1, state()))["disk"] == pack_bytes(disk)
    assert len(list(disk.glob("packs/*/*.pack"))) > 4  # several were in flight at once


async def test_a_chunk_that_a_repair_forgets_while_its_copies_are_looked_at_is_not_referred_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a save of several ranks past RAM may meet it, which keeps no repair from its turn."""
    async with CheckpointStore.open(config({"disk": folder(tmp_path / "disk")})) as store:
        await store.save(1, state())
        tier, loop = tier_of(store, "disk"), store._life.loop
        digest, extent = next(iter(tier.packs.index.items()))
        tier.packs.duplicates[digest] = [Extent(extent.path, extent.offset, CHUNK // 2)]  # in another encoding
        look = dedupe._of_one_encoding

        def forgotten_behind(*arguments: Any) -> dict[bytes, Extent]:
            found = look(*arguments)
            assert found == {digest: extent}
            loop.soon(lambda: tier.packs.forget(digest))
            return found

        monkeypatch.setattr(dedupe, "_of_one_encoding", forgotten_behind)
        engine_state = store._life.engine.state
        assert await loop.call(find_chunks(engine_state, tier, {digest: CHUNK}, set())) == {}
