"""Saves of arrays in the memory of devices: straight into the slab, on streams of our own, bit for bit."""

from __future__ import annotations

import asyncio
import shutil
import time
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.devices import EVERY_KIND, fail_at, idle, refuse_buffers, rig, values
from support.scenes import CHUNK, SOON, assert_restored, assert_same, config, folder, new_shared_folder, ram

from tieredckpt import CheckpointStore, DeviceUnavailable, Shard, Sharded
from tieredckpt.config import StoreConfig
from tieredckpt.devices.examine import page_locking
from tieredckpt.testing.devices import FakeDevice, FakeDriver, FakeEvent, FakeStream


def state(seed: int) -> dict[str, Any]:
    return values(seed) | {"small": {f"b{i}": np.full(8, seed + i / 7) for i in range(5)}, "epoch": seed}


def on_devices(rig: Any, tree: Any, seed: int = 0) -> Any:
    """The arrays of a tree on devices, in turn; one in four stays on the host."""
    turn = iter(range(seed, 1 << 30))

    def moved(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: moved(each) for key, each in value.items()}
        if not isinstance(value, np.ndarray) or (value.dtype == ml_dtypes.bfloat16 and rig.count == 0):
            return value
        which = next(turn) % (rig.count + 1)
        return value if which == rig.count else rig.array(value, which)

    return moved(tree)


@given(
    seed=st.integers(0, 1 << 20),
    devices=st.integers(1, 3),
    lockable=st.sampled_from([None, 0, 1 << 20, 200 << 20]),
    threads=st.integers(1, 3),
    saves=st.integers(1, 3),
    scratch=st.sampled_from([None, 0]),
)
@settings(max_examples=25)
async def test_what_was_on_devices_comes_back_bit_for_bit(
    seed: int, devices: int, lockable: int | None, threads: int, saves: int, scratch: int | None
) -> None:
    """Whatever is registered, whichever stream goes on first, how full devices are, and however often it is saved."""
    memory = new_shared_folder()
    settings = config({"ram": ram(memory)}, name="of-devices", threads=threads)
    try:
        with rig("fake", devices, seed=seed, lockable=lockable) as here:
            for device in here.driver.devices:
                device.scratch = scratch
            async with CheckpointStore.open(settings) as store:
                for step in range(saves):
                    await store.save(step, on_devices(here, state(seed + step), seed))
                    assert_restored(await store.restore(resume=False), state(seed + step))
            assert not here.driver.pageable or lockable is not None
            assert not here.driver.registered, "a slab that is closed is registered no more"
    finally:
        shutil.rmtree(memory)


@pytest.mark.parametrize("kind", EVERY_KIND)
async def test_a_save_waits_for_what_the_program_has_enqueued_and_synchronises_nothing_else(
    kind: str, tiers: StoreConfig
) -> None:
    with rig(kind) as here:
        array = here.array(np.zeros(4 * CHUNK, np.uint8))
        async with CheckpointStore.open(tiers) as store:
            here.busy(0.05)
            here.change(array, np.full(4 * CHUNK, 7, np.uint8))
            await store.save(1, {"w": array})
            here.change(array, np.full(4 * CHUNK, 8, np.uint8))
            restored = await store.restore()
    assert restored is not None
    assert (restored.tree["w"] == 7).all()


async def registered(store: CheckpointStore, nbytes: int = 0) -> None:
    """Wait until the devices reach all memory that the slab has, and so many bytes of it."""
    state = store._life.engine.state
    async with asyncio.timeout(SOON):
        while (ram := state.tiers[0].ram) is None or state.host_memory.registered(ram.slab.array) < max(
            nbytes, ram.slab.reserved
        ):
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("kind", EVERY_KIND)
async def test_once_the_slab_is_registered_every_byte_goes_straight_into_it(
    kind: str, tiers: StoreConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    large = np.arange(40 * CHUNK, dtype=np.uint8)
    with rig(kind) as here:
        if page_locking(here.driver).slower:
            pytest.skip("this machine's driver registers no shared memory")
        async with CheckpointStore.open(tiers) as store:
            await store.save(1, {"w": here.array(large)})
            await registered(store, 2 * large.nbytes)
            # The first save waits for no registration, which may be as fast.
            before = here.driver.direct if kind == "fake" else 0
            refuse_buffers(monkeypatch)
            await store.save(2, {"w": here.array(large + 1)})
            if kind == "fake":
                assert (here.driver.direct - before, here.driver.pageable) == (large.nbytes, 0)
            restored = await store.restore(as_="numpy")
            assert restored is not None
            assert (restored.tree["w"] == large + 1).all()


@pytest.mark.parametrize("kind", EVERY_KIND)
async def test_arrays_of_several_devices_come_back_together_bit_for_bit(kind: str, tiers: StoreConfig) -> None:
    saved = values(1)
    with rig(kind, 2) as here:
        async with CheckpointStore.open(tiers) as store:
            for step in (1, 2):  # the slab is registered at the second time
                tree = {key: here.array(each, i % here.count) for i, (key, each) in enumerate(saved.items())}
                await store.save(step, tree)
            zeros = {key: np.zeros_like(each) for key, each in saved.items()}
            like = {key: here.array(each, i % here.count) for i, (key, each) in enumerate(zeros.items())}
            restored = await store.restore(like=like)
            assert restored is not None
            for key, each in saved.items():
                assert restored.tree[key].device == like[key].device
                assert here.read(restored.tree[key]).tobytes() == each.tobytes(), key


@pytest.mark.parametrize("kind", EVERY_KIND)
def test_a_program_that_works_on_a_stream_of_its_own_saves_and_gets_what_it_enqueued_there(
    kind: str, tiers: StoreConfig
) -> None:
    zeros = np.zeros(6 * CHUNK, np.uint8)
    with rig(kind) as here, CheckpointStore.open(tiers).sync() as store, here.own_stream():
        array = here.array(zeros)
        for step in (1, 2, 3):
            here.busy(0.05)
            here.change(array, zeros + step)
            store.save(step, {"w": array})
            here.change(array, zeros + 9)
            here.busy(0.02)
            restored = store.restore(like={"w": array}, resume=False)
            assert restored is not None
            assert (here.read(restored.tree["w"]) == step).all()
            assert (here.read(array) == 9).all()


async def test_copies_of_several_devices_are_in_flight_at_once(tiers: StoreConfig) -> None:
    with FakeDriver(3) as driver:
        tree = {f"w{i}": device.array(np.full(16 * CHUNK, i, np.uint8)) for i, device in enumerate(driver.devices)}
        async with CheckpointStore.open(tiers) as store:
            with driver.paused():
                saving = asyncio.ensure_future(store.save(1, tree))
                async with asyncio.timeout(SOON):
                    while not all(device.waiting for device in driver.devices):
                        await asyncio.sleep(0.01)
                assert all(device.transferred == 0 for device in driver.devices)
            await saving


async def test_the_stream_of_the_calling_thread_counts_on_both_faces(tiers: StoreConfig) -> None:
    """The engine's thread has another current stream than the trainer's."""
    with FakeDriver() as driver:
        (device,) = driver.devices
        device.current = device.stream()
        array = device.array(np.zeros(4 * CHUNK, np.uint8))

        def change(value: int) -> None:
            device.current.enqueue(lambda: time.sleep(0.05))
            array.change(np.full(4 * CHUNK, value, np.uint8))

        def saved_by_the_blocking_face() -> Any:
            device.current = device.stream()
            with CheckpointStore.open(tiers).sync() as store:
                change(1)
                store.save(1, {"w": array})
                return store.restore()

        restored = await asyncio.to_thread(saved_by_the_blocking_face)
        assert (restored.tree["w"] == 1).all()
        async with CheckpointStore.open(tiers) as store:
            change(2)
            await store.save(2, {"w": array})
            found = await store.restore()
            assert found is not None
            assert (found.tree["w"] == 2).all()


CHUNKS = 9
TWO = {"threads": 2, "lockable": None}


@given(
    seed=st.integers(0, 1 << 16),
    threads=st.integers(1, 3),
    speed=st.sampled_from([None, 200e6, 40e6]),
    lockable=st.sampled_from([None, 0]),
    fails_at=st.none() | st.integers(0, 2 * CHUNKS),
    cancelled_after=st.none() | st.integers(0, 2 * CHUNKS * CHUNK),
)
@example(seed=1, speed=None, fails_at=0, cancelled_after=None, **TWO)
@example(seed=2, speed=1e6, fails_at=2 * CHUNKS - 2, cancelled_after=None, **TWO)
@example(seed=3, speed=1e6, fails_at=None, cancelled_after=0, **TWO)
@example(seed=4, speed=1e6, fails_at=None, cancelled_after=CHUNKS * CHUNK, **TWO)
@settings(max_examples=30)
async def test_when_a_save_has_ended_no_device_writes_for_it_and_what_failed_leaves_nothing(
    seed: int,
    threads: int,
    speed: float | None,
    lockable: int | None,
    fails_at: int | None,
    cancelled_after: int | None,
) -> None:
    """However fast the link is, whether it fails in the middle of copies, and whenever the save is cancelled."""
    memory = new_shared_folder()
    saved = {f"w{i}": np.random.default_rng(seed + i).integers(0, 256, CHUNKS * CHUNK).astype(np.uint8) for i in (0, 1)}
    settings = config({"ram": ram(memory)}, name="of-endings", threads=threads)
    try:
        with FakeDriver(speed=speed, seed=seed, lockable=lockable) as driver:
            (device,) = driver.devices
            tree = {key: device.array(each) for key, each in saved.items()}
            async with CheckpointStore.open(settings) as store:
                await store.save(1, {"w": np.arange(8 * CHUNK, dtype=np.uint8)})
                await store.flush()
                slab = store._life.engine.state.tiers[0].ram
                assert slab is not None
                used, before = slab.slab.used, device.transferred
                fail_at(device, fails_at)
                saving = asyncio.ensure_future(store.save(2, tree))
                while cancelled_after is not None and not saving.done():
                    if device.transferred - before >= cancelled_after:
                        saving.cancel()
                    await asyncio.sleep(0)
                (outcome,) = await asyncio.gather(saving, return_exceptions=True)
                assert not any(len(stream) for stream in device._streams if stream is not device.current)
                moved = device.transferred
                await idle(device)
                assert device.transferred == moved
                if isinstance(outcome, DeviceUnavailable):
                    assert "fake:0: an illegal memory access" in str(outcome)
                    assert fails_at is not None
                elif isinstance(outcome, asyncio.CancelledError):
                    assert cancelled_after is not None
                else:
                    assert not isinstance(outcome, BaseException), outcome
                committed = await store.all_steps() == (1, 2)
                if not isinstance(outcome, asyncio.CancelledError):  # which may come when it is committed
                    assert committed == (not isinstance(outcome, BaseException))
                if not committed:
                    assert slab.slab.used == used
                fail_at(device, None)
                await store.save(3, tree)
                assert_restored(await store.restore(resume=False), saved)
    finally:
        shutil.rmtree(memory)


@pytest.mark.parametrize(("of", "name"), [(FakeDevice, "stream"), (FakeStream, "copy_out")])
async def test_a_device_that_begins_no_copy_leaves_nothing_in_the_slab(
    of: type, name: str, tiers: StoreConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise DeviceUnavailable("device fake:0: out of memory")

    with FakeDriver() as driver:
        (device,) = driver.devices
        async with CheckpointStore.open(tiers) as store:
            array = device.array(np.ones(8 * CHUNK, np.uint8))
            monkeypatch.setattr(of, name, fails)
            with pytest.raises(DeviceUnavailable, match=r"^array 'w' was not copied: device fake:0: out of memory"):
                await store.save(1, {"w": array})
            ram = store._life.engine.state.tiers[0].ram
            assert ram is not None
            assert ram.slab.used == 0


async def test_a_save_whose_copies_no_event_can_follow_fails_when_no_device_writes_any_more(
    tiers: StoreConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its extents are given back, and another save may take them."""
    with FakeDriver(speed=2e6) as driver:
        (device,) = driver.devices
        async with CheckpointStore.open(tiers) as store:
            array = device.array(np.ones(8 * CHUNK, np.uint8))
            record = FakeStream.record

            def fails(self: FakeStream) -> FakeEvent:
                if self is device.current:
                    return record(self)
                raise DeviceUnavailable("device fake:0: an event failed")

            monkeypatch.setattr(FakeStream, "record", fails)
            with pytest.raises(DeviceUnavailable, match=r"^array 'w' was not copied: .* an event failed"):
                await store.save(1, {"w": array})
            assert not device.waiting, "nothing of it is under way"
            moved = device.transferred
            await asyncio.sleep(0.05)
            assert device.transferred == moved
            ram = store._life.engine.state.tiers[0].ram
            assert ram is not None
            assert ram.slab.used == 0


@pytest.mark.parametrize("capture", ["copy", "lazy"])
async def test_a_device_without_free_memory_is_saved_all_the_same(tiers: StoreConfig, capture: Any) -> None:
    """Small arrays of one form come one by one, where there is no memory to gather them."""
    small = {f"b{i}": np.full(8, i / 7) for i in range(5)}
    with FakeDriver() as driver:
        (device,) = driver.devices
        device.scratch = 63
        async with CheckpointStore.open(tiers) as store:
            saved = await store.save(1, {key: device.array(each) for key, each in small.items()}, capture=capture)
            await saved.reached("ram")
            assert_restored(await store.restore(), small)


async def test_a_state_that_ram_cannot_hold_streams_past_it(shared_memory: Path, tmp_path: Path) -> None:
    tiers = config({"ram": ram(shared_memory, capacity="256 KiB"), "disk": folder(tmp_path / "disk")})
    large = np.random.default_rng(0).integers(0, 256, 60 * CHUNK, dtype=np.uint8)
    with FakeDriver() as driver:
        async with CheckpointStore.open(tiers) as store:
            await store.save(1, {"w": driver.devices[0].array(large)})
            restored = await store.restore()
            assert restored is not None
            assert (restored.tree["w"] == large).all()


@given(seed=st.integers(0, 1 << 16))
@settings(max_examples=15)
async def test_pieces_of_arrays_on_devices_are_saved_as_those_on_the_host(seed: int) -> None:
    rng = np.random.default_rng(seed)
    whole = rng.standard_normal((rng.integers(2, 300), rng.integers(1, 200))).astype(np.float32)
    at = int(rng.integers(1, whole.shape[0]))
    memory = new_shared_folder()
    try:
        with FakeDriver(seed=seed) as driver:
            put = driver.devices[0].array
            first, second = (
                Shard(put(part), whole.shape, (row, 0)) for row, part in ((0, whole[:at]), (at, whole[at:]))
            )
            tree = {"w": Sharded([first, second])}
            async with CheckpointStore.open(config({"ram": ram(memory)}, name="of-pieces")) as store:
                await store.save(1, tree)
                restored = await store.restore()
                assert restored is not None
                assert_same(restored.tree["w"], whole)
    finally:
        shutil.rmtree(memory)
