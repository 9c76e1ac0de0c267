"""What a store tells of itself, and when it asks for a save: the same on both faces, before and after a restart."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.scenes import config, folder, ram

from tieredckpt import CheckpointStore, Closed, NotFound, StoreConfig
from tieredckpt.engine.state.views import numbers
from tieredckpt.engine.tier import step_index
from tieredckpt.engine.tier.tier import Tier
from tieredckpt.format.manifest import StepId


@pytest.fixture
def two_tiers(tmp_path: Path, shared_memory: Path) -> StoreConfig:
    tiers = {"ram": ram(shared_memory), "disk": folder(tmp_path / "disk", retain="all")}
    return config(tiers, schedule={"kind": "every_n_steps", "n": 10})


def tree() -> dict[str, Any]:
    twice = np.arange(8192, dtype=np.int32)
    return {"a": twice, "b": [twice.copy(), 1.5], "c": None}


async def test_a_step_is_described_in_the_order_of_its_tree(two_tiers: StoreConfig) -> None:
    async with CheckpointStore.open(two_tiers) as store:
        await store.save(3, tree(), metrics={"loss": 2.0})
        await store.flush()
        found = await store.describe()
        assert [(array.key, array.dtype, array.shape, array.nbytes) for array in found.arrays] == [
            ("a", "int32", (8192,), 32768),
            ("b/0", "int32", (8192,), 32768),
        ]
        assert found.scalars == {"b/1": 1.5, "c": None}
        assert found.distinct_nbytes == 32768
        assert (found.info,) == await store.steps()
        assert found.info.tiers == ("ram", "disk")
        part = await store.describe(3, keys=["b"])
        assert [array.key for array in part.arrays] == ["b/0"]
        assert part.scalars == {"b/1": 1.5}
        with pytest.raises(NotFound, match="serial 2"):
            await store.describe(3, serial=2)


def test_both_faces_tell_the_same(two_tiers: StoreConfig) -> None:
    opened = CheckpointStore.open(two_tiers)
    with opened.sync() as store:
        store.save(3, tree())
        store.flush()
        assert store.describe(3) == asyncio.run(opened.describe(3))
        assert store.tier_infos() == asyncio.run(opened.tier_infos())
        assert [(tier.name, tier.kind, tier.steps, tier.healthy) for tier in store.tier_infos()] == [
            ("ram", "ram", 1, True),
            ("disk", "posix", 1, True),
        ]


async def test_a_reader_counts_the_memory_in_use_as_its_writer_does(two_tiers: StoreConfig) -> None:
    async with CheckpointStore.open(two_tiers) as writer:
        for step in (1, 2):
            await writer.save(step, {**tree(), "odd": np.full(5000, step, np.uint8)})
        await writer.flush()
        async with CheckpointStore.open(two_tiers, read_only=True) as reader:
            used = [tier.used for tier in await reader.tier_infos()]
        assert used == [tier.used for tier in await writer.tier_infos()]
        assert used[0] > 32768


async def test_a_tier_that_is_not_there_is_told_with_its_reason(two_tiers: StoreConfig, tmp_path: Path) -> None:
    async with CheckpointStore.open(two_tiers) as store:
        await store.save(1, tree())
        await store.flush()
    (tmp_path / "disk").rename(tmp_path / "moved")
    async with CheckpointStore.open(two_tiers, read_only=True) as reader:
        ram, disk = await reader.tier_infos()
        assert (ram.healthy, disk.healthy) == (True, False)  # RAM that was given back is no fault
        assert "there is no RAM of a store" in ram.problem
        assert f"there is no folder {tmp_path / 'disk'}" in disk.problem
        assert await reader.restore() is None
    assert not (tmp_path / "disk").exists()


async def test_nothing_is_told_before_opening(two_tiers: StoreConfig) -> None:
    store = CheckpointStore.open(two_tiers)
    with pytest.raises(Closed):
        await store.describe()
    with pytest.raises(Closed):
        await store.tier_infos()


async def test_a_save_behind_the_training_counts_from_its_start(
    two_tiers: StoreConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    jnp = pytest.importorskip("jax.numpy")
    async with CheckpointStore.open(two_tiers) as store:
        may_save = asyncio.Event()
        save = store._life.engine.save

        async def late(*arguments: Any, **options: Any) -> Any:
            await may_save.wait()
            return await save(*arguments, **options)

        monkeypatch.setattr(store._life.engine.pending, "_save", late)
        ckpt = await store.save(10, {"w": jnp.zeros(4)}, capture="reference")
        assert [store.due(step) for step in (11, 20)] == [False, True]
        store._life.loop.soon(may_save.set)
        await ckpt.reached("ram")
        assert [store.due(step) for step in (11, 20)] == [False, True]


async def test_a_save_behind_that_fails_is_due_again(two_tiers: StoreConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    jnp = pytest.importorskip("jax.numpy")
    async with CheckpointStore.open(two_tiers) as store:

        async def fail(*arguments: Any, **options: Any) -> Any:
            raise NotFound("no luck")

        monkeypatch.setattr(store._life.engine.pending, "_save", fail)
        ckpt = await store.save(10, {"w": jnp.zeros(4)}, capture="reference")
        with pytest.raises(NotFound, match="no luck"):
            await ckpt.reached("ram")
        assert store.due(11)


async def test_a_step_that_is_evicted_under_a_reader_is_not_called_damaged(
    two_tiers: StoreConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with CheckpointStore.open(two_tiers) as writer:
        for step in (1, 2):
            await writer.save(step, {"w": np.full(9000, step)})
        await writer.flush()
        read_index = step_index.read

        async def read_late(tier: Tier, step: StepId) -> Any:
            if (tier.name, step.step) == ("disk", 1):
                monkeypatch.undo()
                await writer.evict(1, "disk")
            return await read_index(tier, step)

        monkeypatch.setattr(step_index, "read", read_late)
        async with CheckpointStore.open(two_tiers, read_only=True) as reader:
            assert [(step.step, step.tiers, step.damaged) for step in await reader.steps()] == [
                (1, ("ram",), ()),
                (2, ("ram", "disk"), ()),
            ]
            assert [tier.damaged for tier in await reader.tier_infos()] == [(), ()]


def test_a_metric_that_is_no_number_harms_nobody() -> None:
    told = numbers({"loss": 0.5, "nan": "nan", "inf": "-inf", "text": "\x1b[2J", "nothing": ""})
    assert {name: str(value) for name, value in told.items()} == {"loss": "0.5", "nan": "nan", "inf": "-inf"}


async def test_an_unreadable_step_can_be_evicted(two_tiers: StoreConfig, tmp_path: Path) -> None:
    async with CheckpointStore.open(two_tiers) as store:
        for step in (1, 2):
            await store.save(step, {"w": np.full(9000, step)})
        await store.flush()
    next((tmp_path / "disk" / "steps").glob("*1-*/manifest.ocdbt")).write_bytes(b"torn")
    async with CheckpointStore.open(two_tiers) as store:
        assert [len(tier.damaged) for tier in await store.tier_infos()] == [0, 1]
        await store.evict(1, "disk")
        assert [len(tier.damaged) for tier in await store.tier_infos()] == [0, 0]
