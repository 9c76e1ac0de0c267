"""The frozen views that policies see: steps (of `steps`), tiers, the store, and what a trainer has observed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from tieredckpt.policy.steps import Age, StepView, StepViews

__all__ = ["Observed", "StepView", "StepViews", "StoreView", "TierView"]


@dataclass(frozen=True, slots=True)
class TierView:
    """One tier, as it is when the policy is asked."""

    name: str
    index: int
    """0 is the nearest."""
    survives: Literal["process", "node", "site"]
    capacity: int | None
    """Bytes; None where no bound is known."""
    used: int
    """Bytes."""
    write_bandwidth: float | None
    """Bytes a second seen lately; None before the first write."""
    healthy: bool
    promoting: bool = False
    """A promotion to this tier is under way."""


@dataclass(frozen=True, slots=True)
class StoreView:
    """The whole store, as it is when the policy is asked."""

    now: float
    """Seconds since the epoch."""
    steps: Sequence[StepView]
    """Every step that some tier holds, ascending by serial."""
    tiers: tuple[TierView, ...]
    """Nearest first."""
    signals: frozenset[str] = frozenset()
    """Signals that the trainer has raised with ``store.signal`` and not withdrawn, such as ``"preempt"``."""

    def find(self, step: Age) -> StepView | None:
        """The step of that serial and number, as of a `StepId`; None if no tier holds it."""
        if isinstance(self.steps, StepViews):
            return self.steps.find(step)
        return next((seen for seen in self.steps if (seen.serial, seen.step) == step), None)

    def on(self, tier: str) -> Sequence[StepView]:
        """The steps that the tier of this name holds, off-branch ones included, ascending by serial.

        Compares equal to a tuple of them; each view is made when it is looked at.
        """
        if isinstance(self.steps, StepViews):
            return self.steps.on(tier)
        return tuple(step for step in self.steps if tier in step.tiers)

    def line_on(self, tier: str) -> Sequence[StepView]:
        """The steps that the tier holds and that are not off-branch, as `on` gives them."""
        if isinstance(self.steps, StepViews):
            return self.steps.on(tier, line=True)
        return tuple(step for step in self.steps if step.on_line and tier in step.tiers)

    def serials_on(self, tier: str) -> frozenset[int]:
        """The serials of the steps that `on` gives; cheaper."""
        if isinstance(self.steps, StepViews):
            return self.steps.serials_on(tier)
        return frozenset(step.serial for step in self.steps if tier in step.tiers)

    def with_copy(self, step: StepView, tier: str) -> StoreView:
        """The store as it would be if the tier of this name held one of its steps too."""
        copy = replace(step, tiers=tuple(each.name for each in self.tiers if each.name in (tier, *step.tiers)))
        if isinstance(self.steps, StepViews):
            return replace(self, steps=self.steps.changed(copy))
        return replace(self, steps=tuple(copy if seen.serial == step.serial else seen for seen in self.steps))

    @property
    def newest(self) -> StepView | None:
        """The newest step that is not off-branch, which a restore would take."""
        return next((step for step in reversed(self.steps) if step.on_line), None)


@dataclass(frozen=True, slots=True)
class Observed:
    """Observations of the trainer's process about its own saves, and about the trainers before it; for schedules."""

    started_at: float
    """When the store was opened, in seconds since the epoch."""
    last_save_step: int | None = None
    """The step that the next save follows: the one saved last, or the newest of the branch before the first save of
    this process; where that save would fork, the restored step."""
    last_save_at: float | None = None
    """Seconds since the epoch; None before this process's first save."""
    save_count: int = 0
    """Saves of this process."""
    stall_seconds: float | None = None
    """Time that a save takes from the trainer, a recent mean; None before the first save."""
    step_seconds: float | None = None
    """Time of one training step without saves, a recent mean; None before two steps were seen."""
    promotion_seconds: float | None = None
    """From a save to its commit on the slowest tier that works, a recent mean; None before the first."""
    failures: int = 0
    """Trainers of this store that ended without closing it, as far as is known."""
    trained_seconds: float = 0.0
    """How long this store's trainers have run, this one included."""
    stalled_seconds: float = 0.0
    """Training time that saves of earlier trainers took."""
    lost_seconds: float = 0.0
    """Training since the last save of each trainer that died, as far as is known."""

    @property
    def ettr(self) -> float | None:
        """Effective training time ratio so far: the share of the time that was neither stalled nor lost.

        Waiting for a restart and restoring happen outside of what a store can measure, and are left out. None
        before any time was trained.
        """
        if self.trained_seconds <= 0:
            return None
        return max(0.0, 1 - (self.stalled_seconds + self.lost_seconds) / self.trained_seconds)
