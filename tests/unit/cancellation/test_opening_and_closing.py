"""An opening or closing that is stopped anywhere leaves nothing open and loses nothing."""

from __future__ import annotations

import asyncio
import threading

import pytest
from reliability.tiers import FaultyTiers
from support.insight import bytes_of_listed_steps, slab_of
from support.scenes import SOON, assert_restored, assert_same, crash, tree
from support.stopping import AWAITS, Scene, closing_stopped_at, staged, stopped_at

from tieredckpt import CheckpointStore
from tieredckpt.config import StoreConfig
from tieredckpt.errors import Closed


async def test_an_opening_stopped_anywhere_leaves_nothing_open_and_the_store_can_be_opened(
    settings: StoreConfig,
) -> None:
    async with staged(settings):
        pass
    for nth in AWAITS:
        threads = set(threading.enumerate())
        store = CheckpointStore.open(settings)
        with stopped_at(nth) as started:
            try:
                await store
            except Closed:
                assert started[0].struck
                assert _new_threads(threads) == set()
                continue
        if started[0].struck:  # stopped too late to matter
            await store.close()
            continue
        scene = Scene(store)
        scene.last = 1
        await scene.assert_usable()
        await store.close()
        return
    pytest.fail("the store was never opened")


@pytest.mark.parametrize("clean", [True, False])
async def test_a_closing_stopped_anywhere_lets_go_of_everything_and_loses_nothing(
    settings: StoreConfig, clean: bool
) -> None:
    async with staged(settings):
        pass
    for nth in AWAITS:
        threads = set(threading.enumerate())
        store = await CheckpointStore.open(settings)
        await store.save(nth + 1, tree(nth + 1))
        with closing_stopped_at(nth) as started:
            await (store.close() if clean else crash(store))
        assert _new_threads(threads) == set()
        with pytest.raises(Closed):
            await store.steps()
        async with CheckpointStore.open(settings) as again:
            restored = await again.restore()
            assert restored is not None
            assert restored.step == nth + 1
            assert_same(restored.tree, tree(nth + 1))
            assert slab_of(again).used == await bytes_of_listed_steps(again)
        if not started[0].struck:
            return
    pytest.fail("the store was never closed in peace")


async def test_a_caller_cancelled_while_it_closes_has_closed(settings: StoreConfig, faults: FaultyTiers) -> None:
    store = await CheckpointStore.open(settings)
    gate = faults["disk"].hold("put", key="packs/*", times=None)
    await store.save(1, tree(1))
    await gate.reached()
    closing = asyncio.create_task(store.close())
    done, _ = await asyncio.wait([closing], timeout=0.1)
    assert not done
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    gate.release()
    with pytest.raises(Closed):
        await store.steps()
    async with CheckpointStore.open(settings) as again:
        assert_restored(await again.restore(), tree(1))


def _new_threads(before: set[threading.Thread]) -> set[threading.Thread]:
    """The library's threads that do not end by themselves; a closed pool does not wait for its idle ones."""
    new = {thread for thread in set(threading.enumerate()) - before if "tieredckpt" in thread.name}
    for thread in new:
        thread.join(SOON / 4)
    return {thread for thread in new if thread.is_alive()}
