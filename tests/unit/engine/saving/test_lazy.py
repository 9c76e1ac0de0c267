"""Saves that copy while the training goes on: in every order, what is committed is what was there at the call."""

from __future__ import annotations

import asyncio
import gc
import shutil
import threading
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.devices import EVERY_KIND, rig
from support.lazy_saves import SIZE, full, values_of
from support.scenes import SOON, Heard, config, new_shared_folder, polled, ram

from tieredckpt import CheckpointStore, Closed, DeviceUnavailable, Invalid
from tieredckpt.config import StoreConfig
from tieredckpt.engine.engine import Engine
from tieredckpt.events import SaveFailed
from tieredckpt.testing.devices import FakeArray, FakeDriver

ENDS = ("captured", "reached", "flush", "save", "lazy save", "close", "nothing")

moves = st.lists(
    st.tuples(
        st.sampled_from(ENDS),
        st.booleans(),  # whether the program changes an array before that
        st.integers(0, 2),  # pieces of work that it enqueues meanwhile
    ),
    min_size=1,
    max_size=5,
)


@given(
    moves=moves, seed=st.integers(0, 1 << 16), speed=st.sampled_from([None, 5e6]), lockable=st.sampled_from([None, 0])
)
@pytest.mark.parametrize("kind", EVERY_KIND)
@settings(max_examples=40)
async def test_in_every_order_a_step_is_what_was_there_or_is_not(
    kind: str, moves: Any, seed: int, speed: float | None, lockable: int | None
) -> None:
    """Copies late, optimizers early, two saves in flight, closed in between: whole and as at the call, or failed."""
    memory = new_shared_folder()
    failed: list[int] = []
    expected: dict[int, tuple[int, ...] | None] = {}
    now = [1, 1]
    try:
        with rig(kind, 2 if kind == "fake" else 1, seed=seed, speed=speed, lockable=lockable) as here:
            arrays = [here.array(full(1), i % here.count) for i in range(2)]
            tree = {f"w{i}": array for i, array in enumerate(arrays)}

            def change() -> None:
                for i, array in enumerate(arrays):
                    now[i] += 1
                    here.change(array, full(now[i]))

            tiers = config({"ram": ram(memory, capacity="64 MiB")}, name="of-lazy")
            async with CheckpointStore.open(tiers) as store:
                store.subscribe(lambda event: failed.append(event.step) if isinstance(event, SaveFailed) else None)
                for step, (end, early, work) in enumerate(moves, 1):
                    checkpoint = await store.save(step, tree, capture="lazy")
                    expected[step] = (now[0], now[1])
                    for _ in range(work):
                        here.busy(0.0002)
                    if early:
                        change()
                        expected[step] = None
                    if end in ("captured", "reached"):
                        ending = checkpoint.captured() if end == "captured" else checkpoint.reached("ram")
                        if early:
                            with pytest.raises(Invalid, match=r"'w0', 'w1'.*changed before the copy"):
                                await ending
                        else:
                            await ending
                        change()
                    elif end == "flush":
                        await store.flush()
                        change()
                    elif end in ("save", "lazy save"):
                        await store.save(100 + step, tree, capture="copy" if end == "save" else "lazy")
                        expected[100 + step] = (now[0], now[1])
                        if end == "save":
                            change()
                    elif end == "close":
                        break
            async with CheckpointStore.open(tiers) as store:
                steps = await store.all_steps()
                assert set(steps) == {step for step, values in expected.items() if values is not None}
                for step in steps:
                    assert await values_of(store, step) == expected[step]
            assert set(failed) == {step for step, values in expected.items() if values is None}
    finally:
        shutil.rmtree(memory)


@pytest.mark.parametrize("kind", EVERY_KIND)
async def test_the_copy_ends_before_captured_returns_and_not_before_what_was_enqueued(
    kind: str, tiers: StoreConfig
) -> None:
    with rig(kind) as here:
        array = here.array(full(1))
        async with CheckpointStore.open(tiers) as store:
            for step in (2, 4, 6):  # the slab is registered meanwhile
                here.busy(0.05)
                here.change(array, full(step))
                checkpoint = await store.save(step, {"w": array}, capture="lazy")
                here.busy(0.05)
                await checkpoint.captured()
                here.change(array, full(step + 1))
                await checkpoint.reached("disk")
                assert await values_of(store, step) == (step,)


@pytest.mark.parametrize("kind", EVERY_KIND)
async def test_an_array_that_changed_too_early_is_named_and_its_step_is_nowhere(kind: str, tiers: StoreConfig) -> None:
    with rig(kind) as here:
        kept, changed = here.array(full(1)), here.array(full(1))
        async with CheckpointStore.open(tiers) as store:
            heard = Heard(store)
            checkpoint = await store.save(1, {"kept": kept, "changed": changed}, capture="lazy")
            here.change(changed, full(2))
            for ask in (checkpoint.captured, checkpoint.captured, lambda: checkpoint.reached("disk")):
                with pytest.raises(Invalid, match=r"step 1: 'changed' \(1 in all\) changed before the copy"):
                    await ask()
            event = await heard.first(SaveFailed)
            assert (event.step, type(event.error)) == (1, Invalid)
            assert await store.all_steps() == ()
            ram = store._life.engine.state.tiers[0].ram
            assert ram is not None
            assert ram.slab.used == 0
            again = await store.save(1, {"kept": kept, "changed": changed}, capture="lazy")
            await again.reached("disk")
            assert await values_of(store, 1) == (2, 1)


async def test_a_save_returns_though_the_device_has_not_begun_and_enqueues_nothing_on_the_trainers_stream(
    tiers: StoreConfig,
) -> None:
    with FakeDriver() as driver:
        (device,) = driver.devices
        array = device.array(full(1))
        async with CheckpointStore.open(tiers) as store:
            with driver.paused():
                checkpoint = await store.save(1, {"w": array}, capture="lazy")
                ran: list[int] = []
                device.current.enqueue(lambda: ran.append(1))
                while not ran:  # the trainer's stream goes on, whatever ours do
                    assert device.step()
                waiting = asyncio.ensure_future(checkpoint.captured())
                done, _ = await asyncio.wait([waiting], timeout=0.05)
                assert not done, "a copy that has not ended is not captured"
            await waiting
            array.change(full(2))
            await checkpoint.reached("ram")
            assert await values_of(store, 1) == (1,)


async def test_a_device_that_fails_under_a_lazy_copy_fails_that_save_and_not_the_training(tiers: StoreConfig) -> None:
    with FakeDriver() as driver:
        (device,) = driver.devices
        async with CheckpointStore.open(tiers) as store:
            heard = Heard(store)
            device.fail_after = 2
            checkpoint = await store.save(1, {"w": device.array(full(1))}, capture="lazy")
            with pytest.raises(DeviceUnavailable):
                await checkpoint.captured()
            assert (await heard.first(SaveFailed)).step == 1
            await store.save(2, {"w": full(2)})
            assert await store.all_steps() == (2,)


async def test_captured_may_be_cancelled_and_asked_again(tiers: StoreConfig, held_back: threading.Event) -> None:
    async with CheckpointStore.open(tiers) as store:
        array = full(1)
        checkpoint = await store.save(1, {"w": array}, capture="lazy")
        for _ in range(3):
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(checkpoint.captured(), 0.02)
        held_back.set()
        await checkpoint.captured()
        array[:] = 2
        await checkpoint.reached("disk")
        assert await values_of(store, 1) == (1,)


async def test_a_lazy_save_that_is_cancelled_is_not_made(tiers: StoreConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever cancelled it has no checkpoint to ask, and changes the arrays: nothing tells of their middle."""
    caller, save_flat = asyncio.get_running_loop(), Engine.save
    array = full(1)

    def begun(*arguments: Any, **how: Any) -> Any:
        caller.call_soon_threadsafe(saving.cancel)
        return save_flat(*arguments, **how)

    monkeypatch.setattr(Engine, "save", begun)
    async with CheckpointStore.open(tiers) as store:
        heard = Heard(store)
        saving = asyncio.ensure_future(store.save(1, {"w": array}, capture="lazy"))
        with pytest.raises(asyncio.CancelledError):
            await saving
        array[SIZE // 2] = 2
        await store.flush()
        assert (await heard.first(SaveFailed)).step == 1
        assert await store.all_steps() == ()


@pytest.mark.parametrize("early", [False, True])
async def test_a_close_during_a_lazy_copy_commits_what_did_not_change(
    tiers: StoreConfig, held_back: threading.Event, early: bool
) -> None:
    array = full(1)
    async with CheckpointStore.open(tiers) as store:
        await store.save(1, {"w": array}, capture="lazy")
        if early:
            array[:] = 2
        asyncio.get_running_loop().call_later(0.05, held_back.set)
    async with CheckpointStore.open(tiers) as store:
        assert await store.all_steps() == (() if early else (1,))


async def test_a_close_that_is_cancelled_during_a_lazy_copy_ends_it(
    tiers: StoreConfig, held_back: threading.Event
) -> None:
    store = await CheckpointStore.open(tiers)
    checkpoint = await store.save(1, {"w": full(1)}, capture="lazy")
    pending = store._life.engine.pending
    closing = asyncio.ensure_future(store.close())
    await polled(lambda: pending._closing)
    closing.cancel()
    await polled(lambda: all(task.cancelling() for task in pending.background))
    held_back.set()
    with pytest.raises(asyncio.CancelledError):
        await closing
    with pytest.raises(Closed):
        await checkpoint.captured()


async def test_a_restore_into_what_is_being_copied_waits_for_the_copy(
    tiers: StoreConfig, held_back: threading.Event
) -> None:
    async with CheckpointStore.open(tiers) as store:
        held_back.set()
        array = full(1)
        await store.save(1, {"w": array})
        array[:] = 2
        held_back.clear()
        await store.save(2, {"w": array}, capture="lazy")
        asyncio.get_running_loop().call_later(0.05, held_back.set)
        await store.restore(1, into={"w": array}, resume=False)
        assert held_back.is_set()
        assert (array == 1).all()
        await store.flush()
        assert await values_of(store, 2) == (2,)


async def test_a_checkpoint_keeps_no_arrays_once_it_is_saved(tiers: StoreConfig) -> None:
    with FakeDriver() as driver:
        array = driver.devices[0].array(full(1))
        gone = weakref.ref(array)
        async with CheckpointStore.open(tiers) as store:
            checkpoint = await store.save(1, {"w": array}, capture="lazy")
            await checkpoint.reached("disk")
            del array
            gc.collect()
            assert gone() is None
            assert checkpoint.saved is not None


def test_the_blocking_face_captures_lazily_too(tiers: StoreConfig) -> None:
    array = full(1)
    with CheckpointStore.open(tiers).sync() as store:
        checkpoint = store.save(1, {"w": array}, capture="lazy")
        checkpoint.captured()
        array[:] = 2
        checkpoint.reached("disk")
        restored = store.restore()
        assert restored is not None
        assert (restored.tree["w"] == 1).all()
        late = store.save(2, {"w": array}, capture="lazy")
        array[:] = 3
        with pytest.raises(Invalid, match="'w'"):
            late.captured()
        assert store.all_steps() == (1,)


@pytest.mark.parametrize("where", ["host", "small", "fake"])
async def test_digests_find_a_single_byte_that_nothing_else_tells(
    where: str, shared_memory: Path, held_back: threading.Event
) -> None:
    tiers = config({"ram": ram(shared_memory)}, name="guarded", lazy_guard="digests")
    with FakeDriver() as driver:
        (device,) = driver.devices
        other = full(1)
        other[SIZE // 2] = 7
        small = where == "small"
        array: Any = {"fake": device.array(full(1)), "small": np.zeros((40, 40), np.uint8).T}.get(where, full(1))
        async with CheckpointStore.open(tiers) as store:
            held_back.set()
            kept = await store.save(1, {"w": array}, capture="lazy")
            await kept.captured()
            held_back.clear()
            changed = await store.save(2, {"w": array}, capture="lazy")
            if where == "fake":
                array.change(other, tells=False)
                array.read()
            else:
                array[(20, 20) if small else SIZE // 2] = 7
            held_back.set()
            with pytest.raises(Invalid, match="'w'"):
                await changed.captured()
            await kept.reached("ram")
            assert await store.all_steps() == (1,)


async def test_a_parameter_that_is_given_other_memory_is_saved_as_it_was(
    tiers: StoreConfig, held_back: threading.Event
) -> None:
    """Of ``parameter.data = other`` no version tells, and the ends of both memories may be alike."""
    torch = pytest.importorskip("torch")
    parameter = torch.nn.Parameter(torch.ones(SIZE))
    async with CheckpointStore.open(tiers) as store:
        checkpoint = await store.save(1, {"p": parameter}, capture="lazy")
        other = torch.ones(SIZE)
        other[SIZE // 2] = 2
        parameter.data = other
        held_back.set()
        await checkpoint.captured()
        await checkpoint.reached("ram")
        assert await values_of(store, 1) == (1,)


@pytest.mark.parametrize("rows", [40, 600])
async def test_an_array_that_is_not_contiguous_is_compared_at_both_ends_too(
    rows: int, tiers: StoreConfig, held_back: threading.Event
) -> None:
    """Its first item may be one that never changes, such as a row of padding."""
    array = np.ones((rows, rows), np.uint8).T
    async with CheckpointStore.open(tiers) as store:
        for changed in (np.s_[1:], np.s_[:, 1:], np.s_[-1, -1]):
            checkpoint = await store.save(1, {"w": array}, capture="lazy")
            array[changed] += 1
            held_back.set()
            with pytest.raises(Invalid, match="'w'"):
                await checkpoint.captured()


async def test_a_store_that_nobody_refers_to_is_closed_with_the_lazy_save_that_is_pending(tiers: StoreConfig) -> None:
    torch = pytest.importorskip("torch")
    store = await CheckpointStore.open(tiers)
    thread = store._life.loop.thread
    await store.save(1, {"w": full(1), "p": torch.ones(SIZE)}, capture="lazy")
    del store
    gc.collect()
    assert await asyncio.to_thread(thread.ended.wait, SOON)
    async with CheckpointStore.open(tiers) as store:
        assert await values_of(store, 1) == (1, 1)


async def test_an_array_that_cannot_be_looked_at_any_more_counts_as_changed(
    tiers: StoreConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And holds up neither the trainer nor the close."""

    def gone(_: FakeArray) -> int:
        raise RuntimeError("the device is gone")

    with FakeDriver() as driver:
        array = driver.devices[0].array(full(1))
        async with CheckpointStore.open(tiers) as store:
            checkpoint = await store.save(1, {"w": array}, capture="lazy")
            monkeypatch.setattr(FakeArray, "version", property(gone))
            with pytest.raises(Invalid, match="'w'"):
                await checkpoint.captured()
            async with asyncio.timeout(SOON):
                await store.flush()
            assert await store.all_steps() == ()


async def test_flush_right_after_a_lazy_save_failed_raises_nothing(tiers: StoreConfig) -> None:
    async with CheckpointStore.open(tiers) as store:
        for step in range(1, 11):
            array = full(1)
            checkpoint = await store.save(step, {"w": array}, capture="lazy")
            array[:] = 2
            with pytest.raises(Invalid, match="'w'"):
                await checkpoint.captured()
            await store.flush()
        assert await store.all_steps() == ()


async def test_a_frozen_array_that_the_guard_finds_changed_fails_one_save_and_is_read_by_the_next(
    shared_memory: Path,
) -> None:
    guarded = config({"ram": ram(shared_memory)}, name="guarded", lazy_guard="digests", frozen=("w",))
    array = full(1)
    async with CheckpointStore.open(guarded) as store:
        await (await store.save(1, {"w": array}, capture="lazy")).reached("ram")
        array[:] = 2
        with pytest.raises(Invalid, match="'w'"):
            await (await store.save(2, {"w": array}, capture="lazy")).captured()
        await (await store.save(3, {"w": array}, capture="lazy")).reached("ram")
        assert await values_of(store, 3) == (2,)
