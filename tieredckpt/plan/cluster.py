"""Failures of a job's machines: one process for all nodes, as the superposition of their failures is exponential."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from tieredckpt.plan.scenario import Kind

__all__ = ["Failure", "failures", "outages"]


@dataclass(frozen=True, slots=True)
class Failure:
    """One failure that ends the training."""

    at: float
    """Seconds from the start."""
    kind: Kind


def failures(mtbf: Mapping[Kind, float], rng: random.Random) -> Iterator[Failure]:
    """Endless failures, in order; none if the mapping is empty.

    Independent failures of any number of nodes at constant rates are one Poisson process of the sum of the
    rates, so that a job of 131,072 nodes costs no more than one of a single node.
    """
    rates = {kind: 1 / mean for kind, mean in mtbf.items()}
    total, now = sum(rates.values()), 0.0
    while total:
        now += rng.expovariate(total)
        yield Failure(now, rng.choices(list(rates), list(rates.values()))[0])


def outages(mtbf: float, repair: float, rng: random.Random) -> Iterator[tuple[float, float]]:
    """Endless pairs: how long a tier works, and how long it is then away."""
    while math.isfinite(mtbf):
        yield rng.expovariate(1 / mtbf), rng.expovariate(1 / repair)
