"""Any public coroutine may be cancelled at any await: the store stays usable, and lets go of what was lent to it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Generator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from reliability.tiers import FaultyTiers
from support.insight import arrays_in, bytes_of_listed_steps, flip_chunk, slab_of
from support.scenes import CHUNK, SOON, assert_same, config, crash, folder, ram, tree

from tieredckpt import CheckpointStore
from tieredckpt._opened import Opened
from tieredckpt.config import StoreConfig
from tieredckpt.engine.loop import EngineLoop
from tieredckpt.engine.promoting import pack_writer
from tieredckpt.engine.restoring import reader
from tieredckpt.engine.saving import snapshot
from tieredckpt.errors import Closed, NotFound
from tieredckpt.format.digest import CopyDigester

AWAITS = (*range(1, 18), *range(18, 300, 9))
"""Where calls are stopped: one by one, then in strides; no call here has so many."""

MARK = -7.0


class StopsAt:
    """Runs a coroutine, and cancels its task when it suspends for the ``nth`` time."""

    def __init__(self, coroutine: Coroutine[Any, Any, Any], nth: int) -> None:
        self._coroutine = coroutine
        self._left = nth

    @property
    def struck(self) -> bool:
        return self._left <= 0

    def __await__(self) -> Generator[Any, Any, Any]:
        go_on: Callable[[Any], Any] = self._coroutine.send
        value: Any = None
        while True:
            try:
                awaited = go_on(value)
            except StopIteration as end:
                return end.value
            self._left -= 1
            if not self._left:
                task = asyncio.current_task()
                assert task is not None
                task.cancel()
            try:
                go_on, value = self._coroutine.send, (yield awaited)
            except BaseException as error:
                go_on, value = self._coroutine.throw, error


@contextmanager
def stopped_at(nth: int) -> Iterator[list[StopsAt]]:
    """Cancel the next work of an engine at its ``nth`` suspension."""
    started: list[StopsAt] = []

    async def run(stops: StopsAt) -> Any:
        return await stops

    def start(loop: EngineLoop, coroutine: Coroutine[Any, Any, Any], **how: Any) -> Any:
        if started:
            return submit(loop, coroutine, **how)
        started.append(StopsAt(coroutine, nth))
        return submit(loop, run(started[0]), **how)

    with pytest.MonkeyPatch.context() as patch:
        submit = EngineLoop.submit
        patch.setattr(EngineLoop, "submit", start)
        yield started


@contextmanager
def closing_stopped_at(nth: int) -> Iterator[list[StopsAt]]:
    """Cancel the next closing of a store at its ``nth`` suspension."""
    started: list[StopsAt] = []

    async def stopped(opened: Opened, *, clean: bool) -> None:
        started.append(StopsAt(close(opened, clean=clean), nth))
        await started[-1]

    with pytest.MonkeyPatch.context() as patch:
        close = Opened._close
        patch.setattr(Opened, "_close", stopped)
        yield started


class Touched:
    """How many threads work on the memory of trees, or of the slab, at this moment."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.now = 0
        self.calls = 0
        self.gate = threading.Event()
        self.gate.set()
        self._guards_count = threading.Lock()
        for owner, name in (
            (snapshot, "copy_and_digest"),
            (reader, "deliver"),
            (CopyDigester, "copy"),
            (pack_writer, "seal"),
        ):
            patch.setattr(owner, name, self._counted(getattr(owner, name)))

    def _counted(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any) -> Any:
            self._add(1)
            try:
                assert self.gate.wait(SOON)
                return function(*arguments)
            finally:
                self._add(-1)

        return counted

    def _add(self, one: int) -> None:
        with self._guards_count:
            self.now += one
            self.calls += one > 0


@pytest.fixture
def touched(monkeypatch: pytest.MonkeyPatch) -> Touched:
    return Touched(monkeypatch)


class Scene:
    """A store with a few steps in it, each the tree of its number, and another to save."""

    def __init__(self, store: CheckpointStore) -> None:
        self.store = store
        self.last = 0

    async def another(self) -> int:
        """A new step, on every tier."""
        step = self.next_step()
        await self.store.save(step, tree(step))
        await self.store.flush()
        return step

    def next_step(self) -> int:
        self.last += 1
        return self.last

    async def assert_usable(self) -> None:
        """Whatever is listed is whole, a save and a restore work, and no memory is held."""
        async with asyncio.timeout(SOON):
            step = await self.another()
            for info in await self.store.steps():
                restored = await self.store.restore(info.step, resume=False)
                assert restored is not None
                assert_same(restored.tree, tree(info.step))
            assert [found.problem for found in await self.store.verify(step)] == ["", ""]
            await self.store.collect()
            state = self.store._life.engine.state
            assert slab_of(self.store).used == await bytes_of_listed_steps(self.store)
            assert state.scratch.slab.used == 0
            assert not any(tier.steps.pins for tier in state.tiers)


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


@pytest.fixture
def settings(shared_memory: Path, tmp_path: Path) -> StoreConfig:
    few = {"kind": "last_n", "n": 2}
    tiers = {
        "ram": ram(shared_memory),
        "disk": folder(tmp_path / "disk", retain=few),
        "far": folder(tmp_path / "far", retain=few, promote="never"),
    }
    return config(tiers, repack_below=0.9)  # more than any pack is live: each collection rewrites them


@asynccontextmanager
async def staged(settings: StoreConfig) -> AsyncIterator[Scene]:
    async with CheckpointStore.open(settings) as store:
        scene = Scene(store)
        await scene.another()
        yield scene


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


# -- what was lent ----------------------------------------------------------------------------------------


async def test_a_cancelled_save_ends_only_when_no_thread_reads_the_arrays_any_more(
    settings: StoreConfig, touched: Touched
) -> None:
    async with staged(settings) as scene:
        touched.gate.clear()
        calls = touched.calls
        saving = asyncio.create_task(scene.store.save(scene.next_step(), tree(99, arrays=30)))
        await _until(lambda: touched.now > 0)
        saving.cancel()
        done, _ = await asyncio.wait([saving], timeout=0.1)
        await scene.store._life.loop.call(_some_turns())  # the engine has heard of it, and told the threads
        touched.gate.set()
        assert not done
        with pytest.raises(asyncio.CancelledError):
            await saving
        assert touched.now == 0
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
        touched.gate.clear()
        restoring = asyncio.create_task(scene.store.restore(into=into))
        await _until(lambda: touched.now > 0)
        restoring.cancel()
        done, _ = await asyncio.wait([restoring], timeout=0.1)
        touched.gate.set()
        assert not done
        with pytest.raises(asyncio.CancelledError):
            await restoring
        assert touched.now == 0
        for array in arrays_in(into):
            array[...] = MARK
        await scene.assert_usable()
        assert all(np.all(array == np.asarray(MARK, array.dtype)) for array in arrays_in(into))
        filled = await scene.store.restore(into=into)
        assert filled is not None
        assert_same(filled.tree, tree(scene.last))


async def test_a_cancelled_promotion_ends_only_when_no_thread_writes_into_the_slab_any_more(
    settings: StoreConfig, touched: Touched
) -> None:
    """The checksum behind a chunk: a chunk that came to lie there since would be damaged."""
    async with staged(settings) as scene:
        touched.gate.clear()
        promoting = asyncio.create_task(scene.store.promote(scene.last, "far"))
        await _until(lambda: touched.now > 0)
        promoting.cancel()
        done, _ = await asyncio.wait([promoting], timeout=0.1)
        touched.gate.set()
        assert not done
        with pytest.raises(asyncio.CancelledError):
            await promoting
        assert touched.now == 0
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
            restored = await store.restore(info.step, resume=False)
            assert restored is not None
            assert_same(restored.tree, tree(info.step))
        assert await store.where(nth) == ("disk",)


# -- the store's own life ---------------------------------------------------------------------------------


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
        restored = await again.restore()
        assert restored is not None
        assert_same(restored.tree, tree(1))


async def _some_turns() -> None:
    """Run what a loop has been given so far, and what follows from that."""
    for _ in range(20):
        await asyncio.sleep(0)


def _new_threads(before: set[threading.Thread]) -> set[threading.Thread]:
    """The library's threads that do not end by themselves; a closed pool does not wait for its idle ones."""
    new = {thread for thread in set(threading.enumerate()) - before if "tieredckpt" in thread.name}
    for thread in new:
        thread.join(SOON / 4)
    return {thread for thread in new if thread.is_alive()}


async def _until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(SOON):
        while not condition():  # a thread makes it true
            await asyncio.sleep(0.001)
