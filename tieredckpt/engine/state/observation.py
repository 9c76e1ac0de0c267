"""Observations that schedules see: saves, promotions, failures and signals."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tieredckpt.engine.state.branch import Branch, Origin
from tieredckpt.engine.state.failures import FailureHistory
from tieredckpt.engine.tier.tier import Tier
from tieredckpt.errors import Invalid
from tieredckpt.format.manifest import StepRecord
from tieredckpt.policy.base import Observed

__all__ = ["Observation", "blend"]


@dataclass
class Observation:
    """What was observed of saves, promotions and failures. Changed on the engine's loop, except for `signals`."""

    now: Callable[[], float] = time.time
    """Seconds since the epoch."""
    observed: Observed = field(init=False)
    history: FailureHistory = field(default_factory=FailureHistory)
    """Failures of the trainers before this one."""
    signals: set[str] = field(default_factory=set)
    """Signals that the trainer has raised; changed from its thread, or from a signal handler there."""
    promotions_ended: int = 0
    """How many promotions have ended, without those that failed on a tier that had failed before."""
    saving: dict[int, tuple[float, Origin | None]] = field(default_factory=dict)
    """Steps whose save has returned and is still being made (not by ``capture="copy"``): since when, and what was
    restored last before."""

    def __post_init__(self) -> None:
        self.observed = Observed(started_at=self.now())

    def signal(self, name: str, *, on: bool) -> None:
        """Raise or withdraw a signal that policies see; from any thread or signal handler.

        A lock could wait for the code that a handler has interrupted, so these are one step each. Raises `Invalid`
        for what is no name.
        """
        if not isinstance(name, str) or not name:
            raise Invalid(f"a signal is a name such as 'preempt', not {name!r}")
        (self.signals.add if on else self.signals.discard)(name)

    def observe_save(self, step: int, saved_at: float, seconds: float) -> None:
        """Learn from a save that has just been made, for which the trainer waited so many seconds."""
        before = self.observed
        step_seconds = before.step_seconds
        if before.last_save_step is not None and before.last_save_at is not None and step > before.last_save_step:
            trained = saved_at - before.last_save_at - seconds
            if trained > 0:  # the clock was not set back
                step_seconds = blend(step_seconds, trained / (step - before.last_save_step))
        self.observed = dataclasses.replace(
            before,
            last_save_step=step,
            last_save_at=saved_at,
            save_count=before.save_count + 1,
            stall_seconds=blend(before.stall_seconds, seconds),
            stalled_seconds=before.stalled_seconds + seconds,
            step_seconds=step_seconds,
        )

    def count_save(self, step: int) -> None:
        """Count a step that was not saved as saved now: schedules then see the same as on ranks that have saved it."""
        self.observed = dataclasses.replace(self.observed, last_save_step=step, last_save_at=self.now())

    def observe_promotion(self, step: StepRecord, tier: Tier) -> float:
        """Learn how long after its save a step was committed, just now, on a slower tier; returns these seconds.

        Steps of earlier trainers do not count: the tier is not the cause of their delay.
        """
        seconds = max(0.0, self.now() - step.saved_at)
        if step.saved_at >= self.observed.started_at:
            tier.steps.promotion_seconds = blend(tier.steps.promotion_seconds, seconds)
        return seconds

    def observe(self, step: int | None, branch: Branch, tiers: Sequence[Tier]) -> Observed:
        """The observations that schedules see, when one is asked about ``step``."""
        observed = self.observed
        at = observed.last_save_at
        last, newest = observed.last_save_step, branch.newest
        if last is None and newest is not None:
            last = newest.step
        if step is not None and (restored := branch.due_from(step)) is not None:
            last = restored
        for saving, (since, origin) in tuple(self.saving.items()):  # at once: asked from the trainer's thread
            last, at = saving if origin is branch.origin else last, since
        known = (tier.steps.promotion_seconds for tier in tiers if tier.healthy)
        seen = [seconds for seconds in known if seconds is not None]
        return dataclasses.replace(
            observed,
            last_save_step=last,
            last_save_at=at,
            promotion_seconds=seen[-1] if seen else None,
            failures=self.history.failures,
            trained_seconds=self.history.trained_seconds + max(0.0, self.now() - observed.started_at),
            stalled_seconds=self.history.stalled_seconds + observed.stalled_seconds,
            lost_seconds=self.history.lost_seconds,
        )


def blend(mean: float | None, value: float) -> float:
    """A recent mean with one more value, or its first: the last three weigh two thirds."""
    return value if mean is None else 0.7 * mean + 0.3 * value
