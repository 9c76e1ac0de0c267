"""Draws a simulation: ETTR against the interval, and the tiers' fill over time."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from pathlib import Path

from tieredckpt._picture import picture
from tieredckpt.errors import Invalid
from tieredckpt.plan.figures import Figures
from tieredckpt.plan.forecast import forecast
from tieredckpt.plan.scenario import Scenario
from tieredckpt.plan.simulate import simulate
from tieredckpt.policy.base import Schedule, parse
from tieredckpt.units import format_duration

__all__ = ["POINTS", "Point", "at_interval", "draw", "sweep"]

_FACTORS = (0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 4.0, 8.0)
"""Factors of the best interval by formula."""

POINTS = len(_FACTORS)
"""Points of a sweep."""

_GB = 1e9


@dataclasses.dataclass(frozen=True, slots=True)
class Point:
    """Result of one interval."""

    interval: float
    """Seconds of training between two saves."""
    simulated: float
    """ETTR."""
    expected: float
    """ETTR by formula."""


def at_interval(scenario: Scenario, interval: float) -> Scenario:
    """The same with a schedule that saves every ``interval`` seconds."""
    schedule = parse(Schedule, {"kind": "every", "interval": interval})
    return dataclasses.replace(scenario, config=scenario.config.model_copy(update={"schedule": schedule}))


def sweep(
    scenario: Scenario, seconds: float, *, seed: int = 0, progress: Callable[[float], object] = float
) -> list[Point]:
    """Simulate intervals around the best one, for ``seconds`` each, with the failures of the same seed."""
    if math.isinf(scenario.job_mtbf):
        raise Invalid("without failures no interval is the best one; say how often the job fails, with --mtbf")
    best = forecast(scenario).daly
    points = []
    for factor in _FACTORS:
        changed = at_interval(scenario, max(scenario.step_seconds, best * factor))
        found = forecast(changed)
        points.append(Point(found.interval, simulate(changed, seconds, seed=seed, progress=progress).ettr, found.ettr))
    return sorted(points, key=lambda point: point.interval)


def draw(path: Path, figures: Figures, points: Sequence[Point]) -> None:
    """Draw ``figures`` and the points of a sweep into an SVG or PNG file; equal arguments give equal files."""
    with picture(path, width=9, height=3.6, columns=2) as (left, right):
        left.plot([point.interval for point in points], [point.simulated for point in points], "o", label="simulated")
        left.plot([point.interval for point in points], [point.expected for point in points], "-", label="by formula")
        left.set_xscale("log")
        left.set_xticks([point.interval for point in points])
        left.set_xticklabels([format_duration(point.interval) for point in points], rotation=45, ha="right")
        left.minorticks_off()
        left.set_xlabel("training time between two saves")
        left.set_ylabel("ETTR")
        left.legend()
        left.grid(alpha=0.3)
        for name, fill in figures.fill.items():
            right.step([at / 3600 for at, _ in fill], [nbytes / _GB for _, nbytes in fill], where="post", label=name)
        right.set_xlabel("hours")
        right.set_ylabel("GB on the tier, all nodes")
        right.set_ylim(bottom=0)
        right.legend()
        right.grid(alpha=0.3)
