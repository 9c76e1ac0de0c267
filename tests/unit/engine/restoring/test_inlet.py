"""Copies to devices are in flight together, a bounded number of them, and none is when a restore has ended."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.devices import EVERY_KIND, fail_at, idle, rig
from support.scenes import CHUNK, SOON, config, folder, new_shared_folder, ram

from tieredckpt import CheckpointStore, DeviceUnavailable
from tieredckpt.devices.link import _AHEAD
from tieredckpt.testing.devices import FakeArray, FakeDevice, FakeDriver, FakeStream

CHUNKS = 9
SMALL = 6
COPIES = SMALL + 2 * CHUNKS
FROM_RAM = {"lockable": None, "cancelled_after": None, "without_ram": False}


def values(seed: int) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    large = {f"w{i}": rng.integers(0, 256, CHUNKS * CHUNK).astype(np.uint8) for i in range(2)}
    return large | {f"b{i}": rng.standard_normal(8) for i in range(SMALL)}


async def run(restoring: asyncio.Task[Any], device: FakeDevice, cancelled_after: int | None) -> str:
    """What became of a restore, which is cancelled after so many bytes."""
    while cancelled_after is not None and not restoring.done() and device.transferred < cancelled_after:
        await asyncio.sleep(0)
    if cancelled_after is not None:
        restoring.cancel()
    outcome = (await asyncio.gather(restoring, return_exceptions=True))[0]
    if isinstance(outcome, asyncio.CancelledError):
        return "cancelled"
    if isinstance(outcome, DeviceUnavailable):
        assert "fake:0" in str(outcome)
        assert any(f"array '{key}'" in str(outcome) for key in values(0)), "it says what was not filled"
        return "failed"
    assert not isinstance(outcome, BaseException), outcome
    return "filled"


@given(
    seed=st.integers(0, 1 << 16),
    threads=st.integers(1, 3),
    speed=st.sampled_from([None, 200e6, 40e6]),
    lockable=st.sampled_from([None, 0]),
    fails_at=st.none() | st.integers(0, COPIES),
    cancelled_after=st.none() | st.integers(0, 2 * CHUNKS * CHUNK),
    without_ram=st.booleans(),
)
@example(seed=1, threads=1, speed=None, fails_at=COPIES - 1, **FROM_RAM)  # when no other copy is to be begun
@example(seed=2, threads=2, speed=1e6, fails_at=SMALL + 4, **FROM_RAM)  # while another thread has copies in flight
@example(seed=3, threads=3, speed=1e6, fails_at=SMALL + 4, **FROM_RAM)
@settings(max_examples=30)
async def test_when_a_restore_has_ended_no_device_reads_or_writes_for_it(
    seed: int,
    threads: int,
    speed: float | None,
    lockable: int | None,
    fails_at: int | None,
    cancelled_after: int | None,
    without_ram: bool,
) -> None:
    """However fast the link is, whether it fails in the middle of copies, and whenever the restore is cancelled."""
    memory = new_shared_folder()
    tiers = config({"ram": ram(memory, on_close="keep"), "disk": folder(memory / "disk")}, threads=threads)
    saved = values(seed)
    try:
        async with CheckpointStore.open(tiers) as store:
            await store.save(1, saved)
            await store.flush()
        if without_ram:
            shutil.rmtree(memory / "of-test")
        with FakeDriver(speed=speed, seed=seed, lockable=lockable) as driver:
            (device,) = driver.devices
            arrays = {key: device.array(each * 0) for key, each in saved.items()}
            async with CheckpointStore.open(tiers) as store:
                fail_at(device, fails_at)
                outcome = await run(
                    asyncio.ensure_future(store.restore(into=arrays, resume=False)), device, cancelled_after
                )
                before = device.transferred
                assert not any(len(stream) for stream in device._streams if stream is not device.current)
                await idle(device)
                assert device.transferred == before
                assert outcome != "failed" or fails_at is not None
                assert outcome != "cancelled" or cancelled_after is not None
                if outcome == "filled":
                    assert_filled(arrays, saved)
                fail_at(device, None)
                await store.restore(into=arrays, resume=False)
                assert_filled(arrays, saved)
    finally:
        shutil.rmtree(memory)


def assert_filled(arrays: dict[str, FakeArray], saved: dict[str, Any]) -> None:
    for key, array in arrays.items():
        assert array.read().tobytes() == saved[key].tobytes(), key


@pytest.mark.parametrize("threads", [1, 2])
async def test_each_thread_has_a_few_copies_in_flight_and_no_more(
    threads: int, shared_memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiers = config({"ram": ram(shared_memory)}, name="of-copies", threads=threads)
    in_flight = most = 0
    begin, end = FakeStream.copy_in, FakeDevice.transfer

    def copy_in(self: FakeStream, sources: Any, target: Any) -> None:
        nonlocal in_flight, most
        in_flight += 1
        most = max(most, in_flight)
        begin(self, sources, target)

    def transfer(self: FakeDevice, nbytes: int) -> None:
        nonlocal in_flight
        end(self, nbytes)
        in_flight -= 1

    monkeypatch.setattr(FakeStream, "copy_in", copy_in)
    monkeypatch.setattr(FakeDevice, "transfer", transfer)
    saved = {"w": np.arange(40 * CHUNK, dtype=np.uint8)}
    with FakeDriver() as driver:
        (device,) = driver.devices
        array = device.array(saved["w"] * 0)
        async with CheckpointStore.open(tiers) as store:
            await store.save(1, saved)
            with driver.paused():
                restoring = asyncio.ensure_future(store.restore(into={"w": array}))
                async with asyncio.timeout(SOON):
                    while in_flight < threads * _AHEAD:
                        await asyncio.sleep(0.01)
                assert device.transferred == 0
            await restoring
        assert most == threads * _AHEAD
        assert_filled({"w": array}, saved)


@pytest.mark.parametrize("kind", EVERY_KIND)
@pytest.mark.parametrize(("codec", "straight"), [("none", True), ("fast", False)])
async def test_what_is_read_from_a_folder_goes_to_the_device_from_where_it_was_read(
    kind: str, codec: str, straight: bool, shared_memory: Path
) -> None:
    """Without another copy on the host; what has to be decoded passes through a buffer."""
    tiers = config({"disk": folder(shared_memory / "disk", codec=codec)})
    saved = np.arange(40 * CHUNK, dtype=np.uint8)
    with rig(kind) as here:
        async with CheckpointStore.open(tiers) as store:
            await store.save(1, {"w": saved})
            await store.flush()
        async with CheckpointStore.open(tiers) as store:  # whose scratch memory grows as it is used
            for _ in range(2):
                array = here.array(saved * 0)
                if kind == "fake":
                    before = here.driver.direct
                restored = await store.restore(into={"w": array}, resume=False)
                assert restored is not None
                assert set(restored.sources) == {"disk"}
                assert (here.read(array) == saved).all()
                if kind == "fake":
                    assert here.driver.direct - before == (saved.nbytes if straight else 0)
                    assert not here.driver.pageable
    if kind == "fake":
        assert not here.driver.registered, "scratch memory that is closed is registered no more"
