"""From the opening of a store to its end in a process that goes on: nothing stays locked, and nobody waits for ever."""

from __future__ import annotations

import asyncio
import gc
import logging
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import pytest
from reliability.ranks import World
from reliability.tiers import FaultyTiers
from support.scenes import SOON, Heard, assert_restored, assert_same, config, folder, ram, tree

from tieredckpt import CheckpointStore
from tieredckpt import _callbacks as callbacks
from tieredckpt.config import StoreConfig
from tieredckpt.engine.engine import Engine
from tieredckpt.errors import Closed, Conflict, Invalid
from tieredckpt.events import Event, StepPromoted, StepSaved
from tieredckpt.policy import base
from tieredckpt.policy.base import Eviction, Observed, Promotion, Retention, Schedule, StepView, StoreView, TierView

NOT_ERRORS = [SystemExit(3), KeyboardInterrupt(), GeneratorExit(), asyncio.CancelledError()]
"""What code raises that wants to end somebody; asyncio and threads treat each in a way of its own."""


@pytest.fixture
def settings(shared_memory: Path, tmp_path: Path) -> StoreConfig:
    """No step goes to the disk by itself, so that what is not in RAM is lost."""
    return config({"ram": ram(shared_memory), "disk": folder(tmp_path / "disk", promote="never")})


async def assert_restores(settings: StoreConfig, step: int) -> None:
    """The store can be opened now, and has a step."""
    async with CheckpointStore.open(settings) as store:
        restored = await store.restore()
        assert restored is not None
        assert restored.step == step
        assert_same(restored.tree, tree(step))


# -- opening ----------------------------------------------------------------------------------------------


async def test_an_opening_that_is_cancelled_in_the_moment_it_succeeds_leaves_nothing_locked(
    settings: StoreConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, caller = Engine.start, asyncio.get_running_loop()

    async def cancelled_at_its_end(engine: Engine, *arguments: Any) -> None:
        await start(engine, *arguments)
        caller.call_soon_threadsafe(opening.cancel)

    async def open_it() -> CheckpointStore:
        return await CheckpointStore.open(settings)

    with monkeypatch.context() as patch:
        patch.setattr(Engine, "start", cancelled_at_its_end)
        opening = asyncio.create_task(open_it())
        with pytest.raises(asyncio.CancelledError):
            await opening
    async with CheckpointStore.open(settings) as store:
        assert await store.steps() == ()


@pytest.mark.usefixtures("interruptible")
def test_an_opening_that_is_interrupted_in_the_moment_it_succeeds_leaves_nothing_locked(
    settings: StoreConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    import _thread

    start = Engine.start

    async def interrupted_at_its_end(engine: Engine, *arguments: Any) -> None:
        await start(engine, *arguments)
        _thread.interrupt_main()

    with monkeypatch.context() as patch:
        patch.setattr(Engine, "start", interrupted_at_its_end)
        with pytest.raises(KeyboardInterrupt):
            CheckpointStore.open(settings).sync().__enter__()
    with CheckpointStore.open(settings).sync() as store:
        assert store.steps() == ()


async def test_a_store_without_references_is_closed_and_loses_nothing(
    settings: StoreConfig, caplog: pytest.LogCaptureFixture
) -> None:
    store = await CheckpointStore.open(settings)
    await store.save(1, tree(1))
    del store
    gc.collect()
    await assert_restores(settings, 1)
    assert re.search(r"opened at .*test_life\.py:\d+ is closed, for nobody refers to it", caplog.text)


def test_a_blocking_store_that_nobody_refers_to_any_more_is_closed(settings: StoreConfig) -> None:
    for step in range(1, 4):
        store = CheckpointStore.open(settings).sync().__enter__()
        restored = store.restore()
        assert (0 if restored is None else restored.step) == step - 1
        store.save(step, tree(step))
        del store
        gc.collect()


async def test_a_save_that_somebody_refers_to_keeps_its_store_open(tiers: StoreConfig) -> None:
    store = await CheckpointStore.open(tiers)
    saved = await store.save(1, tree(1))
    del store
    gc.collect()
    await saved.reached("disk")
    with pytest.raises(Conflict):
        await CheckpointStore.open(tiers)
    del saved
    gc.collect()
    await assert_restores(tiers, 1)


async def test_a_store_lost_while_a_save_by_reference_is_under_way_has_that_step(
    settings: StoreConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    jnp = pytest.importorskip("jax.numpy")
    gate, begun, save = threading.Event(), threading.Event(), Engine.save

    async def held(engine: Engine, *arguments: Any, **how: Any) -> Any:
        begun.set()
        await asyncio.to_thread(gate.wait, SOON)
        return await save(engine, *arguments, **how)

    monkeypatch.setattr(Engine, "save", held)
    store = await CheckpointStore.open(settings)
    await store.save(1, {"w": jnp.arange(8)}, capture="reference")
    assert await asyncio.to_thread(begun.wait, SOON)
    del store
    gc.collect()
    gate.set()
    async with CheckpointStore.open(settings) as store:
        assert [info.step for info in await store.steps()] == [1]


async def test_a_second_opening_in_one_process_is_told_where_the_first_was(settings: StoreConfig) -> None:
    store = await CheckpointStore.open(settings)
    line = sys._getframe().f_lineno - 1
    with pytest.raises(Conflict, match=rf"test_life\.py:{line} and has not closed it.*takeover=True"):
        await CheckpointStore.open(settings)
    with pytest.raises(Conflict, match=rf"test_life\.py:{line} and has not closed it"):
        CheckpointStore.open(settings).sync().__enter__()
    async with CheckpointStore.open(settings, read_only=True) as reader:
        assert await reader.steps() == ()
    await store.close()


async def test_who_takes_over_has_what_the_older_store_saved_and_had_to_promote(tiers: StoreConfig) -> None:
    older = await CheckpointStore.open(tiers)
    await older.save(1, tree(1))
    async with CheckpointStore.open(tiers, takeover=True) as store:
        assert "disk" in await store.where(1)
        with pytest.raises(Closed):
            await older.save(2, tree(2))
        await store.save(2, tree(2))
    await older.close()
    with (
        CheckpointStore.open(tiers).sync() as blocking,
        CheckpointStore.open(tiers, takeover=True).sync() as last,
    ):
        assert [info.step for info in last.steps()] == [1, 2]
        with pytest.raises(Closed):
            blocking.steps()


async def test_another_rank_of_this_process_is_not_taken_over(tiers: StoreConfig) -> None:
    ranks = World(2).communicators()
    opening = [CheckpointStore.open(tiers, ranks=rank, takeover=True) for rank in ranks]
    stores = await asyncio.gather(*(store.__aenter__() for store in opening))
    assert [await store.steps() for store in stores] == [(), ()]
    await asyncio.gather(*(store.close() for store in stores))


# -- closing beside other calls ---------------------------------------------------------------------------


async def test_a_save_beside_a_close_is_whole_or_closed(tiers: StoreConfig) -> None:
    saved: list[int] = []
    for late in range(8):
        store = await CheckpointStore.open(tiers)
        first = len(saved) + 1

        async def save(step: int, store: CheckpointStore = store) -> None:
            await store.save(step, tree(step))
            saved.append(step)

        saving = [asyncio.create_task(save(first))]
        for _ in range(late):
            await asyncio.sleep(0)
        closing = [asyncio.create_task(store.close()) for _ in range(3)]
        calls = [save(first + 1), store.restore(), store.steps(), store.flush(), store.verify()]
        done = await asyncio.gather(*saving, *closing, *calls, return_exceptions=True)
        assert all(found is None for found in done[:4]), done  # begun before the close, so it is in the store
        assert all(isinstance(found, Closed) for found in done[4:]), done
        with pytest.raises(Closed):
            await store.steps()
        await store.close()
    async with CheckpointStore.open(tiers) as store:
        assert {info.step for info in await store.steps()} >= {max(saved)}
        assert_restored(await store.restore(), tree(max(saved)))


def test_threads_that_save_restore_and_close_at_once_hear_of_nothing_but_the_close(tiers: StoreConfig) -> None:
    for turn in range(4):
        store = CheckpointStore.open(tiers).sync().__enter__()
        store.save(100 * turn, tree(turn))
        gate = threading.Barrier(6)

        def call(work: Callable[[], object], gate: threading.Barrier = gate) -> BaseException | None:
            gate.wait(SOON)
            try:
                for _ in range(50):
                    work()
            except BaseException as failure:
                return failure
            return None

        steps = iter(range(100 * turn + 1, 100 * turn + 100))
        calls: list[Any] = [
            lambda store=store, steps=steps: store.save((step := next(steps)), tree(step)),
            store.restore,
            store.verify,
            store.steps,
            store.close,
            store.close,
        ]
        with ThreadPoolExecutor(len(calls)) as pool:
            ended = list(pool.map(call, calls))
        assert all(isinstance(error, Closed) for error in ended[:4]), ended
        assert ended[4:] == [None, None]


async def test_who_awaits_a_promotion_hears_of_it_though_the_store_is_being_closed(
    tiers: StoreConfig, faults: FaultyTiers
) -> None:
    store = await CheckpointStore.open(tiers)
    gate = faults["disk"].hold("put", key="packs/*")
    saved = await store.save(1, tree(1))
    await gate.reached()
    reaching = asyncio.create_task(saved.reached("disk"))
    closing = asyncio.create_task(store.close())
    await asyncio.sleep(0)
    gate.release()
    await asyncio.gather(reaching, closing)


async def test_of_two_who_close_one_that_is_cancelled_does_not_hurry_the_other(
    tiers: StoreConfig, faults: FaultyTiers
) -> None:
    store = await CheckpointStore.open(tiers)
    gate = faults["disk"].hold("put", key="packs/*")
    await store.save(1, tree(1))
    await gate.reached()
    one, other = (asyncio.create_task(store.close()) for _ in range(2))
    done, _ = await asyncio.wait([one, other], timeout=0.1)
    assert not done
    one.cancel()
    gate.release()
    await asyncio.wait([one, other])
    assert one.cancelled()
    other.result()
    async with CheckpointStore.open(config({"disk": tiers.tiers[1].model_dump(exclude={"name"})})) as store:
        assert [info.step for info in await store.steps()] == [1]


# -- code of users inside the store -----------------------------------------------------------------------


@pytest.mark.parametrize("verb", ["steps", "save", "close", "flush"])
def test_a_listener_that_calls_the_store_is_refused_at_once_and_told_why(
    tiers: StoreConfig, caplog: pytest.LogCaptureFixture, verb: str
) -> None:
    heard: list[Event] = []
    with CheckpointStore.open(tiers).sync() as store:

        def listen(event: Event) -> None:
            heard.append(event)
            getattr(store, verb)(*((7, tree(7)) if verb == "save" else ()))

        store.subscribe(listen)
        store.save(1, tree(1))
        store.flush()
        assert [info.step for info in store.steps()] == [1]
    assert heard
    assert "a listener failed on StepSaved" in caplog.text
    assert "hand the event to another thread" in caplog.text


async def _never_awaited(event: Event) -> None: ...


@pytest.mark.parametrize("listener", [3, _never_awaited])
async def test_a_listener_that_nobody_could_call_is_refused(tiers: StoreConfig, listener: Any) -> None:
    async with CheckpointStore.open(tiers) as store:
        with pytest.raises(Invalid, match="a listener is a function"):
            store.subscribe(listener)


@pytest.mark.parametrize("error", NOT_ERRORS, ids=lambda error: type(error).__name__)
async def test_a_listener_that_raises_anything_costs_nobody_else_anything(
    tiers: StoreConfig, caplog: pytest.LogCaptureFixture, error: BaseException
) -> None:
    def listen(event: Event) -> None:
        raise error

    async with CheckpointStore.open(tiers) as store:
        store.subscribe(listen)
        heard = Heard(store)
        async with asyncio.timeout(SOON):
            await (await store.save(1, tree(1))).reached("disk")
        await heard.first(StepPromoted)
        assert [type(event) for event in heard.events] == [StepSaved, StepPromoted]
    assert caplog.text.count("a listener failed on") == 2


class Raises:
    """What the policies of this test raise."""

    error: BaseException = SystemExit()


class LeavingPromotion(Promotion):
    kind: Literal["test_leaving"] = "test_leaving"

    def promotes(self, step: StepView, tier: TierView, store: StoreView) -> bool:
        raise Raises.error


class LeavingRetention(Retention):
    kind: Literal["test_leaving"] = "test_leaving"

    def retains(self, tier: TierView, store: StoreView) -> frozenset[int]:
        if store.now:  # not the sample that a configuration is tried with
            raise Raises.error
        return frozenset(step.serial for step in store.on(tier.name))


class LeavingEviction(Eviction):
    kind: Literal["test_leaving"] = "test_leaving"

    def order(self, candidates: Sequence[StepView], tier: TierView, store: StoreView) -> list[int]:
        raise Raises.error


class LeavingSchedule(Schedule):
    kind: Literal["test_leaving"] = "test_leaving"

    def due(self, step: int, store: StoreView, observed: Observed) -> bool:
        raise Raises.error


@pytest.fixture
def offered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "_offered", dict(base._offered))
    for kind in (LeavingPromotion, LeavingRetention, LeavingEviction, LeavingSchedule, Interrupted, Slow):
        base.register(kind)


@pytest.mark.usefixtures("offered")
@pytest.mark.parametrize("error", NOT_ERRORS, ids=lambda error: type(error).__name__)
async def test_a_policy_that_raises_anything_counts_as_a_failing_one(
    shared_memory: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    error: BaseException,
) -> None:
    monkeypatch.setattr(Raises, "error", error)
    hostile = {"retain": "test_leaving", "evict": "test_leaving"}
    tiers = {"ram": ram(shared_memory, **hostile), "disk": folder(tmp_path / "disk", promote="test_leaving", **hostile)}
    async with CheckpointStore.open(config(tiers, schedule="test_leaving")) as store, asyncio.timeout(SOON):
        for step in (1, 2, 3):
            assert await asyncio.to_thread(store.due, step)
            await (await store.save(step, tree(step))).reached("disk")
        await store.collect()
        await store.flush()
        assert [info.step for info in await store.steps()] == [1, 2, 3]
    for consequence in ("the step is saved", "the step is promoted", "nothing is evicted from it"):
        assert consequence in caplog.text


@pytest.mark.usefixtures("offered")
def test_an_interrupt_that_hits_a_schedule_in_the_main_thread_ends_the_training(
    tiers: StoreConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is a person's, as far as anybody can tell."""
    monkeypatch.setattr(Raises, "error", KeyboardInterrupt())
    settings = tiers.model_copy(update={"schedule": LeavingSchedule()})
    with CheckpointStore.open(settings).sync() as store, pytest.raises(KeyboardInterrupt):
        store.due(1)


class Interrupted(Schedule):
    kind: Literal["test_interrupted"] = "test_interrupted"

    def due(self, step: int, store: StoreView, observed: Observed) -> bool:
        signal.raise_signal(signal.SIGUSR1)
        return True


@pytest.mark.usefixtures("offered")
@pytest.mark.parametrize("error", [SystemExit(7), TimeoutError()], ids=["exit", "alarm"])
@pytest.mark.parametrize("named", [True, False])
def test_what_a_signal_handler_raises_in_the_middle_of_a_schedule_is_no_failure_of_that(
    tiers: StoreConfig, error: BaseException, named: bool
) -> None:
    def handle(number: int, frame: object) -> None:
        raise error

    def handle_any(*arguments: object) -> None:
        raise error

    settings = tiers.model_copy(update={"schedule": Interrupted()})
    before = signal.signal(signal.SIGUSR1, handle if named else handle_any)
    try:
        with CheckpointStore.open(settings).sync() as store, pytest.raises(type(error)):
            store.due(1)
    finally:
        signal.signal(signal.SIGUSR1, before)


class Slow(Promotion):
    kind: Literal["test_slow"] = "test_slow"

    def promotes(self, step: StepView, tier: TierView, store: StoreView) -> bool:
        Block.until_told()
        return True


class Block:
    """Blocks until the log has said so."""

    log: pytest.LogCaptureFixture

    @classmethod
    def until_told(cls) -> None:
        deadline = time.monotonic() + SOON
        while "has been running for" not in cls.log.text and time.monotonic() < deadline:
            time.sleep(0.01)


@pytest.mark.usefixtures("offered")
@pytest.mark.parametrize("who", ["listener", "policy"])
@pytest.mark.parametrize("face", ["async", "blocking"])
def test_a_callback_that_blocks_is_named_while_others_wait_for_it(
    shared_memory: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    who: str,
    face: str,
) -> None:
    caplog.set_level(logging.WARNING, "tieredckpt")
    monkeypatch.setattr(Block, "log", caplog, raising=False)
    monkeypatch.setattr(callbacks, "SLOW", 0.05)
    monkeypatch.setattr(callbacks, "_named_at", {})
    promote = "test_slow" if who == "policy" else "always"
    settings = config({"ram": ram(shared_memory), "disk": folder(tmp_path / "disk", promote=promote)})

    def block(event: Event) -> None:
        Block.until_told()

    async def train() -> None:
        async with CheckpointStore.open(settings) as store:
            if who == "listener":
                store.subscribe(block)
            await store.save(1, tree(1))
            await store.flush()

    if face == "async":
        asyncio.run(train())
    else:
        with CheckpointStore.open(settings).sync() as store:
            if who == "listener":
                store.subscribe(block)
            store.save(1, tree(1))
            store.flush()
    name = {"listener": r"listener .*test_life\..*block", "policy": r"tier 'disk': promotion policy .*test_life\.Slow"}
    assert re.search(rf"{name[who]} has been running for \d\.\d s", caplog.text)
    assert re.search(rf"{name[who]} took \d\.\d s: it should return at once", caplog.text)


async def test_a_store_that_could_not_be_opened_is_closed_to_every_call(settings: StoreConfig) -> None:
    async with CheckpointStore.open(settings):
        second = CheckpointStore.open(settings)
        with pytest.raises(Conflict):
            await second
        for call in (lambda: second.save(1, tree(1)), second.restore, second.flush, second.steps):
            with pytest.raises(Closed):
                await call()
