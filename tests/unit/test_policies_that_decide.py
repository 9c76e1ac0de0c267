"""The shipped policies that weigh metrics, signals, ages, sizes and costs: each keeps what its docstring promises."""

from __future__ import annotations

import dataclasses
import math
from itertools import pairwise

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from tieredckpt_policies import eviction, promotion, retention, schedule
from tieredckpt_policies.retention import Band

from tieredckpt.errors import Invalid
from tieredckpt.policy.base import Observed, Promotion, Schedule, StepView, StoreView, TierView
from tieredckpt.testing.policies import observations, store_views

NOW = 1_800_000_000.0
RAM = TierView("ram", 0, "process", 1000, 0, None, healthy=True)
DISK = TierView("disk", 1, "node", None, 0, 1e9, healthy=True)
FAR = TierView("far", 2, "site", None, 0, 1e6, healthy=True)


def saved(
    serial: int, *tiers: str, age: float = 0, nbytes: int = 100, on_line: bool = True, **metrics: float
) -> StepView:
    return StepView(serial, serial, NOW - age, age, nbytes, metrics, tiers or ("ram",), on_line)


def store(
    *steps: StepView, signals: frozenset[str] = frozenset(), tiers: tuple[TierView, ...] = (RAM, DISK, FAR)
) -> StoreView:
    return StoreView(NOW, steps, tiers, signals)


def promoted(policy: Promotion, view: StoreView, tier: TierView = DISK) -> list[int]:
    return [step.serial for step in view.steps if tier.name not in step.tiers and policy.promotes(step, tier, view)]


# -- promotion --------------------------------------------------------------------------------------------


def test_only_a_step_among_the_best_there_goes() -> None:
    view = store(
        saved(1, "ram", "disk", loss=2.0),
        saved(2, "ram", "disk", loss=3.0),
        saved(3, "ram", "disk", loss=math.nan),
        saved(4, "ram", "disk", loss=0.1, on_line=False),
        saved(5, loss=2.5),
        saved(6, loss=1.0),
        saved(7, loss=2.0),
        saved(8, loss=-math.inf),
        saved(9),
    )
    assert set(promoted(promotion.Best(metric="loss"), view)) == {6, 7}
    assert set(promoted(promotion.Best(metric="loss", n=2), view)) == {5, 6, 7}
    assert set(promoted(promotion.Best(metric="loss", mode="max"), view)) == set()
    assert set(promoted(promotion.Best(metric="loss", mode="max", n=2), view)) == {5, 7}
    assert promoted(promotion.Best(metric="accuracy"), view) == []


@given(store_views(), st.integers(1, 3), st.sampled_from(["min", "max"]))
def test_what_promotion_by_metric_brings_retention_by_metric_keeps(view: StoreView, n: int, mode: str) -> None:
    """With the same settings, so that no step goes to a tier to leave it at once."""
    settings = {"metric": "loss", "n": n, "mode": mode}
    for tier in view.tiers:
        for step in view.line_on(view.tiers[0].name):
            if promotion.Best(**settings).promotes(step, tier, view):
                there = tuple(
                    dataclasses.replace(one, tiers=(*one.tiers, tier.name)) if one.serial == step.serial else one
                    for one in view.steps
                )
                after = dataclasses.replace(view, steps=there)
                assert step.serial in retention.Best(**settings).retains(tier, after)


def test_a_signal_sends_the_newest_step_and_no_other() -> None:
    steps = (saved(1), saved(2), saved(3, on_line=False))
    policy = promotion.OnSignal()
    assert promoted(policy, store(*steps)) == []
    assert promoted(policy, store(*steps, signals=frozenset({"keep"}))) == []
    assert promoted(policy, store(*steps, signals=frozenset({"keep", "preempt"}))) == [2]


def test_the_first_step_and_the_last_go() -> None:
    policy = promotion.FirstAndLast()
    first = saved(1)
    assert promoted(policy, store(first)) == [1]
    there = (saved(1, "ram", "disk"), saved(2), saved(3))
    assert promoted(policy, store(*there)) == []
    assert promoted(policy, store(*there, signals=frozenset({"last"}))) == [3]
    # What is there of an abandoned line is not a first step that a restore could take.
    assert promoted(policy, store(saved(1, "ram", "disk", on_line=False), saved(2))) == [2]


@pytest.mark.parametrize(("busy", "goes"), [((), [2]), (("far",), [2]), (("disk",), []), (("ram",), [])])
def test_the_newest_step_goes_when_neither_its_tier_nor_a_nearer_one_is_busy(
    busy: tuple[str, ...], goes: list[int]
) -> None:
    tiers = tuple(dataclasses.replace(tier, promoting=tier.name in busy) for tier in (RAM, DISK, FAR))
    assert promoted(promotion.WhenIdle(), store(saved(1), saved(2), tiers=tiers), tiers[1]) == goes


# -- retention --------------------------------------------------------------------------------------------

HOUR, DAY = 3600.0, 86400.0


def test_all_of_an_hour_stay_then_one_an_hour_then_one_a_day() -> None:
    newest = NOW // DAY * DAY + DAY - 1  # the last second of a day
    steps = tuple(
        StepView(serial, serial, newest - age, age, 1, {}, ("disk",))
        for serial, age in enumerate(range(5 * 86400, -1, -600), start=1)
    )
    view = StoreView(newest, steps, (DISK,))
    kept = retention.DenseThenSparse().retains(DISK, view)
    ages = [step.age for step in steps if step.serial in kept]
    assert [age for age in ages if age <= HOUR] == [3600, 3000, 2400, 1800, 1200, 600, 0]
    hourly = [age for age in ages if HOUR < age <= DAY]
    assert len(hourly) == 23
    assert all(before - after == HOUR for before, after in pairwise(hourly))
    daily = [age for age in ages if age > DAY]
    assert all(before - after == DAY for before, after in pairwise(daily[1:]))
    assert len(daily) == 5


@given(st.lists(st.integers(1, 400), min_size=1, max_size=60), st.integers(1, 5), st.integers(1, 4))
def test_thinning_as_time_goes_by_leaves_what_thinning_at_the_end_leaves(
    gaps: list[int], often: int, factor: int
) -> None:
    """A sparser band finds the steps that it is to keep, though retention was applied at every save before."""
    policy = retention.DenseThenSparse(
        bands=(
            Band(until=500.0),
            Band(every=100.0 * often, until=2000.0),
            Band(every=100.0 * often * factor),
        )
    )
    now, everything, held = NOW, list[float](), list[float]()

    def kept(times: list[float]) -> list[float]:
        steps = tuple(StepView(0, everything.index(at) + 1, at, now - at, 1, {}, ("disk",)) for at in times)
        serials = policy.retains(DISK, StoreView(now, steps, (DISK,)))
        return [everything[serial - 1] for serial in sorted(serials)]

    for gap in gaps:
        now += gap
        everything.append(now)
        held = kept([*held, now])
    assert held == kept(everything)


def test_beyond_the_last_band_only_the_newest_step_stays() -> None:
    policy = retention.DenseThenSparse(bands=(Band(every=10.0, until=100.0),))
    assert policy.retains(DISK, store(saved(1, "disk", age=300), saved(2, "disk", age=200))) == {2}
    assert policy.retains(DISK, store()) == frozenset()
    # Two in one span of ten seconds: the first, and the newest in any case.
    at = NOW // 10 * 10
    three = tuple(StepView(n, n, at + n, 9 - n, 1, {}, ("disk",)) for n in (1, 2, 3))
    assert policy.retains(DISK, StoreView(at + 9, three, (DISK,))) == {1, 3}


@pytest.mark.parametrize(
    ("bands", "told"),
    [
        ((), "1 or more"),
        ((Band(), Band(until=5.0)), "only the last band may go on for ever"),
        ((Band(until=5.0), Band(until=5.0)), "reach further"),
    ],
)
def test_bands_that_cannot_be_are_refused(bands: tuple[Band, ...], told: str) -> None:
    with pytest.raises(Invalid, match=told):
        retention.DenseThenSparse(bands=bands)


# -- eviction ---------------------------------------------------------------------------------------------


def test_the_largest_leaves_first_and_of_equals_the_oldest() -> None:
    steps = (saved(1, nbytes=5), saved(2, nbytes=9), saved(3, nbytes=9), saved(4, nbytes=7))
    assert eviction.Largest().order(steps, DISK, store(*steps)) == [2, 3, 4, 1]


def test_what_comes_back_soonest_leaves_first_and_what_nobody_else_holds_last() -> None:
    steps = (
        saved(1, "disk"),
        saved(2, "disk", "far", nbytes=10**6),
        saved(3, "disk", "far", nbytes=10**5),
        saved(4, "ram", "disk", nbytes=10**9),
        saved(5, "ram", "disk", "far"),
    )
    policy = eviction.CheapestToGetBack()
    assert policy.order(steps, DISK, store(*steps)) == [4, 5, 3, 2, 1]
    dead = (dataclasses.replace(RAM, healthy=False), DISK, FAR)
    assert policy.order(steps, DISK, store(*steps, tiers=dead)) == [5, 3, 2, 1, 4]
    unseen = (RAM, DISK, dataclasses.replace(FAR, write_bandwidth=None))
    assert policy.order(steps, DISK, store(*steps, tiers=unseen)) == [4, 5, 2, 3, 1]
    # From RAM they come back through the disk, the faster of two that hold it.
    assert policy.order(steps[3:], RAM, store(*steps)) == [5, 4]


# -- schedules --------------------------------------------------------------------------------------------


def waste(interval: float, cost: float, mtbf: float) -> float:
    """Time that one unit of training takes with saves and exponentially distributed failures (Daly 2006)."""
    return mtbf * math.expm1((interval + cost) / mtbf) / interval


@given(st.floats(1e-3, 1e3), st.floats(20, 1e5))
def test_no_other_interval_costs_noticeably_less_than_that_of_young_and_daly(cost: float, ratio: float) -> None:
    mtbf = cost * ratio
    interval = schedule.optimal_interval(cost, mtbf)
    best = min(waste(interval * 1.02**shift, cost, mtbf) for shift in range(-100, 101))
    assert waste(interval, cost, mtbf) <= best * 1.001


def test_where_saves_are_cheap_the_interval_is_that_of_young() -> None:
    assert schedule.optimal_interval(1.0, 1e8) == pytest.approx(math.sqrt(2e8), rel=1e-3)
    assert schedule.optimal_interval(30.0, 10.0) == 10.0


def first_due(policy: Schedule, observed: Observed) -> float:
    """Seconds after the last save at which one is due, found by halving."""
    assert observed.last_save_at is not None
    low, high = 0.0, 1e9
    assert policy.due(1, StoreView(observed.last_save_at + high, (), ()), observed)
    while high - low > 1e-3:
        middle = (low + high) / 2
        if policy.due(1, StoreView(observed.last_save_at + middle, (), ()), observed):
            high = middle
        else:
            low = middle
    return high


def seen(stall: float | None, *, failures: int = 0, trained: float = 0.0) -> Observed:
    return Observed(
        started_at=0.0, last_save_at=1000.0, stall_seconds=stall, failures=failures, trained_seconds=trained
    )


def test_young_daly_goes_by_the_measured_stall_and_the_stated_mtbf_until_failures_are_seen() -> None:
    policy = schedule.YoungDaly(mtbf=3600)
    assert first_due(policy, seen(None)) == pytest.approx(60, abs=0.01)
    assert first_due(policy, seen(2.0)) == pytest.approx(schedule.optimal_interval(2.0, 3600), abs=0.01)
    # Ninety-nine failures in 9000 seconds beside the stated one in 3600: one every 126 seconds.
    assert first_due(policy, seen(2.0, failures=99, trained=9000)) == pytest.approx(
        schedule.optimal_interval(2.0, 126), abs=0.01
    )
    fixed = schedule.YoungDaly(mtbf=3600, observe=False)
    assert first_due(fixed, seen(2.0, failures=99, trained=9000)) == pytest.approx(
        first_due(policy, seen(2.0)), abs=0.01
    )


@given(observations(), st.floats(1, 1e6))
def test_more_failures_or_cheaper_saves_never_make_saves_rarer(observed: Observed, mtbf: float) -> None:
    policy = schedule.YoungDaly(mtbf=mtbf)
    stall = observed.stall_seconds
    assume(stall is not None)
    assert stall is not None
    more = dataclasses.replace(observed, failures=observed.failures + 1)
    estimate = (mtbf + more.trained_seconds) / (1 + more.failures)
    assume(stall < estimate / 2)  # where a failure hits nearly every save, there is no good interval
    assert policy.interval(more) <= policy.interval(observed)
    assert policy.interval(dataclasses.replace(observed, stall_seconds=stall / 2)) <= policy.interval(observed)


def test_young_daly_stays_between_its_bounds() -> None:
    policy = schedule.YoungDaly(mtbf=3600, at_least=20, at_most=40)
    assert first_due(policy, seen(0.001)) == pytest.approx(20, abs=0.01)
    assert first_due(policy, seen(100.0)) == pytest.approx(40, abs=0.01)
    with pytest.raises(Invalid, match="at_most"):
        schedule.YoungDaly(at_least=40, at_most=20)


@given(st.floats(0.1, 50), st.floats(0.001, 100))
def test_saves_take_at_most_the_percentage_of_the_time(percent: float, stall: float) -> None:
    interval = schedule.BoundedOverhead(percent=percent).interval(seen(stall))
    assert 100 * stall / (interval + stall) == pytest.approx(percent)


def test_the_bound_follows_the_measured_stall() -> None:
    policy = schedule.BoundedOverhead(percent=1, first=30, at_least=10)
    assert first_due(policy, seen(None)) == pytest.approx(30, abs=0.01)
    assert first_due(policy, seen(2.0)) == pytest.approx(198, abs=0.01)
    assert first_due(policy, seen(4.0)) == pytest.approx(396, abs=0.01)
    assert first_due(policy, seen(0.01)) == pytest.approx(10, abs=0.01)


@pytest.mark.parametrize("policy", [schedule.YoungDaly(), schedule.BoundedOverhead()])
def test_a_clock_that_was_set_back_does_not_stop_saves(policy: Schedule) -> None:
    assert policy.due(5, store(), Observed(NOW, last_save_at=NOW + 3600, stall_seconds=1.0))
