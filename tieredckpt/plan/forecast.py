"""The figures of `tieredckpt plan`: what a configuration costs, keeps and loses, from its pace and the formulas."""

from __future__ import annotations

import math
from dataclasses import dataclass

from tieredckpt.plan.model import Risk, daly, ettr, lost_work, young
from tieredckpt.plan.pace import Pace, TierPace, pace
from tieredckpt.plan.scenario import KINDS, Kind, Rung, Scenario

__all__ = ["Forecast", "Loss", "TierForecast", "forecast"]


@dataclass(frozen=True, slots=True)
class TierForecast:
    """One tier in the long run."""

    name: str
    survives: str
    period: float
    lag: float
    steps: int
    """Most steps held here; for a ``growing`` tier, up to the end of the rollout."""
    growing: bool
    nbytes: int
    capacity: int | None
    rate: float
    """Bytes a second that it writes."""
    assumed: bool
    """Whether its speed is assumed."""
    busy: float
    """Share of the time for which it is written to."""
    restore: float
    """Seconds to read the state from it."""


@dataclass(frozen=True, slots=True)
class Loss:
    """What one kind of failure costs."""

    kind: Kind
    mtbf: float
    tier: str | None
    """The tier that the training resumes from; None if nothing survives."""
    mean: float
    """Mean seconds of training that are thrown back."""
    worst: float
    restart: float
    """Seconds until training goes on from there."""


@dataclass(frozen=True, slots=True)
class Forecast:
    """What to expect of a scenario."""

    interval: float
    stall: float
    overhead: float
    """Share of the time that saves take, failures apart."""
    skipped: int
    tiers: tuple[TierForecast, ...]
    losses: tuple[Loss, ...]
    mtbf: float
    ettr: float
    young: float
    """Young's best interval for this stall and MTBF."""
    daly: float
    saved_by_dedupe: float
    """Share of the bytes that a second save does not write."""
    seconds: float
    """Seconds of training that were rolled out."""


def forecast(scenario: Scenario) -> Forecast:
    """Roll out the policies, and apply the formulas to the pace. Raises `Invalid` when no tier can take a save."""
    seen = pace(scenario)
    found = [_loss(scenario, seen, kind) for kind in KINDS]
    risks = [risk for loss, risk in found if math.isfinite(loss.mtbf)]
    return Forecast(
        interval=seen.interval,
        stall=seen.stall,
        overhead=seen.stall / (seen.interval + seen.stall) if math.isfinite(seen.interval) else 0.0,
        skipped=seen.skipped,
        tiers=tuple(_tier(scenario, rung, of) for rung, of in zip(scenario.rungs, seen.tiers, strict=True)),
        losses=tuple(loss for loss, _ in found),
        mtbf=scenario.job_mtbf,
        ettr=ettr(seen.interval, seen.stall, risks) if math.isfinite(seen.interval) else 0.0,
        young=young(seen.stall, scenario.job_mtbf),
        daly=daly(seen.stall, scenario.job_mtbf),
        saved_by_dedupe=1 - scenario.changed,
        seconds=seen.seconds,
    )


def _tier(scenario: Scenario, rung: Rung, seen: TierPace) -> TierForecast:
    return TierForecast(
        name=rung.name,
        survives=rung.survives.name.lower(),
        period=seen.period,
        lag=seen.lag,
        steps=seen.steps,
        growing=seen.growing,
        nbytes=seen.nbytes,
        capacity=rung.capacity,
        rate=rung.device,
        assumed=rung.assumed,
        busy=min(1.0, seen.written / rung.write),
        restore=scenario.state / rung.read,
    )


def _loss(scenario: Scenario, seen: Pace, kind: Kind) -> tuple[Loss, Risk]:
    """The loss by a kind of failure, and its risk for the formulas."""
    mtbf = scenario.mtbf.get(kind, math.inf)
    at = mtbf if math.isfinite(mtbf) else scenario.job_mtbf
    if math.isinf(at):
        at = max(seen.seconds, scenario.step_seconds)
    surviving = [
        (_returning(scenario, at, rung, of, kind), rung)
        for rung, of in zip(scenario.rungs, seen.tiers, strict=True)
        if scenario.survives(rung, kind) and math.isfinite(of.period)
    ]
    if not surviving:
        risk = Risk(mtbf, math.inf, 0.0, scenario.restart)
        return Loss(kind, mtbf, None, math.inf, math.inf, scenario.restart), risk
    risk, rung = min(surviving, key=lambda each: lost_work(each[0]) + each[0].restart)
    return Loss(kind, mtbf, rung.name, lost_work(risk), risk.period + risk.lag, risk.restart), risk


def _returning(scenario: Scenario, mtbf: float, rung: Rung, seen: TierPace, kind: Kind) -> Risk:
    lag = seen.lag
    if kind == "node" and rung.survives < KINDS[kind]:
        lag += scenario.copied_after(rung) or 0.0
    return Risk(mtbf, seen.period, lag, scenario.restart + scenario.state / rung.read)
