"""Formulas of checkpointing under failures: best interval, lost work, and productive share of the time.

Times are in seconds. Failures are exponential. ETTR, the effective training time ratio, is productive time
over total time.

Sources: J. W. Young, "A first order approximation to the optimum checkpoint interval", CACM 17(9), 1974;
J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps", FGCS 22(3), 2006.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Risk", "daly", "ettr", "lost_work", "young"]


@dataclass(frozen=True, slots=True)
class Risk:
    """Failures of one kind, and the step that a training resumes from."""

    mtbf: float
    """Of the whole job, by this kind alone; infinite where it does not occur."""
    period: float
    """From one step to the next on the tier that survives, stalls included; infinite where none gets there."""
    lag: float
    """From a save to its commit on that tier."""
    restart: float
    """From the failure to the first new training step: the job's start, and the restore."""


def young(stall: float, mtbf: float) -> float:
    """Young's best training time between two saves, for saves that stall much less than the MTBF."""
    return math.sqrt(2 * stall * mtbf)


def daly(stall: float, mtbf: float) -> float:
    """Daly's best training time between two saves: his higher-order estimate, and the MTBF for longer stalls."""
    if stall >= 2 * mtbf:
        return mtbf
    ratio = math.sqrt(stall / (2 * mtbf))
    return math.sqrt(2 * stall * mtbf) * (1 + ratio / 3 + ratio**2 / 9) - stall


def lost_work(risk: Risk) -> float:
    """Mean time that a failure throws back: to the save of the newest step that survives, or to the start.

    Between failures a step is saved every ``period`` and lies on the surviving tier after ``lag``. A failure at a time
    below the lag loses everything; a later one loses the lag and the elapsed part of the period.
    """
    if math.isinf(risk.mtbf):
        return 0.0
    if math.isinf(risk.period):
        return risk.mtbf
    before_first = risk.mtbf * -math.expm1(-risk.lag / risk.mtbf) - risk.lag * math.exp(-risk.lag / risk.mtbf)
    return before_first + math.exp(-risk.lag / risk.mtbf) * (risk.lag + _within(risk.period, risk.mtbf))


def _within(period: float, mtbf: float) -> float:
    """Mean of an exponential time modulo the period."""
    ratio = period / mtbf
    return 0.0 if not period else mtbf - (period / math.expm1(ratio) if ratio < 700 else 0.0)


def ettr(interval: float, stall: float, risks: Sequence[Risk]) -> float:
    """Expected share of productive time, from 0 to 1.

    For one kind of failure and no lag this is Daly's exact expression, τ / (M·exp(R/M)·(exp((τ+C)/M) - 1)) with the
    interval τ, the stall C, the MTBF M and the restart R. Several kinds are added to first order: no work is assumed to
    be thrown back by two kinds.

    Args:
        interval: training time between two saves.
        stall: time that a save takes from the training.
        risks: one for every kind of failure.
    """
    saving = interval / (interval + stall) if interval + stall else 0.0
    rates = [0.0 if math.isinf(risk.mtbf) else 1 / risk.mtbf for risk in risks]
    total = sum(rates)
    if not total:
        return saving
    kept = 1 - sum(rate * lost_work(risk) for rate, risk in zip(rates, risks, strict=True) if rate)
    # A failure may strike while the job restarts; then the restart begins again.
    down = sum(rate * math.expm1(min(700.0, risk.restart * total)) for rate, risk in zip(rates, risks, strict=True))
    return max(0.0, saving * kept) / (1 + down / total)
