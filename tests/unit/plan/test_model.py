"""The formulas agree with their sources and with what they mean."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tieredckpt.plan.model import Risk, daly, ettr, lost_work, young

STALLS = st.floats(0.1, 100)
MTBFS = st.floats(500, 1e6)


def one_tier(interval: float, stall: float, mtbf: float, restart: float) -> float:
    return ettr(interval, stall, [Risk(mtbf, interval + stall, 0.0, restart)])


@given(STALLS, MTBFS, st.floats(0, 300), st.floats(1, 5000))
def test_one_tier_is_dalys_exact_expression(stall: float, mtbf: float, restart: float, interval: float) -> None:
    exact = interval / (mtbf * math.exp(restart / mtbf) * math.expm1((interval + stall) / mtbf))
    assert one_tier(interval, stall, mtbf, restart) == pytest.approx(exact)


@given(STALLS, MTBFS, st.floats(0, 300), st.floats(0.2, 5))
def test_no_interval_is_better_than_dalys_by_more_than_a_hair(
    stall: float, mtbf: float, restart: float, factor: float
) -> None:
    best = one_tier(daly(stall, mtbf), stall, mtbf, restart)
    assert one_tier(daly(stall, mtbf) * factor, stall, mtbf, restart) <= best * 1.005


@given(STALLS, MTBFS)
def test_young_and_daly_agree_where_a_save_is_short(stall: float, mtbf: float) -> None:
    if stall < mtbf / 1000:
        assert young(stall, mtbf) == pytest.approx(daly(stall, mtbf), rel=0.05)


def test_a_save_that_takes_longer_than_failures_allow_is_made_once_in_an_mtbf() -> None:
    assert daly(300.0, 100.0) == 100.0


@pytest.mark.parametrize(("period", "lag"), [(100, 0), (100, 30), (100, 250), (3000, 700), (1, 1)])
def test_lost_work_is_what_failures_at_random_times_throw_back(period: float, lag: float) -> None:
    rng = random.Random(1)
    mtbf, lost, count = 1000.0, 0.0, 100_000
    for _ in range(count):
        at = rng.expovariate(1 / mtbf)
        lost += at if at < lag else lag + (at - lag) % period
    assert lost_work(Risk(mtbf, period, lag, 0.0)) == pytest.approx(lost / count, rel=0.02)


def test_what_never_fails_loses_nothing_and_what_is_never_saved_loses_all() -> None:
    assert lost_work(Risk(math.inf, 100, 10, 0)) == 0
    assert lost_work(Risk(500, math.inf, 0, 0)) == 500
    assert ettr(90, 10, []) == pytest.approx(0.9)
    assert ettr(90, 10, [Risk(500, math.inf, 0, 0)]) == 0


@given(STALLS, MTBFS, st.floats(1, 5000))
def test_ettr_is_a_share_and_more_risk_makes_it_no_larger(stall: float, mtbf: float, interval: float) -> None:
    risk = Risk(mtbf, interval + stall, 5.0, 60.0)
    one, two = ettr(interval, stall, [risk]), ettr(interval, stall, [risk, risk])
    assert 0 <= two <= one <= 1
