"""Restores straight into the memory of devices, from RAM and from folders, verified before they are copied."""

from __future__ import annotations

import asyncio
import shutil
import time
from itertools import cycle
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.devices import EVERY_KIND, refuse_buffers, rig, values
from support.insight import flip_chunk
from support.scenes import CHUNK, config, folder, new_shared_folder, ram

from tieredckpt import CheckpointStore, DeviceUnavailable, Invalid, Shard, Sharded
from tieredckpt.config import StoreConfig
from tieredckpt.devices.examine import page_locking
from tieredckpt.testing.devices import FakeArray, FakeDriver


def zeros_of(tree: dict[str, Any]) -> dict[str, Any]:
    """Arrays of the same forms, those that were not contiguous again not."""
    return {key: np.zeros_like(array) if array.ndim != 2 else np.zeros_like(array.T).T for key, array in tree.items()}


def assert_on_devices(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for key, array in found.items():
        assert isinstance(array, FakeArray)
        assert (array.shape, array.dtype) == (expected[key].shape, expected[key].dtype)
        assert array.read().tobytes() == expected[key].tobytes(), key


@given(
    seed=st.integers(0, 1 << 20),
    devices=st.integers(1, 3),
    lockable=st.sampled_from([None, 0, 200 << 20]),
    way=st.sampled_from(["like", "into"]),
    codec=st.sampled_from(["none", "fast"]),
    without_ram=st.booleans(),
)
@settings(max_examples=25)
async def test_arrays_come_back_to_devices_bit_for_bit(
    seed: int, devices: int, lockable: int | None, way: str, codec: str, without_ram: bool
) -> None:
    memory = new_shared_folder()
    tiers = config({"ram": ram(memory), "disk": folder(memory / "disk", codec=codec)})
    saved = values(seed)
    try:
        async with CheckpointStore.open(tiers) as store:
            await store.save(1, saved)
            await store.flush()
        if without_ram:
            shutil.rmtree(memory / "of-test")
        with FakeDriver(devices, seed=seed, lockable=lockable) as driver:
            turn = cycle(driver.devices)
            example = {key: next(turn).array(each) for key, each in zeros_of(saved).items()}
            async with CheckpointStore.open(tiers) as store:
                restored = await store.restore(**{way: example})
                assert restored is not None
                assert set(restored.sources) <= {"disk"} if without_ram else restored.sources
                assert_on_devices(restored.tree, saved)
                if way == "into":
                    assert_on_devices(example, saved)
            assert lockable is not None or not driver.pageable
            assert not driver.registered
    finally:
        shutil.rmtree(memory)


@pytest.mark.parametrize("kind", EVERY_KIND)
@pytest.mark.parametrize("way", ["like", "into"])
async def test_a_restore_comes_after_what_the_program_has_enqueued(kind: str, way: str, tiers: StoreConfig) -> None:
    saved = np.arange(9 * CHUNK, dtype=np.uint8)
    with rig(kind) as here:
        async with CheckpointStore.open(tiers) as store:
            await store.save(1, {"w": saved})
            for _ in range(2):  # the slab is registered at the second time
                array = here.array(np.zeros_like(saved))
                here.busy(0.02)
                here.change(array, saved * 0 + 9)
                restored = await store.restore(**{way: {"w": array}}, resume=False)
                assert restored is not None
                assert (here.read(restored.tree["w"]) == saved).all()
                assert (here.read(array) == (saved if way == "into" else 9)).all()


def test_new_memory_belongs_to_the_stream_on_which_the_caller_works(tiers: StoreConfig) -> None:
    """What the caller has enqueued there may still use it, and the engine's threads have another current stream."""
    saved = np.arange(9 * CHUNK, dtype=np.uint8)
    order: list[str] = []
    with FakeDriver() as driver, CheckpointStore.open(tiers).sync() as store:
        (device,) = driver.devices
        store.save(1, {"w": saved})
        device.current = device.stream()
        example = device.array(saved * 0)
        for _ in range(20):
            device.current.enqueue(lambda: time.sleep(0.002))
        device.current.enqueue(lambda: order.append("the caller's work"))
        transfer = device.transfer

        def copied(nbytes: int) -> None:
            order.append("a copy")
            transfer(nbytes)

        device.transfer = copied
        restored = store.restore(like={"w": example})
        assert restored is not None
        assert restored.tree["w"].stream is device.current
        assert order[0] == "the caller's work"
        assert (restored.tree["w"].read() == saved).all()


@pytest.mark.parametrize("kind", EVERY_KIND)
async def test_from_registered_memory_every_byte_goes_straight_to_the_device(
    kind: str, tiers: StoreConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = np.arange(40 * CHUNK, dtype=np.uint8)
    with rig(kind) as here:
        if page_locking(here.driver).slower:
            pytest.skip("this machine's driver registers no shared memory")
        async with CheckpointStore.open(tiers) as store:
            await store.save(1, {"w": here.array(saved)})
            state = store._life.engine.state
            ram = state.tiers[0].ram
            assert ram is not None
            await asyncio.to_thread(state.host_memory.extend, ram.slab.array, ram.slab.reserved)
            before = here.driver.direct if kind == "fake" else 0
            refuse_buffers(monkeypatch)
            array = here.array(saved * 0)
            await store.restore(into={"w": array})
            if kind == "fake":
                assert (here.driver.direct - before, here.driver.pageable) == (saved.nbytes, 0)
            assert (here.read(array) == saved).all()


async def test_damage_is_found_before_the_device_has_it(tiers: StoreConfig) -> None:
    saved = {"w": np.arange(9 * CHUNK, dtype=np.uint8)}
    with FakeDriver() as driver:
        (device,) = driver.devices
        async with CheckpointStore.open(tiers) as store:
            await store.save(1, saved)
            await store.flush()
            await flip_chunk(store, "ram", 1, "w")
            restored = await store.restore(like={"w": device.array(saved["w"] * 0)}, resume=False)
            assert restored is not None
            assert_on_devices(restored.tree, saved)
            assert restored.sources["disk"]


async def test_a_device_that_fails_fails_the_restore(tiers: StoreConfig) -> None:
    saved = {"w": np.arange(9 * CHUNK, dtype=np.uint8)}
    with FakeDriver() as driver:
        (device,) = driver.devices
        async with CheckpointStore.open(tiers) as store:
            await store.save(1, saved)
            device.fail_after = 3
            with pytest.raises(DeviceUnavailable, match="fake:0"):
                await store.restore(into={"w": device.array(saved["w"] * 0)}, resume=False)
            device.fail_after = None
            restored = await store.restore(into={"w": device.array(saved["w"] * 0)}, resume=False)
            assert restored is not None
            assert_on_devices(restored.tree, saved)


async def test_a_failure_in_a_block_of_an_array_names_the_array(tiers: StoreConfig) -> None:
    whole, cut = np.arange(10 * CHUNK, dtype=np.uint8), 30_011
    shards = Sharded([Shard(part, whole.shape, (at,)) for part, at in ((whole[:cut], 0), (whole[cut:], cut))])
    with FakeDriver() as driver:
        (device,) = driver.devices
        async with CheckpointStore.open(tiers) as store:
            await store.save(1, {"model": {"w": shards}})
            part = Shard(device.array(whole[cut:] * 0), whole.shape, (cut,))
            device.fail_after = 0
            with pytest.raises(DeviceUnavailable, match=r"^array 'model/w' was not filled"):
                await store.restore(like={"model": {"w": part}})


async def test_leaves_that_share_memory_of_a_device_need_the_same_bytes(tiers: StoreConfig) -> None:
    with FakeDriver() as driver:
        (device,) = driver.devices
        async with CheckpointStore.open(tiers) as store:
            await store.save(1, {"a": np.ones(5 * CHUNK), "b": np.zeros(5 * CHUNK)})
            tied = device.array(np.zeros(5 * CHUNK))
            with pytest.raises(Invalid, match="share memory"):
                await store.restore(into={"a": tied, "b": tied}, resume=False)
            await store.save(2, {"a": np.ones(5 * CHUNK), "b": np.ones(5 * CHUNK)})
            restored = await store.restore(into={"a": tied, "b": tied})
            assert restored is not None
            assert (tied.read() == 1).all()


@given(seed=st.integers(0, 1 << 16))
@settings(max_examples=15)
async def test_boxes_of_arrays_come_to_devices(seed: int) -> None:
    rng = np.random.default_rng(seed)
    whole = rng.standard_normal((int(rng.integers(2, 300)), int(rng.integers(2, 100)))).astype(np.float32)
    row, column = int(rng.integers(0, whole.shape[0])), int(rng.integers(0, whole.shape[1]))
    memory = new_shared_folder()
    try:
        with FakeDriver(seed=seed) as driver:
            async with CheckpointStore.open(config({"ram": ram(memory)}, name="of-boxes")) as store:
                await store.save(1, {"w": whole})
                part = driver.devices[0].array(whole[row:, column:] * 0)
                restored = await store.restore(like={"w": Shard(part, whole.shape, (row, column))})
                assert restored is not None
                assert (restored.tree["w"].array.read() == whole[row:, column:]).all()
    finally:
        shutil.rmtree(memory)
