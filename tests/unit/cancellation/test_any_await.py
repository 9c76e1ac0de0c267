"""Any public coroutine may be cancelled at any await: the store stays usable, and lets go of what was lent to it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import pytest
from reliability.tiers import FaultyTiers
from support.insight import flip_chunk
from support.scenes import SOON, tree
from support.stopping import AWAITS, Scene, Touched, staged, stopped_at

from tieredckpt.config import StoreConfig
from tieredckpt.errors import Closed

Call = Coroutine[Any, Any, Any]
Case = Callable[[Scene], Awaitable[Call]]
CASES: dict[str, Case] = {}


def case(function: Case) -> Case:
    CASES[function.__name__] = function
    return function


@case
async def save(scene: Scene) -> Call:
    step = scene.next_step()
    return scene.store.save(step, tree(step))


@case
async def overwrite(scene: Scene) -> Call:
    return scene.store.save(scene.last, tree(scene.last), overwrite=True)


@case
async def restore(scene: Scene) -> Call:
    return scene.store.restore()


@case
async def restore_from_the_disk(scene: Scene) -> Call:
    if "ram" in await scene.store.where(scene.last):
        await scene.store.evict(scene.last, "ram")
    return scene.store.restore(resume=False)


@case
async def restore_what_is_damaged(scene: Scene) -> Call:
    await flip_chunk(scene.store, "ram", scene.last, "params/w1")
    return scene.store.restore()


@case
async def restore_views(scene: Scene) -> Call:
    async def view_and_check() -> None:
        restored = await scene.store.restore(copy=False)
        assert restored is not None
        await restored.verified()

    return view_and_check()


@case
async def restore_part_like(scene: Scene) -> Call:
    return scene.store.restore(keys=["params/**"], like={"params": tree()["params"]})


@case
async def reached(scene: Scene) -> Call:
    step = scene.next_step()
    return (await scene.store.save(step, tree(step))).reached("disk")


@case
async def flush(scene: Scene) -> Call:
    step = scene.next_step()
    await scene.store.save(step, tree(step))
    return scene.store.flush()


@case
async def promote(scene: Scene) -> Call:
    return scene.store.promote(scene.last, "far")


@case
async def evict_from_ram(scene: Scene) -> Call:
    return scene.store.evict(scene.last, "ram")


@case
async def evict_from_the_disk(scene: Scene) -> Call:
    await scene.another()  # or this one would be the last good copy
    return scene.store.evict(scene.last - 1, "disk")


@case
async def pin(scene: Scene) -> Call:
    async def pin_and_compare() -> None:
        try:
            await scene.store.pin(scene.last)
        finally:
            on_disk = {(pin.step, pin.tier) for pin in await scene.store.pins()}
            tiers = scene.store._life.engine.state.tiers
            assert on_disk == {(step.step, tier.name) for tier in tiers for step in tier.steps.pinned}

    return pin_and_compare()


@case
async def collect(scene: Scene) -> Call:
    await scene.another()
    return scene.store.collect()


@case
async def verify(scene: Scene) -> Call:
    return scene.store.verify(scene.last)


@case
async def repair(scene: Scene) -> Call:
    await flip_chunk(scene.store, "disk", scene.last, "params/w0")
    return scene.store.verify(scene.last, "disk", repair=True)


@case
async def steps(scene: Scene) -> Call:
    return scene.store.steps()


@case
async def describe(scene: Scene) -> Call:
    scene.store._life.engine.state.tier("ram").steps.indexes.clear()  # or there is nothing to wait for
    return scene.store.describe()


@case
async def spec(scene: Scene) -> Call:
    scene.store._life.engine.state.tier("disk").steps.indexes.clear()
    return scene.store.spec(scene.last, "params/w0", "disk")


@case
async def where(scene: Scene) -> Call:
    return scene.store.where()


@case
async def tier_infos(scene: Scene) -> Call:
    return scene.store.tier_infos()


# -- wherever it waits ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
async def test_a_call_stopped_at_any_of_its_awaits_leaves_the_store_usable(
    settings: StoreConfig, touched: Touched, name: str
) -> None:
    async with staged(settings) as scene:
        for nth in AWAITS:
            call = await CASES[name](scene)
            stopped = False
            with stopped_at(nth) as started:
                try:
                    async with asyncio.timeout(SOON):
                        await call
                except Closed:
                    stopped = True
            assert touched.now == 0
            await scene.assert_usable()
            if not started[0].struck:
                assert not stopped
                return
        pytest.fail(f"{name} was stopped {len(AWAITS)} times and never came to its end")


@pytest.mark.parametrize(
    "name", ["save", "restore", "restore_from_the_disk", "reached", "flush", "promote", "evict_from_the_disk", "verify"]
)
async def test_a_caller_cancelled_after_any_time_hears_of_it_and_the_store_stays_usable(
    settings: StoreConfig, touched: Touched, name: str
) -> None:
    async with staged(settings) as scene:
        iterations, more = 0, 1
        while True:
            task = asyncio.create_task(await CASES[name](scene))
            for _ in range(iterations):
                await asyncio.sleep(0)
            if task.done():
                task.result()
                return
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert touched.now == 0
            await scene.assert_usable()
            iterations, more = iterations + more, 4 * more


@pytest.mark.parametrize("stubborn", [False, True], ids=["at once", "when it can"])
@pytest.mark.parametrize(
    "name", ["promote", "evict_from_the_disk", "verify", "repair", "restore_from_the_disk", "reached", "flush"]
)
async def test_a_call_cancelled_at_any_operation_on_a_tier_leaves_the_store_usable(
    settings: StoreConfig, faults: FaultyTiers, touched: Touched, name: str, stubborn: bool
) -> None:
    async with staged(settings) as scene:
        for nth in AWAITS:
            call = await CASES[name](scene)
            tier = faults["far" if name == "promote" else "disk"]
            held = tier.hold("*", nth=nth, stubborn=stubborn)
            task = asyncio.create_task(call)
            arrival = asyncio.create_task(held.reached())
            await asyncio.wait([task, arrival], timeout=SOON, return_when=asyncio.FIRST_COMPLETED)
            came = arrival.done()
            task.cancel()
            arrival.cancel()
            if stubborn:
                held.release()
            async with asyncio.timeout(SOON):
                await asyncio.wait([task])
            held.release()
            tier.clear()
            assert touched.now == 0
            await scene.assert_usable()
            if not came:
                task.result()
                return
        pytest.fail(f"{name} was held {len(AWAITS)} times and never came to its end")
