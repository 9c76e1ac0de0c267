"""A cancelled call ends when no thread uses the memory any more that was lent to it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from reliability.tiers import FaultyTiers
from support.insight import arrays_in, slab_of
from support.scenes import CHUNK, SOON, assert_restored, config, folder, ram, tree
from support.stopping import AWAITS, Scene, Touched, staged, stopped_at

from tieredckpt import CheckpointStore
from tieredckpt.config import StoreConfig
from tieredckpt.errors import Closed, NotFound

MARK = -7.0


async def cancel_at_work(scene: Scene, touched: Touched, call: Coroutine[Any, Any, object]) -> None:
    """Cancel a call while its threads work on memory: it ends when none does any more, and not before."""
    touched.gate.clear()
    task = asyncio.create_task(call)
    await _until(lambda: touched.now > 0)
    task.cancel()
    done, _ = await asyncio.wait([task], timeout=0.1)
    await scene.store._life.loop.call(_some_turns())  # the engine has heard of it, and told the threads
    touched.gate.set()
    assert not done
    with pytest.raises(asyncio.CancelledError):
        await task
    assert touched.now == 0


async def test_a_cancelled_save_ends_only_when_no_thread_reads_the_arrays_any_more(
    settings: StoreConfig, touched: Touched
) -> None:
    async with staged(settings) as scene:
        calls = touched.calls
        await cancel_at_work(scene, touched, scene.store.save(scene.next_step(), tree(99, arrays=30)))
        assert touched.calls - calls < 30  # and the rest was not copied for nothing
        with pytest.raises(NotFound):
            await scene.store.where(scene.last)
        await scene.assert_usable()


@pytest.mark.parametrize("nearest", ["ram", "disk"])
async def test_a_cancelled_restore_leaves_the_arrays_that_it_was_to_fill_alone(
    settings: StoreConfig, touched: Touched, nearest: str
) -> None:
    async with staged(settings) as scene:
        if nearest == "disk":
            await scene.store.evict(scene.last, "ram")
        into = tree(scene.last)
        await cancel_at_work(scene, touched, scene.store.restore(into=into))
        for array in arrays_in(into):
            array[...] = MARK
        await scene.assert_usable()
        assert all(np.all(array == np.asarray(MARK, array.dtype)) for array in arrays_in(into))
        assert_restored(await scene.store.restore(into=into), tree(scene.last))


async def test_a_cancelled_promotion_ends_only_when_no_thread_writes_into_the_slab_any_more(
    settings: StoreConfig, touched: Touched
) -> None:
    """The checksum behind a chunk: a chunk that came to lie there since would be damaged."""
    async with staged(settings) as scene:
        await cancel_at_work(scene, touched, scene.store.promote(scene.last, "far"))
        await scene.assert_usable()


async def test_a_save_cancelled_while_it_waits_for_room_lets_the_next_one_pass(
    shared_memory: Path, tmp_path: Path, faults: FaultyTiers
) -> None:
    tiers = {"ram": ram(shared_memory, capacity=20 * CHUNK), "disk": folder(tmp_path / "disk")}
    async with CheckpointStore.open(config(tiers)) as store:
        scene = Scene(store)
        gate = faults["disk"].hold("put", key="packs/*", times=None)
        await store.save(scene.next_step(), tree(1))
        await gate.reached()
        full = asyncio.create_task(store.save(2, tree(2)))
        done, _ = await asyncio.wait([full], timeout=0.1)
        assert not done
        full.cancel()
        with pytest.raises(asyncio.CancelledError):
            await full
        gate.release()
        await scene.assert_usable()


async def test_a_save_that_streams_may_be_stopped_at_any_of_its_awaits(
    shared_memory: Path, tmp_path: Path, touched: Touched
) -> None:
    tiers = {"ram": ram(shared_memory, capacity=8 * CHUNK), "disk": folder(tmp_path / "disk")}
    async with CheckpointStore.open(config(tiers)) as store:
        for nth in AWAITS:
            with stopped_at(nth) as started:
                try:
                    await store.save(nth, tree(nth))
                except Closed:
                    assert started[0].struck
            assert touched.now == 0
            assert slab_of(store).used == 0
            if not started[0].struck:
                break
            await store.flush()
            assert not store._life.engine.state.tier("disk").packs.guard.locked()
        for info in await store.steps():
            assert_restored(await store.restore(info.step, resume=False), tree(info.step))
        assert await store.where(nth) == ("disk",)


async def _some_turns() -> None:
    """Run what a loop has been given so far, and what follows from that."""
    for _ in range(20):
        await asyncio.sleep(0)


async def _until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(SOON):
        while not condition():  # a thread makes it true
            await asyncio.sleep(0.001)
