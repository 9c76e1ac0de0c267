"""The frozen views that policies see: steps, tiers, the store, and what a trainer has observed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, overload

__all__ = ["Observed", "StepView", "StepViews", "StoreView", "TierView"]


@dataclass(frozen=True, slots=True)
class StepView:
    """One saved step, as it is when the policy is asked."""

    step: int
    """The trainer's number; after a rollback it may occur again under a higher serial."""
    serial: int
    """The number of the save in the store's life; unique."""
    saved_at: float
    """Seconds since the epoch."""
    age: float
    """Seconds from ``saved_at`` to ``StoreView.now``."""
    nbytes: int
    """Bytes of all its arrays, before chunks are shared with other steps."""
    metrics: Mapping[str, float]
    tiers: tuple[str, ...]
    """Names of the tiers that hold it committed."""
    on_line: bool = True
    """False for a step off the branch: an earlier step was restored, and a save has forked there."""
    replicas: int = 1
    """On how many nodes the nearest tier has it: RAM with ``replicas`` outlives the loss of all but one of them."""


class StepViews(Sequence[StepView]):
    """The steps of a store as they are at one time, each made when somebody looks at it.

    A policy that looks at the newest of ten thousand steps does not pay for all of them.

    Args:
        steps: ascending by serial; their ages do not count, nor their replicas where ``replicas`` tells.
        now: when they are looked at, in seconds since the epoch.
        replicas: by serial, of the steps that more than one node has.
    """

    __slots__ = ("_made", "_now", "_replicas", "_steps")

    def __init__(self, steps: tuple[StepView, ...], now: float, replicas: Mapping[int, int]) -> None:
        self._steps, self._now, self._replicas = steps, now, replicas
        self._made: dict[int, StepView] = {}

    def _at(self, place: int) -> StepView:
        found = self._made.get(place)
        if found is None:
            step = self._steps[place]
            found = self._made[place] = StepView(
                step.step,
                step.serial,
                step.saved_at,
                max(0.0, self._now - step.saved_at),
                step.nbytes,
                step.metrics,
                step.tiers,
                step.on_line,
                self._replicas.get(step.serial, 1),
            )
        return found

    @overload
    def __getitem__(self, place: int) -> StepView: ...

    @overload
    def __getitem__(self, place: slice) -> tuple[StepView, ...]: ...

    def __getitem__(self, place: int | slice) -> StepView | tuple[StepView, ...]:
        places = range(len(self._steps))
        if isinstance(place, slice):
            return tuple(map(self._at, places[place]))
        return self._at(places[place])

    def __len__(self) -> int:
        return len(self._steps)

    def __iter__(self) -> Iterator[StepView]:
        return map(self._at, range(len(self._steps)))

    def __reversed__(self) -> Iterator[StepView]:
        return map(self._at, reversed(range(len(self._steps))))

    def __eq__(self, other: object) -> bool:
        return tuple(self) == tuple(other) if isinstance(other, (StepViews, tuple)) else NotImplemented

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(tuple(self))

    def serials_on(self, tier: str) -> frozenset[int]:
        """The serials of the steps that a tier holds."""
        return frozenset([step.serial for step in self._steps if tier in step.tiers])

    def on(self, tier: str, *, line: bool = False) -> tuple[StepView, ...]:
        """The steps that a tier holds; with ``line`` only those that are not off-branch."""
        steps = enumerate(self._steps)
        return tuple([self._at(i) for i, step in steps if tier in step.tiers and (step.on_line or not line)])


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

    def on(self, tier: str) -> tuple[StepView, ...]:
        """The steps that the tier of this name holds, off-branch ones included, ascending by serial."""
        if isinstance(self.steps, StepViews):
            return self.steps.on(tier)
        return tuple(step for step in self.steps if tier in step.tiers)

    def line_on(self, tier: str) -> tuple[StepView, ...]:
        """The steps that the tier holds and that are not off-branch, ascending by serial."""
        if isinstance(self.steps, StepViews):
            return self.steps.on(tier, line=True)
        return tuple(step for step in self.steps if step.on_line and tier in step.tiers)

    def serials_on(self, tier: str) -> frozenset[int]:
        """The serials of what `on` gives, for less."""
        if isinstance(self.steps, StepViews):
            return self.steps.serials_on(tier)
        return frozenset(step.serial for step in self.steps if tier in step.tiers)

    @property
    def newest(self) -> StepView | None:
        """The newest step that is not off-branch: what a restore would take."""
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
