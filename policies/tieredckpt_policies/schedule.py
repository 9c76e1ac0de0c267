"""When a save is due: whenever the trainer asks, by step number, or by time."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from tieredckpt.policy import Observed, Schedule, StoreView
from tieredckpt.units import Duration

__all__ = ["Always", "Every", "EveryNSteps"]


class Always(Schedule):
    """A save is due whenever the trainer asks: its own loop decides."""

    kind: Literal["always"] = "always"

    def due(self, step: int, store: StoreView, observed: Observed) -> bool:
        return True


class EveryNSteps(Schedule):
    """A save is due at every multiple of ``n``, or at the first step asked about after one was passed.

    A trainer that asks at steps 7, 14, 21 … with ``n = 10`` saves 14, 21, 35: one step for each multiple.
    """

    kind: Literal["every_n_steps"] = "every_n_steps"
    n: Annotated[int, Field(strict=True, ge=1)]

    def due(self, step: int, store: StoreView, observed: Observed) -> bool:
        last = observed.last_save_step
        if last is None or step < last:
            last = 0
        return step // self.n > last // self.n


class Every(Schedule):
    """A save is due when ``interval`` (seconds) has passed since the last one, or since the store was opened.

    A clock that was set back makes one due as well: a save too many costs less than hours without one.
    """

    kind: Literal["every"] = "every"
    interval: Annotated[Duration, Field(gt=0)]

    def due(self, step: int, store: StoreView, observed: Observed) -> bool:
        last = observed.started_at if observed.last_save_at is None else observed.last_save_at
        passed = store.now - last
        return passed >= self.interval or passed < 0
