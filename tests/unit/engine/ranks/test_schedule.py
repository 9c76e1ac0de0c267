"""All ranks save the same steps, though each asks its schedule by itself and their clocks and luck differ."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections import deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from support.cohort import Cohort, cohort, part
from support.limits import limit
from support.scenes import polled

from tieredckpt.engine.ranks import schedule
from tieredckpt.events import CommitFailed, StepCommitted

SIZE = 3


async def train(ranks: Cohort, rank: int, steps: range) -> list[int]:
    """Ask after every step, and save what is due, as a trainer does; the steps that were saved."""
    saved = []
    for step in steps:
        await asyncio.sleep(0)
        if ranks[rank].due(step):
            await ranks[rank].save(step, part(step, rank, SIZE))
            saved.append(step)
    return saved


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [("always", [1, 2, 3, 4, 5, 6, 7]), ({"kind": "every_n_steps", "n": 3}, [3, 6])],
    ids=["always", "every n steps"],
)
async def test_a_schedule_of_steps_is_answered_at_once_and_alike(
    shared_memory: Path, tmp_path: Path, schedule: Any, expected: list[int]
) -> None:
    async with cohort(SIZE, shared_memory, tmp_path / "disk", schedule=schedule) as ranks:
        saved = await asyncio.gather(*(train(ranks, rank, range(1, 8)) for rank in range(SIZE)))
        assert saved == [expected] * SIZE


async def test_a_schedule_of_time_saves_one_step_on_all_ranks_however_they_are_apart(
    shared_memory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit(monkeypatch, schedule_ahead=0.5)
    behind, last, turn, received = (3, 0, 7), 250, 0, list[int]()
    receive = schedule.SharedSchedule.received

    def noted(self: schedule.SharedSchedule, at: int) -> int | None:
        late = receive(self, at)
        received.append(at)
        return late

    monkeypatch.setattr(schedule.SharedSchedule, "received", noted)
    monkeypatch.setattr(schedule, "time", SimpleNamespace(monotonic=lambda: turn / 100))
    saved: list[list[int]] = [[] for _ in behind]
    every = {"kind": "every", "interval": 0.3}
    async with cohort(SIZE, shared_memory, tmp_path / "disk", schedule=every) as ranks:
        engine = ranks[0]._life.engine
        orders = engine.mode.ranked.schedule
        # What it orders before it knows how fast steps come is for the very next one.
        engine.state.observation.observed = dataclasses.replace(
            engine.state.observation.observed, started_at=time.time()
        )
        for turn in range(last + max(behind)):
            await asyncio.sleep(0.01)
            for rank, lag in enumerate(behind):
                saved[rank] += await train(ranks, rank, range(max(1, turn + 1 - lag), min(turn + 1 - lag, last) + 1))
            await polled(lambda: orders._last is None or received.count(orders._last) == SIZE - 1)
        assert saved[0] == saved[1] == saved[2]
        assert len(saved[0]) >= 2
        await ranks.flush()
        for heard in ranks.heard:
            assert [event.step for event in heard.of(StepCommitted)] == saved[0]
            assert heard.of(CommitFailed) == []


async def test_an_order_that_comes_too_late_costs_one_save_and_the_next_has_more_time(
    shared_memory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit(monkeypatch, schedule_ahead=0.001)
    schedule = {"kind": "every", "interval": 0.01}
    quiet = {"promote": "never"}
    async with cohort(SIZE, shared_memory, tmp_path / "disk", schedule=schedule, disk_settings=quiet) as ranks:
        step = 2
        await asyncio.sleep(0.02)
        assert not any(store.due(0) for store in ranks.stores)  # rank 0 orders step 1, and all hear of it
        await ranks.reached(await ranks.save(1), "ram")
        assert all(store.due(1) for store in ranks.stores)
        ahead = ranks[0]._life.engine.mode.ranked.schedule._ahead
        held = ranks.world.hold(1, "recv", topic="log/*")
        await ranks.reached(await ranks.save(2), "ram")
        await held.reached()
        while not ranks[0].due(step := step + 1):  # the others ask as well, and rank 1 has heard nothing
            ranks[1].due(step)
            ranks[2].due(step)
            await asyncio.sleep(0.02)
        for later in range(step, step + 5):
            ranks[1].due(later)
        await ranks.save(step, ranks=[0, 2])
        held.release()
        for event in await ranks.failed(step=step):
            assert "too late" in event.reason
        assert ranks[0]._life.engine.mode.ranked.schedule._ahead > ahead
        await ranks.reached(await ranks.save(step + 100), "ram")


async def test_a_rank_that_failed_to_save_keeps_step_with_the_schedule_of_the_others(
    shared_memory: Path, tmp_path: Path
) -> None:
    schedule = {"kind": "every_n_steps", "n": 10}
    async with cohort(SIZE, shared_memory, tmp_path / "disk", schedule=schedule) as ranks:
        hurt = ranks[1]._life.engine.state.tiers[0].ram.index
        assert hurt is not None
        allocate = hurt.allocate

        def fail(nbytes: int) -> Any:
            raise OSError("the device is gone")

        hurt.allocate = fail
        assert all(store.due(10) for store in ranks.stores)
        await asyncio.gather(
            *(store.save(10, part(1, rank, SIZE)) for rank, store in enumerate(ranks.stores)), return_exceptions=True
        )
        hurt.allocate = allocate
        await ranks.failed(step=10)
        assert not any(store.due(11) for store in ranks.stores)
        assert all(store.due(20) for store in ranks.stores)


def test_an_order_that_comes_while_the_trainer_asks_about_its_step_is_kept_or_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Never taken for a later step: the others would wait for this rank's part of theirs, and it for theirs."""
    monkeypatch.setattr(schedule, "save_is_due", lambda state, step, **_: False)
    shared = schedule.SharedSchedule(cast(Any, None), coordinates=False, send=lambda step: None)

    class AskedMeanwhile(deque[int]):
        """The trainer's thread runs between two lines of the engine's."""

        def append(self, at: int) -> None:
            if at == 5:
                assert not shared.due(at)
            super().append(at)
            if at == 7:
                assert shared.due(at)

    shared._planned = AskedMeanwhile()
    assert shared.received(5) == 5
    assert not shared.due(6)
    assert shared.received(7) is None
    assert not shared.due(8)
