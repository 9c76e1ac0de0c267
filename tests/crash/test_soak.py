"""A store lives on under random faults: nothing is lost, and nothing that it takes grows."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from reliability.gauges import ALLOWED, trends
from reliability.soak import Soaked, soak

from tieredckpt import CheckpointStore
from tieredckpt.engine.repairing.repair import Unrepaired
from tieredckpt.engine.repairing.verify import Verified
from tieredckpt.engine.restoring.source import Damage
from tieredckpt.engine.tier import commit_file
from tieredckpt.engine.tier.tier import Tier

EVERY = 0.02
ROUNDS = 128
"""In which there is some of everything."""
LONGEST = 240.0
"""Seconds in which a broken promise is noticed, which is when a soak ends."""


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)  # of this library and of what retries for it


def assert_survived(found: Soaked) -> None:
    assert found.lost == []
    assert found.growing == []
    assert {trend.gauge for trend in found.trends} == set(ALLOWED), "there were too few samples to tell"
    assert found.saves > 50
    assert found.promotions > 50
    assert found.restores > 50
    assert found.repaired >= found.damaged > 0
    assert found.healed > 0
    assert found.reopened
    assert len({kind for kind, _ in found.faults}) > 4, found.faults
    assert {"put", "delete", "get", "stat", "list"} <= {verb for _, verb in found.faults}


@pytest.mark.timeout(1800)
async def test_a_hundred_rounds_under_random_faults_lose_and_leak_nothing(shared_memory: Path, tmp_path: Path) -> None:
    assert_survived(await soak(0.0, shared_memory, tmp_path, seed=1, every=EVERY, rounds=ROUNDS))


@pytest.mark.slow
@pytest.mark.timeout(1800)
async def test_ten_minutes_under_random_faults_lose_and_leak_nothing(shared_memory: Path, tmp_path: Path) -> None:
    assert_survived(await soak(600.0, shared_memory, tmp_path, seed=2, every=EVERY))


async def test_a_soak_has_its_rounds_however_slow_the_machine_is(shared_memory: Path, tmp_path: Path) -> None:
    found = await soak(0.0, shared_memory, tmp_path, seed=3, every=0.0, rounds=9)
    assert found.saves + found.skipped == 9
    assert found.lost == []


async def test_a_tier_that_is_slow_in_a_calm_is_not_called_damaged(
    shared_memory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scrub, slow = CheckpointStore.scrub, iter([Verified(None, "near", 0, (), False, "no answer in time")])

    async def slow_at_first(store: CheckpointStore, **options: Any) -> list[Verified]:
        return [*slow] or await scrub(store, **options)

    monkeypatch.setattr(CheckpointStore, "scrub", slow_at_first)
    found = await soak(0.0, shared_memory, tmp_path, seed=3, every=0.0, rounds=1)
    assert found.lost == []
    assert not list(slow)
    assert found.compared > 0


# -- and a store that breaks its promises is found out ------------------------------------------------------


async def test_damage_that_is_not_repaired_is_found_out(
    shared_memory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def give_up(_: object, __: object, ___: object, damage: Iterable[Damage]) -> list[Unrepaired]:
        return [Unrepaired((each.digest,), each.error) for each in damage]

    monkeypatch.setattr("tieredckpt.engine.repairing.verify.repair_chunks", give_up)
    found = await soak(LONGEST, shared_memory, tmp_path, seed=1, every=0.0)
    assert found.lost


@pytest.mark.slow
async def test_steps_that_leave_unheard_are_found_out(
    shared_memory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    retract = commit_file.retract

    async def and_another(tier: Tier, step: Any) -> None:
        await retract(tier, step)
        for other in sorted(tier.steps.held)[:-1]:
            tier.steps.drop(other)

    monkeypatch.setattr(commit_file, "retract", and_another)
    found = await soak(LONGEST, shared_memory, tmp_path, seed=1, every=0.0)
    assert any("was heard to hold" in line for line in found.lost)


def sampled(**gauges: list[int]) -> list[dict[str, int]]:
    """Samples in which some gauges go as given and the others stay."""
    count = len(next(iter(gauges.values())))
    return [dict.fromkeys(ALLOWED, 1000) | {name: values[i] for name, values in gauges.items()} for i in range(count)]


def test_what_grows_is_told_from_noise_and_from_the_warm_up() -> None:
    steady = sampled(threads=[1, 2, 9, *([20, 40, 21, 19] * 5)])
    assert not any(trend.grows for trend in trends(steady))
    leaking = sampled(descriptors=[20 + i for i in range(30)])
    assert [trend.gauge for trend in trends(leaking) if trend.grows] == ["descriptors"]
    assert trends(leaking[:8]) == ()
