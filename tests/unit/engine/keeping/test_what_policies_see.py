"""What policies see of a running store: signals, promotions under way, and how trainers have fared."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from support.records import first_record
from support.scenes import SOON, Heard, assert_same, config, folder, ram, tree

from tieredckpt import CheckpointStore, StoreConfig
from tieredckpt.engine.promoting import copy_step
from tieredckpt.engine.saving.snapshot import Snapshot
from tieredckpt.engine.state.failures import FailureHistory, failure_history
from tieredckpt.engine.tier.lease import Holder
from tieredckpt.engine.tier.tier import Tier
from tieredckpt.errors import Invalid
from tieredckpt.events import StepPromoted, StepSaved
from tieredckpt.format.manifest import StepRecord
from tieredckpt.policy.views import Observed

TRAINER = Path(__file__).parents[3] / "support" / "trainer.py"


def signals(store: CheckpointStore) -> frozenset[str]:
    return store._life.engine.state.view().signals


async def test_a_signal_is_seen_from_when_it_is_raised_until_it_is_withdrawn(tiers: StoreConfig) -> None:
    async with CheckpointStore.open(tiers) as store:
        assert signals(store) == frozenset()
        store.signal("preempt")
        store.signal("keep")
        assert signals(store) == {"preempt", "keep"}
        store.signal("preempt", on=False)
        store.signal("never raised", on=False)
        assert signals(store) == {"keep"}
        with pytest.raises(Invalid, match="'preempt'"):
            store.signal("")


def test_a_signal_may_be_raised_by_a_signal_handler(tiers: StoreConfig) -> None:
    with CheckpointStore.open(tiers).sync() as store:
        before = signal.signal(signal.SIGUSR1, lambda *_: store.signal("preempt"))
        try:
            signal.raise_signal(signal.SIGUSR1)
            assert signals(store._store) == {"preempt"}
        finally:
            signal.signal(signal.SIGUSR1, before)


async def test_a_tier_is_seen_promoting_while_a_promotion_to_it_is_under_way(
    tiers: StoreConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[list[bool]] = []
    write_packs = copy_step.write_packs

    async def look(*arguments: Any) -> None:
        state = store._life.engine.state
        seen.append([tier.promoting for tier in state.view().tiers])
        seen.append([tier.promoting for tier in state.view(at_rest=True).tiers])
        await write_packs(*arguments)

    monkeypatch.setattr(copy_step, "write_packs", look)
    async with CheckpointStore.open(tiers) as store:
        await store.save(1, tree())
        await store.flush()
        assert seen == [[False, True], [False, False]]
        assert [tier.promoting for tier in store._life.engine.state.view().tiers] == [False, False]


async def test_flush_and_reached_wait_for_a_step_that_waits_for_another_promotion(
    shared_memory: Path, tmp_path: Path
) -> None:
    tiers = {
        "ram": ram(shared_memory),
        "disk": folder(tmp_path / "disk"),
        "far": folder(tmp_path / "far", promote="when_idle"),
    }
    async with CheckpointStore.open(config(tiers)) as store:
        for step in range(1, 4):
            ckpt = await store.save(step, tree(step))
            await ckpt.reached("far")
        await store.save(4, tree(4))
        await store.flush()
        assert await store.where(4) == ("ram", "disk", "far")


async def test_a_save_by_reference_stalls_training_only_until_it_returns(
    tiers: StoreConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on, of = threading.Event(), Snapshot.of

    def hold_up(*arguments: Any) -> Snapshot:
        assert go_on.wait(SOON)
        return of(*arguments)

    monkeypatch.setattr(Snapshot, "of", staticmethod(hold_up))
    async with CheckpointStore.open(tiers) as store:
        begin = time.monotonic()
        checkpoint = await store.save(1, {"epoch": 1}, capture="reference")
        stall = time.monotonic() - begin
        go_on.set()
        await checkpoint.reached("ram")
        observed = store.observed()
        assert observed.stall_seconds == observed.stalled_seconds
        assert 0 < observed.stalled_seconds <= stall


async def test_flush_waits_for_a_step_that_waits_for_a_promotion_by_hand(
    shared_memory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held_up, go_on = asyncio.Event(), threading.Event()
    loop, write_packs = asyncio.get_running_loop(), copy_step.write_packs

    async def hold_up(tier: Tier, *arguments: Any) -> None:
        if tier.name == "disk":
            loop.call_soon_threadsafe(held_up.set)
            await asyncio.to_thread(go_on.wait, SOON)
        await write_packs(tier, *arguments)

    tiers = {
        "ram": ram(shared_memory),
        "disk": folder(tmp_path / "disk", promote="never"),
        "far": folder(tmp_path / "far", promote={"kind": "all_of", "policies": ["on_signal", "when_idle"]}),
    }
    async with CheckpointStore.open(config(tiers)) as store:
        await store.save(1, tree(1))
        monkeypatch.setattr(copy_step, "write_packs", hold_up)
        admin = asyncio.create_task(store.promote(1, "disk"))
        await held_up.wait()
        store.signal("preempt")
        flushing = asyncio.create_task(store.flush())
        for _ in range(20):
            await store.steps()  # so often has the engine had its turn
        assert await store.where(1) == ("ram",)
        go_on.set()
        await flushing
        assert await store.where(1) == ("ram", "disk", "far")
        await admin


async def test_the_newest_step_goes_to_the_tier_that_waits_for_a_signal(shared_memory: Path, tmp_path: Path) -> None:
    tiers = {"ram": ram(shared_memory), "disk": folder(tmp_path / "disk", promote="on_signal")}
    async with CheckpointStore.open(config(tiers)) as store:
        for step in (1, 2):
            ckpt = await store.save(step, tree(step))
        await store.flush()
        assert await store.where(2) == ("ram",)
        store.signal("preempt")
        await ckpt.reached("disk")
        assert (tmp_path / "disk" / "steps" / "0000000002-000002").is_dir()
        assert not (tmp_path / "disk" / "steps" / "0000000001-000001").exists()


async def test_the_time_to_the_slowest_tier_that_works_is_observed(
    shared_memory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiers = {"ram": ram(shared_memory), "disk": folder(tmp_path / "disk"), "far": folder(tmp_path / "far")}
    async with CheckpointStore.open(config(tiers)) as store:
        assert store.observed().promotion_seconds is None
        await store.save(1, tree())
        await store.flush()
        disk, far = (store._life.engine.state.tier(name) for name in ("disk", "far"))
        assert disk.steps.promotion_seconds is not None
        assert far.steps.promotion_seconds is not None
        disk.steps.promotion_seconds, far.steps.promotion_seconds = 3.0, 7.0
        assert store.observed().promotion_seconds == 7.0
        monkeypatch.setattr(far.health, "error", RuntimeError("dead"))
        assert store.observed().promotion_seconds == 3.0


def kill_a_trainer(settings: StoreConfig, first: int, last: int) -> None:
    command = [sys.executable, str(TRAINER), json.dumps(settings.model_dump(mode="json")), str(first), str(last)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as trainer:
        watchdog = threading.Timer(3 * SOON, trainer.kill)  # it imports everything first
        watchdog.start()
        assert trainer.stdout is not None
        said = [trainer.stdout.readline() for _ in range(first, last + 1)]
        watchdog.cancel()
        trainer.kill()
    assert said == [f"saved {step}\n" for step in range(first, last + 1)]


async def test_the_figures_of_a_training_are_on_the_store_and_in_its_events(tiers: StoreConfig) -> None:
    async with CheckpointStore.open(tiers) as store:
        heard = Heard(store)
        for step in (1, 2):
            await store.save(step, tree(step))
        await store.flush()
        seen = store.observed()
        stalls = [event.seconds for event in heard.of(StepSaved)]
        assert seen.stalled_seconds == pytest.approx(sum(stalls))
        assert seen.stall_seconds == pytest.approx(0.7 * stalls[0] + 0.3 * stalls[1])
        assert seen.ettr == pytest.approx(1 - sum(stalls) / seen.trained_seconds)
        lags = [event.lag for event in heard.of(StepPromoted)]
        assert all(event.lag >= event.seconds > 0 for event in heard.of(StepPromoted) if event.step == 2)
        assert min(lags) <= (seen.promotion_seconds or 0) <= max(lags)


def test_the_effective_training_time_ratio_leaves_out_stalls_and_lost_work() -> None:
    assert Observed(0.0).ettr is None
    assert Observed(0.0, trained_seconds=100, stalled_seconds=5, lost_seconds=15).ettr == pytest.approx(0.8)


async def test_trainers_that_die_are_counted_and_the_count_outlives_those_that_do_not(tiers: StoreConfig) -> None:
    async with CheckpointStore.open(tiers) as store:
        assert store.observed().failures == 0
    kill_a_trainer(tiers, 1, 2)
    kill_a_trainer(tiers, 3, 3)
    async with CheckpointStore.open(tiers) as store:
        assert store.observed().failures == 2
        trained = store.observed().trained_seconds
        assert trained > 0
        await store.save(4, tree())
    async with CheckpointStore.open(tiers) as store:
        assert store.observed().failures == 2
        assert store.observed().trained_seconds >= trained - 0.1  # a step tells it in tenths of seconds
        restored = await store.restore()
        assert restored is not None
        assert_same(restored.tree["count"], tree()["count"])


def holder(process: int, taken_at: float, renewed_at: float) -> Holder:
    return Holder(
        host="node",
        machine="node/1",
        process=process,
        process_started=str(taken_at),
        taken_at=taken_at,
        renewed_at=renewed_at,
    )


def record(process: int, saved_at: float, **provenance: str) -> StepRecord:
    return first_record(
        None, store="", line=(), saved_at=saved_at, provenance={"host": "node", "process": str(process), **provenance}
    )


@pytest.mark.parametrize(
    ("newest", "dead", "expected"),
    [
        (None, [], FailureHistory()),
        (None, [holder(7, 100, 160)], FailureHistory(1, 60, 0, 60)),
        # One trainer has a lease on every tier.
        (None, [holder(7, 100, 160), holder(7, 100, 160)], FailureHistory(1, 60, 0, 60)),
        # What the step knows, and what its trainer did after it.
        (
            record(7, 150, failures="2", trained_seconds="500", stalled_seconds="5", lost_seconds="70"),
            [holder(7, 100, 160)],
            FailureHistory(3, 510, 5, 80),
        ),
        # One that began after that step and saved none.
        (record(7, 150, failures="2", trained_seconds="500"), [holder(8, 200, 230)], FailureHistory(3, 530, 0, 30)),
        # Dead for long, and counted by the one that saved the step.
        (record(7, 150, failures="2", trained_seconds="500"), [holder(6, 10, 20)], FailureHistory(2, 500)),
        (record(7, 150, failures="many", trained_seconds="500"), [], FailureHistory()),
        (record(7, 150, failures="-1"), [], FailureHistory()),
        (record(7, 150, trained_seconds="nan"), [], FailureHistory()),
    ],
)
def test_each_trainer_that_died_counts_once(
    newest: StepRecord | None, dead: Iterable[Holder], expected: FailureHistory
) -> None:
    assert failure_history(newest, dead) == expected
