"""The ranks of a store open and close together, and none waits for ever for one that does not."""

from __future__ import annotations

import asyncio
import signal
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from reliability.ranks import InProcess, World
from reliability.tiers import FaultyTiers
from support.cohort import DEADLINE, Cohort, RanksPlace, assert_whole, part, stores_of, whole
from support.insight import mapped_below, opened_below
from support.limits import limit
from support.scenes import SOON, config, crash, folder, ram

from tieredckpt import CheckpointStore
from tieredckpt.blobs.locks import let_go
from tieredckpt.blobs.ram.folder import take
from tieredckpt.errors import Conflict, Invalid, RanksUnavailable, TieredCkptError, TierUnavailable
from tieredckpt.events import StepCommitted, StepEvicted, TierFailed
from tieredckpt.format.manifest import StepId
from tieredckpt.preempt import preemption


@pytest.fixture
def place(shared_memory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RanksPlace:
    limit(monkeypatch, last_words=0.5)
    return RanksPlace(shared_memory, tmp_path / "disk")


async def outcomes(stores: list[CheckpointStore]) -> list[object]:
    """How opening ends on every rank; what was opened is closed."""
    found = await asyncio.gather(*stores, return_exceptions=True)
    await asyncio.gather(*map(crash, stores))
    return list(found)


async def test_a_rank_that_cannot_open_keeps_all_from_it_and_says_why(place: RanksPlace) -> None:
    tiers = {"ram": ram(place.shared_memory, path=place.shared_memory / "held"), "disk": folder(place.disk)}
    async with CheckpointStore.open(config(tiers)) as store:
        of_rank_1 = Path(store._life.engine.state.tiers[0].store.location) / "rank-1"
    lock = take(of_rank_1)  # another process has the RAM of rank 1
    try:
        stores = stores_of(World(3, nodes=["a"] * 3), place.shared_memory, place.disk, tiers=tiers)
        found = await outcomes(stores)
        assert all(isinstance(each, Conflict) for each in found)
        assert "rank 1" in str(found[0])
        assert "in use" in str(found[2])
    finally:
        let_go(lock)


async def test_a_communicator_that_fails_as_it_is_closed_keeps_no_tier_open(
    place: RanksPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    close = InProcess.close

    async def broken(communicator: InProcess) -> None:
        await close(communicator)
        raise RuntimeError("an error of its transport")

    with monkeypatch.context() as patch:
        patch.setattr(InProcess, "close", broken)
        async with place.open() as ranks:
            await ranks.save(1)
    assert not opened_below(place.shared_memory)
    assert not mapped_below(place.shared_memory)
    async with place.open() as ranks:
        for restored in await ranks.restored():
            assert_whole(restored, 1)


async def test_what_is_true_for_all_ranks_is_said_once_by_the_leader(
    place: RanksPlace, small_tmpfs: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tiers = {"ram": ram(small_tmpfs, capacity="128 MiB"), "disk": folder(place.disk)}  # more than there is
    async with place.open(tiers=tiers):
        said = [record.getMessage() for record in caplog.records if "memfd" in record.getMessage()]
    assert len(said) == 1
    assert said[0].startswith("ranks 0, 1, 2: shared memory at ")
    caplog.clear()
    async with CheckpointStore.open(config({"ram": tiers["ram"], "disk": folder(place.disk / "other")})):
        (alone,) = [record.getMessage() for record in caplog.records if "memfd" in record.getMessage()]
    assert alone.startswith("shared memory at ")


async def test_a_store_that_others_write_to_is_refused_on_every_rank(place: RanksPlace) -> None:
    async with CheckpointStore.open(config({"disk": folder(place.disk)})):
        found = await outcomes(stores_of(World(2, nodes=["a"] * 2), place.shared_memory, place.disk))
        assert all(isinstance(each, Conflict) and "written to" in str(each) for each in found)


@pytest.mark.parametrize("absent", [0, 2])
async def test_a_rank_that_does_not_come_is_missed_after_the_deadline(place: RanksPlace, absent: int) -> None:
    stores = stores_of(World(3, nodes=["a"] * 3), place.shared_memory, place.disk, rank_deadline=DEADLINE)
    del stores[absent]
    begin = time.monotonic()
    found = await outcomes(stores)
    assert all(isinstance(each, RanksUnavailable) for each in found)
    assert time.monotonic() - begin < DEADLINE + SOON


@pytest.mark.parametrize("topic", ["nodes", "open/tiers", "open/parts"])
@pytest.mark.parametrize("victim", [0, 1])
async def test_a_rank_that_dies_while_all_open_locks_nobody_up(place: RanksPlace, topic: str, victim: int) -> None:
    world = World(3, nodes=["a"] * 3)
    world.kill(victim, "send", topic=topic)
    stores = stores_of(world, place.shared_memory, place.disk, rank_deadline=DEADLINE)
    opening = [asyncio.ensure_future(store.__aenter__()) for store in stores]
    others = [each for rank, each in enumerate(opening) if rank != victim]
    async with asyncio.timeout(SOON):
        for each in others:
            with pytest.raises(RanksUnavailable):
                await each
    opening[victim].cancel()
    await asyncio.gather(*opening, return_exceptions=True)
    await asyncio.gather(*map(crash, stores))
    async with place.open(3) as ranks:  # a restart works
        await ranks.reached(await ranks.save(1), "disk")


@pytest.mark.parametrize("victim", [0, 2])
async def test_closing_does_not_wait_for_the_dead(place: RanksPlace, victim: int) -> None:
    async with place.open(3, crashing=True) as ranks:
        await ranks.reached(await ranks.save(1), "disk")
        await ranks.flush()
        ranks.let_wait(DEADLINE)
        ranks.world.kill_now(victim)
        others = [store for rank, store in enumerate(ranks.stores) if rank != victim]
        async with asyncio.timeout(SOON):
            await asyncio.gather(*(store.close() for store in others))


@pytest.mark.parametrize("victim", [0, 2])
async def test_closing_does_not_wait_again_for_a_rank_that_timed_out(
    place: RanksPlace, victim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit(monkeypatch, wait_longer=0.2)
    async with place.open(3, crashing=True) as ranks:
        await ranks.reached(await ranks.save(1), "disk")
        ranks.let_wait(DEADLINE)
        ranks.world.kill_now(victim)
        others = [rank for rank in range(3) if rank != victim]
        await ranks.save(2, ranks=others)
        await ranks.failed(others, step=2)
        ranks.let_wait(2 * SOON)
        async with asyncio.timeout(SOON):
            await asyncio.gather(*(ranks[rank].close() for rank in others))


async def test_a_rank_that_was_slow_once_and_is_heard_again_is_waited_for_as_all_are(
    place: RanksPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit(monkeypatch, wait_longer=0.2)
    async with place.open(3) as ranks:
        ranks.let_wait(DEADLINE)
        await ranks.save(1, ranks=[0, 1])
        await ranks.failed([0, 1, 2], step=1)
        with pytest.raises(RanksUnavailable):  # which rank 0 hears
            await ranks[2].restore()
        ranks.let_wait(SOON)
        closing = asyncio.ensure_future(ranks[0].close())
        done, _ = await asyncio.wait([closing], timeout=1)  # longer than it waits for its last words to be taken
        assert not done
        await asyncio.gather(ranks[1].close(), ranks[2].close(), closing)


async def test_rank_0_that_listens_to_all_asks_for_news_no_oftener_than_any_other(
    place: RanksPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    really = InProcess.recv
    asked: dict[int, dict[int, float]] = {rank: {} for rank in range(4)}

    async def recv(self: InProcess, source: int, topic: str, *, timeout: float) -> bytes:
        if topic.startswith("log/"):
            asked[self.rank][source] = timeout
        return await really(self, source, topic, timeout=timeout)

    monkeypatch.setattr(InProcess, "recv", recv)
    async with place.open(4) as ranks:
        await ranks.reached(await ranks.save(1), "disk")
    often = {rank: sum(1 / timeout for timeout in sources.values()) for rank, sources in asked.items()}
    assert [len(asked[rank]) for rank in range(4)] == [3, 1, 1, 1]
    assert often[0] == pytest.approx(often[1])


async def test_rank_0_stays_until_all_others_close(place: RanksPlace) -> None:
    async with place.open(2) as ranks:
        await ranks.reached(await ranks.save(1), "disk")
        closing = asyncio.ensure_future(ranks[0].close())
        done, _ = await asyncio.wait([closing], timeout=1)  # longer than it waits for its last words to be taken
        assert not done
        assert await ranks[1].where(1) == ("ram", "disk")
        await ranks[1].close()
        await closing


async def test_rank_0_that_is_warned_has_told_the_others_what_is_durable_when_it_ends(place: RanksPlace) -> None:
    async with place.open(2, crashing=True) as ranks:
        ranks.world.delay(0, 0.3, verb="send", topic="log/*")
        checkpoints = await ranks.save(1)
        await checkpoints[0].reached("disk")
        with pytest.raises(SystemExit), preemption(ranks[0]):
            signal.raise_signal(signal.SIGTERM)
        await crash(ranks[0])
        async with asyncio.timeout(SOON):
            await checkpoints[1].reached("disk")


async def test_closing_waits_for_what_is_due_on_other_ranks(place: RanksPlace) -> None:
    async with place.open(3) as ranks:
        held = ranks.faulty(0).hold("put", key="steps/*/manifest.ocdbt")
        await ranks.save(1)
        await held.reached()
        closing = [asyncio.ensure_future(store.close()) for store in ranks.stores]
        done, _ = await asyncio.wait(closing, timeout=0.2)
        assert not done
        held.release()
        await asyncio.gather(*closing)
    async with CheckpointStore.open(config({"disk": folder(place.disk)}), ranks=None) as store:
        assert_whole(await store.restore(), 1)


async def test_a_close_in_order_gives_the_memory_back_and_leaves_no_folder(place: RanksPlace) -> None:
    async with place.open(3, ram_settings={"on_close": "auto"}) as ranks:
        await ranks.reached(await ranks.save(1), "disk")
    assert not list(place.shared_memory.glob("*/of-test/ram/*"))


async def test_ranks_in_threads_without_an_event_loop_do_the_same(place: RanksPlace) -> None:
    """The blocking face, as ordinary training loops use it."""
    stores = stores_of(World(3, nodes=["a"] * 3), place.shared_memory, place.disk)
    problems: list[BaseException] = []

    def trainer(rank: int) -> None:
        try:
            with stores[rank].sync() as store:
                assert store.restore() is None
                for step in (1, 2):
                    if store.due(step):
                        store.save(step, part(step, rank, 3), replicated=["common"]).reached("disk")
                store.flush()
                assert_whole(store.restore(), 2)
        except BaseException as error:
            problems.append(error)

    threads = [threading.Thread(target=trainer, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    await asyncio.gather(*(asyncio.to_thread(thread.join, SOON) for thread in threads))
    assert not any(thread.is_alive() for thread in threads)
    assert problems == []


async def test_what_one_process_saved_alone_is_restored_and_promoted_by_ranks(place: RanksPlace) -> None:
    """A step that is in the RAM of a store without ranks counts as the part of a single one."""
    tiers = {"ram": ram(place.shared_memory / "a", on_close="keep"), "disk": folder(place.disk, promote="never")}
    alone = CheckpointStore.open(config(tiers, name="test"), ranks=None)
    async with alone:
        await alone.save(1, {"w": part(1, 0, 1)["w"].array, "common": part(1, 0, 1)["common"], "own": {}, "epoch": 1})
    async with place.open(3) as ranks:
        for restored in await ranks.restored():
            assert_whole(restored, 1)
        await ranks.flush()
        assert [await store.where(1) for store in ranks.stores] == [("ram", "disk")] * 3


NEVER: dict[str, Any] = {"disk_settings": {"promote": "never"}, "crashing": True}


async def two_runs(place: RanksPlace) -> None:
    """Two runs on disjoint nodes, c and d, and e and f, continue a step and give their next saves one serial."""

    async def save(ranks: Cohort, step: int, seed: int) -> None:
        await ranks.all(lambda store, rank: store.save(step, {"w": part(seed, rank, 2)["w"], "step": step}))
        await asyncio.gather(*(heard.first(StepCommitted) for heard in ranks.heard))

    async with place.open(2, nodes=["a", "b"], **NEVER) as ranks:
        await save(ranks, 1, 1)
        await ranks[0].promote(1, "disk")
    for nodes, seed in ((["c", "d"], 20), (["e", "f"], 30)):
        async with place.open(2, nodes=nodes, **NEVER) as ranks:
            await ranks.restored()
            await save(ranks, 2, seed)


async def test_parts_that_different_runs_left_under_one_serial_are_no_step(place: RanksPlace) -> None:
    """A third run has a node of each."""
    await two_runs(place)
    async with place.open(2, nodes=["c", "f"], **NEVER) as ranks:
        for restored in await ranks.restored():
            assert restored is not None
            assert restored.step == 1
            np.testing.assert_array_equal(restored.tree["w"], whole(1))


async def test_of_runs_that_left_whole_steps_under_one_serial_the_newest_is_restored(place: RanksPlace) -> None:
    await two_runs(place)
    async with place.open(4, nodes=["c", "f", "d", "e"], **NEVER) as ranks:
        for restored in await ranks.restored():
            assert restored is not None
            assert restored.step == 2
            np.testing.assert_array_equal(restored.tree["w"], whole(30))
        assert (
            not ranks[0]._life.engine.state.tiers[0].steps.has_own(StepId(2, 2))
        )  # its part of the other run has left
        await ranks[0].promote(2, "disk")
    async with place.open(1, nodes=["g"], **NEVER) as ranks:
        for restored in await ranks.restored(2):
            assert restored is not None
            np.testing.assert_array_equal(restored.tree["w"], whole(30))


async def test_a_shared_tier_that_fails_is_told_on_all_ranks_and_to_who_waits(place: RanksPlace) -> None:
    async with place.open(2) as ranks:
        place.disk.rename(place.disk.with_name("away"))  # nobody makes a new one in its place
        checkpoints = await ranks.save(1)
        await asyncio.gather(*(heard.first(TierFailed) for heard in ranks.heard))
        for store, checkpoint in zip(ranks.stores, checkpoints, strict=True):
            with pytest.raises(TieredCkptError):
                await store.flush()
            with pytest.raises(TierUnavailable):
                await checkpoint.reached("disk")
        for step in (2, 3):
            await ranks.reached(await ranks.save(step), "ram")  # training goes on


async def test_a_rank_whose_ram_fails_streams_and_the_step_is_committed_all_the_same(
    place: RanksPlace, faults: FaultyTiers
) -> None:
    async with place.open(2) as ranks:
        first = ranks[1]._life.engine.state.tiers[0]
        await ranks[1]._life.loop.call(_fail(ranks[1], TierUnavailable("by script")))
        saves = await ranks.save(1)
        assert [save.saved.tier for save in saves if save.saved is not None] == ["ram", "disk"]
        await ranks.reached(saves, "disk")
        for restored in await ranks.restored():
            assert_whole(restored, 1)
        assert first.config.kind == "ram"


async def _fail(store: CheckpointStore, error: Exception) -> None:
    tier = store._life.engine.state.tiers[0]
    store._life.engine.state.report(tier, error)
    tier.health.retry_at = time.monotonic() + SOON


async def test_settings_that_only_ranks_have_are_checked(place: RanksPlace) -> None:
    with pytest.raises(Invalid, match="rank_deadline"):
        config({"disk": folder(place.disk)}, rank_deadline=0)
    with pytest.raises(Invalid, match="ranks is"):
        async with CheckpointStore.open(config({"disk": folder(place.disk)}), ranks="all"):
            pass


async def test_a_long_training_remembers_no_more_of_steps_that_are_gone(place: RanksPlace) -> None:
    """No rank's memory grows with the steps that were saved and evicted, nor with copies that nobody makes."""
    retained = {"retain": {"kind": "last_n", "n": 2}}
    settings = {"replicas": 2, "capacity": "2 MiB"}  # on one node
    async with place.open(2, disk_settings=retained, ram_settings=settings) as ranks:
        for step in range(1, 13):
            await ranks.reached(await ranks.save(step), "disk")
        for store, heard in zip(ranks.stores, ranks.heard, strict=True):
            await heard.first(StepEvicted, lambda event: event.tier == "disk" and event.step == 10)
            engine = store._life.engine
            held = sum(len(tier.steps.held) for tier in engine.state.tiers)
            assert len(engine.state.tier("disk").steps.tombstones) <= held + 1
            assert len(engine.mode.ranked.replicas._ledger._has) <= held
