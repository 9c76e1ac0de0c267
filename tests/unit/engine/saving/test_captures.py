"""Trees whose arrays JAX donates right after the save: stored is what was saved, wherever it was copied first."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import threading
import time
import weakref
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from support.frameworks import require
from support.insight import hold_saves
from support.scenes import CHUNK, SOON, config, folder, ram

jax = require("jax")
jnp = jax.numpy

from tieredckpt import CheckpointStore, StoreConfig
from tieredckpt.errors import Invalid
from tieredckpt.testing.devices import FakeDriver
from tieredckpt.tree import copies, jax_leaves

MEMORIES: tuple[copies.Memory, ...] = ("device", "pinned_host")
LARGE = 4 << 20
"""Items of an array whose copy takes longer than the call that begins it."""


@pytest.fixture
def settings(shared_memory: Path, tmp_path: Path) -> StoreConfig:
    tiers = {"ram": ram(shared_memory, capacity=256 << 20), "disk": folder(tmp_path / "disk")}
    return config(tiers, chunk_size=1 << 20)


def state(seed: int) -> dict[str, Any]:
    keys = jax.random.split(jax.random.key(seed), 3)
    return {
        "large": [jax.random.normal(key, (LARGE,)) for key in keys],
        "small": jnp.arange(5, dtype=jnp.bfloat16) + seed,
        "rng": jax.random.key(seed),
        "empty": jnp.zeros((0, 3)),
        "step": seed,
    }


@pytest.mark.parametrize("capture", ["copy", "lazy", *MEMORIES])
def test_a_state_that_is_donated_right_after_its_save_is_stored_as_it_was(
    settings: StoreConfig, capture: Literal["copy", "lazy", "device", "pinned_host"]
) -> None:
    def change(tree: Any) -> Any:
        rng, _ = jax.random.split(tree["rng"])
        rest = {name: value for name, value in tree.items() if name != "rng"}
        return jax.tree.map(lambda x: x * 2 + 1, rest) | {"rng": rng}

    step = jax.jit(change, donate_argnums=0)
    expected = {}
    with CheckpointStore.open(settings).sync() as store:
        now = step(state(1))
        for number in (1, 2):
            jax.block_until_ready(now)
            before = now["large"][0]
            expected[number] = np.array(now["large"][2]), np.array(jax.random.key_data(now["rng"]))
            ckpt = store.save(number, now, capture=capture)
            if capture == "lazy":
                ckpt.captured()
            for _ in range(3):
                now = step(now)
            # A thread that has copied may hold its view a moment longer, and JAX then gives no memory away.
            assert capture in ("copy", "lazy") or before.is_deleted()
            assert now["small"].dtype == jnp.bfloat16
        store.flush()
        for number, (large, rng) in expected.items():
            found = store.restore(number, resume=False)
            assert found is not None
            assert found.tree["large"][2].tobytes() == large.tobytes()
            assert found.tree["rng"].tobytes() == rng.tobytes()


@pytest.mark.parametrize("capture", ["lazy", "reference", *MEMORIES])
def test_a_restore_takes_the_save_that_returned_before_it(
    settings: StoreConfig,
    capture: Literal["lazy", "reference", "device", "pinned_host"],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else a training that goes back to the newest step finds none, or saves a number again that comes meanwhile."""
    may_begin = hold_saves(monkeypatch)
    with CheckpointStore.open(settings).sync() as store:
        for number in (1, 2):
            may_begin.clear()
            store.save(number, {"w": jnp.full(3, number)}, capture=capture)
            timer = threading.Timer(0.05, may_begin.set)
            timer.start()
            found = store.restore()
            timer.join()
            assert found is not None
            assert found.step == number
        store.save(3, {"w": jnp.full(3, 3)})


@pytest.mark.parametrize("memory", MEMORIES)
def test_what_lies_in_that_memory_already_is_copied_too(memory: copies.Memory) -> None:
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")
    for place in (None, sharding):
        array = jax.device_put(jnp.arange(1000.0), place)
        whole: Any = jax_leaves.as_array_leaf("k", array)
        (leaf,) = copies.copies([whole], memory)
        assert isinstance(leaf.source, jax.Array)
        assert leaf.source.unsafe_buffer_pointer() != array.unsafe_buffer_pointer()
        offloaded = place is not None or memory == "pinned_host"
        assert leaf.source.sharding.memory_kind == ("pinned_host" if offloaded else "device")
        array.delete()
        assert np.asarray(leaf.source).tolist() == list(range(1000))


@pytest.mark.parametrize("memory", MEMORIES)
def test_numpy_arrays_beside_them_may_be_changed_at_once(settings: StoreConfig, memory: copies.Memory) -> None:
    seen, counts = np.arange(CHUNK), np.arange(8)
    tree = {"w": jnp.zeros(CHUNK), "seen": seen, "every other": seen[::2], "counts": counts}
    with CheckpointStore.open(settings).sync() as store:
        store.save(1, tree, capture=memory)
        seen[:], counts[:] = -1, -1
        store.flush()
        found = store.restore()
        assert found is not None
        assert found.tree["seen"].tolist() == list(range(CHUNK))
        assert found.tree["every other"].tolist() == list(range(0, CHUNK, 2))
        assert found.tree["counts"].tolist() == list(range(8))


def test_tensors_of_torch_and_arrays_of_other_devices_are_refused_by_name(settings: StoreConfig) -> None:
    torch = require("torch")
    with FakeDriver() as driver, CheckpointStore.open(settings).sync() as store:
        w = driver.devices[0].array(np.ones(3))
        with pytest.raises(Invalid, match=r"capture='device'.*'w' \(1 in all\).*use capture='copy'"):
            store.save(1, {"w": w, "x": jnp.zeros(3)}, capture="device")
    with CheckpointStore.open(settings).sync() as store:
        with pytest.raises(Invalid, match=r"capture='device'.*'model/w'.*use capture='copy'"):
            store.save(1, {"model": {"w": torch.zeros(3)}, "x": jnp.zeros(3)}, capture="device")
        with pytest.raises(Invalid, match=r"capture is 'copy', .*'pinned_host', and not 'host'"):
            store.save(1, {}, capture="host")
        assert store.steps() == ()


@pytest.mark.parametrize("memory", MEMORIES)
def test_copies_are_given_back_when_the_step_is_in_ram_and_one_save_alone_has_them(
    settings: StoreConfig, memory: copies.Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    alive: list[weakref.ref[Any]] = []
    pending: list[int] = []
    made = jax_leaves.copies

    def counted(*arguments: Any) -> list[Any]:
        pending.append(len(store._life.engine.pending.background))
        assert_released()
        found = made(*arguments)
        alive.extend(map(weakref.ref, found))
        return found

    def assert_released() -> None:
        """A thread that has copied may hold its view a moment longer."""
        deadline = time.monotonic() + SOON
        while gc.collect() >= 0 and any(ref() is not None for ref in alive):
            assert time.monotonic() < deadline
            time.sleep(0.01)

    monkeypatch.setattr(jax_leaves, "copies", counted)
    with CheckpointStore.open(settings).sync() as store:
        for number in range(1, 4):
            last = store.save(number, {"w": jnp.full(LARGE, number)}, capture=memory)
        last.reached("ram")
        assert_released()
        assert len(alive) == 3
        assert pending == [0, 0, 0]
        assert store.all_steps() == (1, 2, 3)


async def test_a_save_of_copies_does_not_keep_the_state_that_was_copied(
    settings: StoreConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or a training that does not donate would have three states on its devices."""
    may_begin = hold_saves(monkeypatch)
    weights = jnp.arange(LARGE)
    gone = weakref.ref(weights)
    async with CheckpointStore.open(settings) as store:
        await store.save(1, {"w": weights}, capture="device")
        del weights
        gc.collect()
        async with asyncio.timeout(SOON):  # the thread that has copied may hold them a moment longer
            while gone() is not None:
                await asyncio.sleep(0.01)
        may_begin.set()


async def test_the_copies_are_begun_on_no_event_loop(settings: StoreConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    made, loops = jax_leaves.copies, []

    def watched(*arguments: Any) -> list[Any]:
        with contextlib.suppress(RuntimeError):
            loops.append(asyncio.get_running_loop())
        return made(*arguments)

    monkeypatch.setattr(jax_leaves, "copies", watched)
    weights = jnp.arange(1000.0)
    async with CheckpointStore.open(settings) as store:
        await (await store.save(1, {"w": weights}, capture="device")).reached("ram")
        await asyncio.to_thread(lambda: store.sync().save(2, {"w": weights}, capture="pinned_host").reached("ram"))
        assert await store.all_steps() == (1, 2)
    assert loops == []


def test_a_device_without_room_makes_the_save_wait_and_not_fail(
    settings: StoreConfig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_room(*_: Any, **__: Any) -> None:
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 4096 bytes.")

    with CheckpointStore.open(settings).sync() as store:
        weights = jnp.arange(4.0 * CHUNK)
        with monkeypatch.context() as patch, caplog.at_level(logging.WARNING, "tieredckpt"):
            patch.setattr(jax, "device_put", no_room)
            saved = store.save(1, {"w": weights}, capture="device").saved
        assert saved is not None
        assert saved.tier == "ram"
        assert "no room for" in caplog.text
        weights.delete()
        found = store.restore()
        assert found is not None
        assert found.tree["w"].tolist() == list(range(4 * CHUNK))


def test_a_backend_without_such_memory_says_so(settings: StoreConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*_: Any, **__: Any) -> None:
        raise ValueError("Could not find memory addressable by device")

    with CheckpointStore.open(settings).sync() as store:
        monkeypatch.setattr(jax, "device_put", unknown)
        with pytest.raises(Invalid, match="capture='pinned_host': jax has no such memory"):
            store.save(1, {"w": jnp.zeros(3)}, capture="pinned_host")
