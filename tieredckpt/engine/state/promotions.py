"""Counts the promotions under way on a tier, and reports each one that has ended."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from tieredckpt.engine.state.state import State
from tieredckpt.engine.tier.tier import Tier
from tieredckpt.events import StepPromoted
from tieredckpt.format.manifest import StepRecord

__all__ = ["promoting", "report_promoted"]


@contextmanager
def promoting(state: State, tier: Tier) -> Iterator[None]:
    """Show policies a promotion to the tier while the block runs."""
    tier.steps.promotions += 1
    try:
        yield
        state.observation.promotions_ended += 1
    except BaseException:
        if tier.health.error is None:  # a tier that keeps failing would otherwise end promotions without limit
            state.observation.promotions_ended += 1
        raise
    finally:
        tier.steps.promotions -= 1
        state.changed.notify()


def report_promoted(
    state: State, record: StepRecord, tier: Tier, written: int, begin: float, *, again: bool = False
) -> None:
    """Emit `StepPromoted` for a step that was committed on a slower tier, and observe how long that took.

    ``written`` counts the bytes of packs that this process wrote for it; ``begin`` is when the work began, on the
    monotonic clock; ``again`` says that the tier had the step before.
    """
    lag = 0.0 if again else state.observation.observe_promotion(record, tier)
    seconds = time.monotonic() - begin
    state.events.emit(StepPromoted(record.step, record.serial, tier.name, record.nbytes, written, seconds, lag))
    state.changed.notify()
