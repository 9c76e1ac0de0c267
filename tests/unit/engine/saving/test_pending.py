"""Saves begin in the order of their calls, and no call waits for a lazy save that nobody can confirm."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from support.insight import flip_chunk, tier_of
from support.lazy_saves import SIZE, full, values_of
from support.scenes import CHUNK, SOON, config, folder, ram

from tieredckpt import CheckpointStore, Closed, Invalid, Shard, Sharded
from tieredckpt.checkpoint import Checkpoint
from tieredckpt.config import StoreConfig
from tieredckpt.engine.loop import EngineThread
from tieredckpt.engine.saving import pending


@pytest.mark.parametrize("captures", [("copy", "lazy"), ("lazy", "copy"), ("lazy", "lazy"), ("lazy", "lazy", "copy")])
async def test_saves_called_at_the_same_time_wait_for_no_confirmation_that_cannot_come(
    tiers: StoreConfig, captures: tuple[Any, ...]
) -> None:
    """Promise 5: who gathers the calls can confirm none before all have returned, and then in any order."""
    async with CheckpointStore.open(tiers) as store, asyncio.timeout(SOON):
        for first in range(1, 41, 4):
            calls = [store.save(step, {"w": full(step)}, capture=how) for step, how in enumerate(captures, first)]
            for checkpoint in reversed(await asyncio.gather(*calls)):
                await checkpoint.captured()
                await checkpoint.reached("ram")
                assert await values_of(store, checkpoint.step) == (checkpoint.step,)


@pytest.mark.parametrize("first", ["copy", "lazy"])
@pytest.mark.parametrize("second", ["copy", "lazy"])
async def test_saves_called_at_the_same_time_are_made_in_the_order_of_the_calls(
    tiers: StoreConfig, first: Literal["copy", "lazy"], second: Literal["copy", "lazy"]
) -> None:
    """Decision 26: the newest was the one whose tree takes longest to flatten, or to digest."""
    tiers = tiers.model_copy(update={"lazy_guard": "digests"})
    much = {"many": {str(key): key for key in range(5000)}, "large": np.zeros(16 << 20, np.uint8)}
    async with CheckpointStore.open(tiers) as store, asyncio.timeout(SOON):
        await asyncio.gather(store.save(1, much, capture=first), store.save(2, {"w": full(2)}, capture=second))
        await store.flush()
        assert [info.step for info in sorted(await store.steps(), key=lambda info: info.serial)] == [1, 2]


async def test_a_save_of_pieces_is_made_before_one_that_was_called_after_it(tiers: StoreConfig) -> None:
    """Decision 26: the newest was the one whose pieces took longest to be found to be whole."""
    pieces = {str(key): Sharded([Shard(np.zeros(4), (8,), (4 * half,)) for half in range(2)]) for key in range(2000)}
    async with CheckpointStore.open(tiers) as store, asyncio.timeout(SOON):
        await asyncio.gather(store.save(1, pieces), store.save(2, {"w": full(2)}))
        assert await store.latest_step() == 2


async def test_a_save_waits_for_no_earlier_call_that_was_refused_though_the_ranks_cannot_be_told(
    tiers: StoreConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*what: Any) -> None:
        raise MemoryError

    many = {str(key): key for key in range(5000)}
    async with CheckpointStore.open(tiers) as store, asyncio.timeout(SOON):
        monkeypatch.setattr(store._life.engine.pending, "_not_begun", broken)
        calls = store.save(1, {"many": many, "bad": object()}), store.save(2, {"w": full(2)})
        refused, saved = await asyncio.gather(*calls, return_exceptions=True)
        assert isinstance(refused, MemoryError)
        assert isinstance(saved, Checkpoint)


async def test_a_call_whose_loop_has_stopped_holds_up_neither_saves_nor_the_close(
    tiers: StoreConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_held, go_on = threading.Event(), threading.Event()

    def held_up(*arguments: Any) -> Any:
        is_held.set()
        assert go_on.wait(SOON)

    monkeypatch.setattr(pending, "DigestGuard", held_up)
    tiers = tiers.model_copy(update={"lazy_guard": "digests"})
    loop = asyncio.new_event_loop()
    async with CheckpointStore.open(tiers) as store, asyncio.timeout(SOON):
        first = loop.create_task(store.save(1, {"w": full(1)}, capture="lazy"))
        behind = loop.create_task(store.save(2, {"w": full(2)}))
        await asyncio.to_thread(loop.run_until_complete, asyncio.to_thread(is_held.wait, SOON))  # and it runs no more
        await (await store.save(3, {"w": full(3)})).reached("disk")
        await store.close()
    go_on.set()
    await asyncio.to_thread(loop.run_until_complete, asyncio.wait([first, behind]))
    assert isinstance(first.exception(), Closed)
    loop.close()


CALLS: dict[str, Callable[[CheckpointStore, Checkpoint], Awaitable[object]]] = {
    "collect": lambda store, earlier: store.collect(),
    "delete": lambda store, earlier: store.delete(1),
    "evict": lambda store, earlier: store.evict(1, "disk"),
    "flush": lambda store, earlier: store.flush(),
    "promote": lambda store, earlier: store.promote(2, "disk"),
    "reached": lambda store, earlier: earlier.reached("disk"),
    "restore": lambda store, earlier: store.restore(1, resume=False),
    "scrub": lambda store, earlier: store.scrub("disk", repair=True),
    "verify": lambda store, earlier: store.verify(2, "disk", repair=True),
}


@pytest.mark.parametrize("call", CALLS)
async def test_a_lazy_save_past_ram_is_confirmed_by_a_call_that_waits_for_its_tier(
    call: str, shared_memory: Path, tmp_path: Path
) -> None:
    """Promise 5: nothing else is promoted to the tier or collected there until it is committed."""
    settings = {"ram": ram(shared_memory, capacity="256 KiB"), "disk": folder(tmp_path / "disk")}
    async with CheckpointStore.open(config(settings)) as store, asyncio.timeout(SOON):
        await (await store.save(1, {"w": full(1)[:CHUNK]})).reached("disk")
        earlier = await store.save(2, {"w": full(2)[:CHUNK]})
        if call not in ("promote", "reached"):
            await earlier.reached("disk")
        if call in ("scrub", "verify"):
            await flip_chunk(store, "disk", 2, "w")
        array = np.arange(SIZE, dtype=np.int64)
        await store.save(3, {"w": array}, capture="lazy")
        while not tier_of(store, "disk").packs.guard.locked():
            await asyncio.sleep(0.01)
        await CALLS[call](store, earlier)
        await store.flush()
        assert await store.where(3) == ("disk",)


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("order", ["the save first", "the call first"])
async def test_a_lazy_save_past_ram_waits_for_no_confirmation_by_who_waits_for_a_call_as_well(
    order: str, call: str, shared_memory: Path, tmp_path: Path
) -> None:
    """Promise 5: who gathers both can confirm none before the call has returned, which waits for the save."""
    settings = {"ram": ram(shared_memory, capacity="256 KiB"), "disk": folder(tmp_path / "disk")}
    async with CheckpointStore.open(config(settings)) as store, asyncio.timeout(SOON):
        await (await store.save(1, {"w": full(1)[:CHUNK]})).reached("disk")
        earlier = await store.save(2, {"w": full(2)[:CHUNK]})
        if call != "reached":
            await earlier.reached("disk")
        both = store.save(3, {"w": np.arange(SIZE, dtype=np.int64)}, capture="lazy"), CALLS[call](store, earlier)
        await asyncio.gather(*(both if order == "the save first" else both[::-1]))
        await store.flush()
        assert await store.where(3) == ("disk",)


async def test_a_lazy_save_a_save_behind_it_and_a_restore_may_be_gathered(tiers: StoreConfig) -> None:
    """Promise 5: nobody could confirm the lazy save, for which the one behind it waited, and the restore for that."""
    jnp = pytest.importorskip("jax.numpy")
    async with CheckpointStore.open(tiers) as store, asyncio.timeout(SOON):
        for first in range(1, 31, 3):
            await store.save(first, {"w": full(1)})
            await asyncio.gather(
                store.save(first + 1, {"w": full(2)}, capture="lazy"),
                store.save(first + 2, {"w": jnp.ones(5)}, capture="reference"),
                store.restore(resume=False),
            )


async def test_a_forked_process_that_waits_for_an_earlier_step_is_told_so(
    tiers: StoreConfig, held_back: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copy of a lazy save goes on in the parent alone: who waited for it here would wait for ever."""
    async with CheckpointStore.open(tiers) as store:
        held_back.set()
        earlier = await store.save(1, {"w": full(1)})
        held_back.clear()
        await store.save(2, {"w": full(2)}, capture="lazy")
        with monkeypatch.context() as child:
            child.setattr(EngineThread, "was_forked", True)
            async with asyncio.timeout(10):
                with pytest.raises(Closed, match="a forked process has no part"):
                    await earlier.reached("ram")
        held_back.set()


async def test_a_task_that_waits_for_an_earlier_step_confirms_no_lazy_save_in_ram(
    tiers: StoreConfig,
) -> None:
    """Promise 4: the trainer may be changing the arrays at that moment."""
    array = full(2)
    async with CheckpointStore.open(tiers) as store:
        earlier = await store.save(1, {"w": full(1)})
        later = await store.save(2, {"w": array}, capture="lazy")
        await earlier.reached("ram")
        array += 1
        with pytest.raises(Invalid, match="'w'"):
            await later.captured()
