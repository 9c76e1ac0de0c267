"""Counters of a simulation, and its final figures."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

__all__ = ["CollectiveRestores", "Figures", "Ledger", "Phase", "TierFigures"]

Phase = Literal["train", "stall", "restart", "restore"]
"""Activity of the job: it trains, waits for a save, for its trainers to run again, or for its state."""


@dataclass(frozen=True, slots=True)
class TierFigures:
    """One tier over the time of a simulation."""

    peak: int
    """Bytes, over all nodes."""
    mean: int
    """Bytes."""
    written: int
    """Bytes."""
    promoted: int
    """Steps."""
    evicted: int
    """Steps."""


@dataclass(frozen=True, slots=True)
class CollectiveRestores:
    """Restores from one tier."""

    count: int
    mean: float
    """Seconds of reading."""
    longest: float


@dataclass(frozen=True, slots=True)
class Figures:
    """Result of a simulated training. Times are in seconds; the five parts of the total sum up to it."""

    ettr: float
    total: float
    productive: float
    lost: float
    """Trained time that failures threw back."""
    stalls: float
    restarts: float
    restoring: float
    failures: Mapping[str, int]
    from_nothing: int
    """Failures after which no step was left."""
    lost_mean: float
    """Mean lost time of one failure."""
    lost_most: float
    saves: int
    skipped: int
    interval: float
    """Mean time between saves while the job trained."""
    restores: Mapping[str, CollectiveRestores]
    tiers: Mapping[str, TierFigures]
    fill: Mapping[str, list[tuple[float, int]]] = field(default_factory=dict)
    """Time and bytes, by tier."""


@dataclass(eq=False)
class Ledger:
    """Counts while a simulation runs."""

    spent: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Seconds, by phase."""
    failures: Counter[str] = field(default_factory=Counter)
    from_nothing: int = 0
    losses: list[float] = field(default_factory=list)
    saves: int = 0
    skipped: int = 0
    reads: dict[str, list[float]] = field(default_factory=dict)
    written: Counter[str] = field(default_factory=Counter)
    promoted: Counter[str] = field(default_factory=Counter)
    evicted: Counter[str] = field(default_factory=Counter)
    fill: dict[str, list[tuple[float, int]]] = field(default_factory=dict)

    def close(self, total: float, tiers: tuple[str, ...]) -> Figures:
        """The figures of ``total`` seconds."""
        lost = sum(self.losses)
        productive = self.spent["train"] - lost
        return Figures(
            ettr=productive / total,
            total=total,
            productive=productive,
            lost=lost,
            stalls=self.spent["stall"],
            restarts=self.spent["restart"],
            restoring=self.spent["restore"],
            failures=dict(self.failures),
            from_nothing=self.from_nothing,
            lost_mean=lost / len(self.losses) if self.losses else 0.0,
            lost_most=max(self.losses, default=0.0),
            saves=self.saves,
            skipped=self.skipped,
            interval=self.spent["train"] / self.saves if self.saves else self.spent["train"],
            restores={
                name: CollectiveRestores(len(seconds), sum(seconds) / len(seconds), max(seconds))
                for name, seconds in self.reads.items()
            },
            tiers={name: self._tier(name) for name in tiers},
            fill=self.fill,
        )

    def _tier(self, name: str) -> TierFigures:
        seen = [nbytes for _, nbytes in self.fill.get(name, ())]
        return TierFigures(
            peak=max(seen, default=0),
            mean=round(sum(seen) / len(seen)) if seen else 0,
            written=self.written[name],
            promoted=self.promoted[name],
            evicted=self.evicted[name],
        )
