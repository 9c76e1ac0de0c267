"""Schedules, which say when a save is due: when the trainer asks, by step number, by time, or by costs and failures."""

from __future__ import annotations

import math
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from tieredckpt.policy import Observed, Schedule, StoreView
from tieredckpt.units import Duration

__all__ = ["Always", "BoundedOverhead", "Every", "EveryNSteps", "YoungDaly", "optimal_interval"]

Interval = Annotated[Duration, Field(gt=0)]


class Always(Schedule):
    """A save is due whenever the trainer asks: its own loop decides."""

    kind: Literal["always"] = "always"
    stays_due = True

    def due(self, step: int, store: StoreView, observed: Observed) -> bool:
        return True


class EveryNSteps(Schedule):
    """A save is due at every multiple of ``n``, or at the first step that is asked about after a multiple.

    A trainer that asks at steps 7, 14, 21 … with ``n = 10`` saves 14, 21, 35: one step for each multiple.
    """

    kind: Literal["every_n_steps"] = "every_n_steps"
    stays_due = True
    n: Annotated[int, Field(strict=True, ge=1)]

    def due(self, step: int, store: StoreView, observed: Observed) -> bool:
        last = observed.last_save_step
        if last is None or step < last:
            last = 0
        return step // self.n > last // self.n


class Every(Schedule):
    """A save is due when ``interval`` (seconds) has passed since the last one, or since the store was opened.

    If the clock was set back, a save is due as well: a save too many costs less than hours without one.
    """

    kind: Literal["every"] = "every"
    stays_due = True
    interval: Interval

    def due(self, step: int, store: StoreView, observed: Observed) -> bool:
        return _has_passed(self.interval, store, observed)


class YoungDaly(Schedule):
    """A save is due when the interval has passed that minimizes the time lost to saves and failures together.

    The cost of a save is the measured time that it takes from the trainer. ``mtbf`` (seconds) is the stated mean time
    between failures. It counts like one failure; every failure that the store observes moves the estimate to the
    observed mean. With ``observe = false`` the stated value holds. Until a save was measured, one is due after
    ``first`` seconds; the interval stays between ``at_least`` and ``at_most``.

    J. W. Young, A first order approximation to the optimum checkpoint interval, CACM 17(9), 1974; J. T. Daly, A
    higher order estimate of the optimum checkpoint interval for restart dumps, FGCS 22(3), 2006, equation 37.
    """

    kind: Literal["young_daly"] = "young_daly"
    stays_due = True
    mtbf: Interval = 86400.0
    observe: Annotated[bool, Field(strict=True)] = True
    first: Interval = 60.0
    at_least: Annotated[Duration, Field(ge=0)] = 0.0
    at_most: Interval | None = None

    @model_validator(mode="after")
    def _leaves_an_interval(self) -> Self:
        if self.at_most is not None and self.at_most < self.at_least:
            raise ValueError("`at_most` is less than `at_least`; raise it, or leave it out")
        return self

    def interval(self, observed: Observed) -> float:
        """Seconds from a save to the next, by what was observed."""
        if observed.stall_seconds is None:
            return self.first
        mtbf = self.mtbf
        if self.observe:
            mtbf = (mtbf + observed.trained_seconds) / (1 + observed.failures)
        best = optimal_interval(observed.stall_seconds, mtbf)
        return max(self.at_least, best if self.at_most is None else min(best, self.at_most))

    def due(self, step: int, store: StoreView, observed: Observed) -> bool:
        return _has_passed(self.interval(observed), store, observed)


class BoundedOverhead(Schedule):
    """A save is due when training has paid for it: saves take at most ``percent`` of the time.

    The interval follows the recent mean of what a save takes from the trainer, so it grows when saves become
    slower and shrinks when they become faster. Until one was measured, one is due after ``first`` seconds; the
    interval is never shorter than ``at_least``.

    After J. Mohan, A. Phanishayee, V. Chidambaram, CheckFreq: frequent, fine-grained DNN checkpointing, FAST 2021.
    """

    kind: Literal["bounded_overhead"] = "bounded_overhead"
    stays_due = True
    percent: Annotated[float, Field(gt=0, lt=100)] = 3.5
    first: Interval = 60.0
    at_least: Annotated[Duration, Field(ge=0)] = 0.0

    def interval(self, observed: Observed) -> float:
        """Seconds from a save to the next, by what was observed."""
        if observed.stall_seconds is None:
            return self.first
        return max(self.at_least, observed.stall_seconds * (100 - self.percent) / self.percent)

    def due(self, step: int, store: StoreView, observed: Observed) -> bool:
        return _has_passed(self.interval(observed), store, observed)


def optimal_interval(cost: float, mtbf: float) -> float:
    """Daly's estimate of the training time between two saves of ``cost`` seconds each, with a failure every ``mtbf``.

    To first order it is Young's, the square root of 2 · cost · mtbf. A save that costs at least twice the time between
    failures pays off at no interval, and ``mtbf`` is as good as any.
    """
    if cost >= 2 * mtbf:
        return mtbf
    ratio = cost / (2 * mtbf)
    return math.sqrt(2 * cost * mtbf) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - cost


def _has_passed(interval: float, store: StoreView, observed: Observed) -> bool:
    """Whether ``interval`` has passed since the last save, or the opening; also true if the clock was set back."""
    last = observed.started_at if observed.last_save_at is None else observed.last_save_at
    passed = store.now - last
    return passed >= interval or passed < 0
