"""Roll out the policies of a configuration without failures: how often they save, and which steps reach each tier."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from tieredckpt.errors import Invalid
from tieredckpt.format.manifest import StepId, StepRecord
from tieredckpt.plan.actions import Action
from tieredckpt.plan.scenario import Scenario
from tieredckpt.plan.tiers import WorldTier
from tieredckpt.plan.world import World

__all__ = ["Pace", "TierPace", "pace"]

_ENOUGH = 8
"""Arrivals on the slowest tier after which the pace is known."""

_ASKED_AT_MOST = 30_000
"""Training steps that are rolled out; tiers with fewer arrivals by then are reported as they are."""

_HELD_AT_MOST, _QUESTIONS_AT_MOST = 2_000, 100_000
"""Steps on one tier, and questions whether one is due, that end the rollout: a tier that still fills up then is
reported as growing."""


@dataclass(frozen=True, slots=True)
class TierPace:
    """How steps come to one tier."""

    name: str
    period: float
    """Mean seconds between the saves of steps that come here; infinite where none came."""
    lag: float
    """Mean seconds from a save to its commit here."""
    steps: int
    """Most steps held here."""
    growing: bool
    """Whether its steps grew up to the end, so that later there are more than these."""
    nbytes: int
    """Most bytes that they took."""
    written: float
    """Bytes a second."""


@dataclass(frozen=True, slots=True)
class Pace:
    """Saves of a training without failures."""

    interval: float
    """Mean training time between two saves; infinite where the schedule never wanted one."""
    stall: float
    """Mean seconds that a save took from the training, waiting for room included."""
    skipped: int
    """Saves for which there was no room."""
    seconds: float
    """Time that was rolled out."""
    tiers: tuple[TierPace, ...]


@dataclass(slots=True)
class _Way:
    """A promotion under way."""

    tier: WorldTier
    source: WorldTier
    step: StepId
    record: StepRecord
    ends: float
    nbytes: int


class _Rollout:
    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.now = 0.0
        self.skips = 0
        self.world = World(scenario, lambda: self.now, self._tell)
        self.saves: list[tuple[float, float]] = []
        self.arrivals: dict[str, list[tuple[float, float]]] = {tier.name: [] for tier in self.world.rungs}
        self.most = dict.fromkeys(self.arrivals, 0)
        self.most_since = dict.fromkeys(self.arrivals, 0)
        """Number of arrivals after which a tier first held its most steps."""
        self.written = dict.fromkeys(self.arrivals, 0)
        self.ways: list[_Way] = []

    def _tell(self, action: Action) -> None:
        self.skips += action.what == "skipped"

    def advance(self, until: float) -> None:
        """Run promotions up to a time."""
        while self.ways and (first := min(self.ways, key=lambda way: way.ends)).ends <= until:
            self.now = max(self.now, first.ends)
            self.ways.remove(first)
            first.source.steps.readers.pop(first.step, None)
            first.tier.busy = False
            self.written[first.tier.name] += first.nbytes
            self.world.promoted(first.step, first.record, first.tier, first.tier.rung.write)
            self.arrived(first.tier, first.record.saved_at)
            self.begin()
        self.now = until

    def arrived(self, tier: WorldTier, saved_at: float) -> None:
        self.arrivals[tier.name].append((saved_at, self.now - saved_at))
        if len(tier.steps.held) > self.most[tier.name]:
            self.most[tier.name] = len(tier.steps.held)
            self.most_since[tier.name] = len(self.arrivals[tier.name])

    def begin(self) -> None:
        world = self.world
        for tier in world.rungs:
            step = None if tier.busy else world.next_due(tier)
            source = world.source(step) if step is not None else None
            if step is None or source is None or not world.make_room(tier, step):
                continue
            nbytes = self.scenario.added(len(tier.steps.held))
            rate = min(tier.rung.write, math.inf if source.rung.ram else source.rung.read)
            tier.busy = True
            source.steps.readers[step] = 1
            self.ways.append(_Way(tier, source, step, source.steps.held[step].record, self.now + nbytes / rate, nbytes))
            world.touched()

    def save(self, step: int) -> None:
        world, begin = self.world, self.now
        tier = world.save_tiers()[0]
        while not world.make_room(tier):
            if self.scenario.config.when_full == "wait" and self.ways and world.waiting_helps(tier):
                self.advance(min(way.ends for way in self.ways))
            elif self.scenario.config.when_full == "skip" or not world.replace_oldest(tier):
                world.skipped(step, tier)
                return
        nbytes = self.scenario.state if tier.rung.ram else self.scenario.added(len(tier.steps.held))
        self.advance(self.now + nbytes / tier.rung.write)
        world.saved(step, tier, self.now - begin)
        self.written[tier.name] += nbytes
        self.arrived(tier, self.now)
        self.saves.append((begin, self.now))
        self.begin()

    def grows(self, name: str) -> bool:
        """Whether the tier filled up until lately: in the second half of its arrivals."""
        return self.most_since[name] > 1 and 2 * self.most_since[name] > len(self.arrivals[name])

    def enough(self) -> bool:
        """Whether the pace and the long-run size of each tier are known."""
        if max(self.most.values()) >= _HELD_AT_MOST or self.world.asked > _QUESTIONS_AT_MOST:
            return True
        return all(len(arrivals) >= _ENOUGH and not self.grows(name) for name, arrivals in self.arrivals.items())


def pace(scenario: Scenario) -> Pace:
    """Ask the configuration's own policies, training step by training step, on tiers that never fail.

    Raises `Invalid` when no tier can take a save.
    """
    rollout = _Rollout(scenario)
    if not rollout.world.save_tiers():
        raise Invalid("no tier can take a save: RAM is smaller than the state, and there is no other tier")
    for step in range(1, _ASKED_AT_MOST + 1):
        rollout.advance(rollout.now + scenario.step_seconds)
        if rollout.world.due(step):
            rollout.save(step)
            if rollout.enough():
                break
    saves = rollout.saves
    stalls = [end - begin for begin, end in saves]
    between = [later[0] - earlier[1] for earlier, later in itertools.pairwise(saves)]
    return Pace(
        interval=_mean(between, saves[0][0] if saves else math.inf),
        stall=_mean(stalls, scenario.stall()),
        skipped=rollout.skips,
        seconds=rollout.now,
        tiers=tuple(
            TierPace(
                name=tier.name,
                period=_period(rollout.arrivals[tier.name], rollout.now),
                lag=_mean([lag for _, lag in rollout.arrivals[tier.name]], 0.0),
                steps=rollout.most[tier.name],
                growing=rollout.grows(tier.name),
                nbytes=scenario.used(rollout.most[tier.name], tier.rung.share),
                written=rollout.written[tier.name] / rollout.now,
            )
            for tier in rollout.world.rungs
        ),
    )


def _period(arrivals: Sequence[tuple[float, float]], seconds: float) -> float:
    saved = sorted(at for at, _ in arrivals)
    if len(saved) < 2:
        return seconds if saved else math.inf
    return (saved[-1] - saved[0]) / (len(saved) - 1)


def _mean(values: Sequence[float], without: float) -> float:
    return sum(values) / len(values) if values else without
