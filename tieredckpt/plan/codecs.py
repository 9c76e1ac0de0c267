"""The gain of each codec on a tier, given the tier's speed."""

from __future__ import annotations

import math
from dataclasses import dataclass

from tieredckpt.plan.assumed import CODECS
from tieredckpt.plan.scenario import Rung, Scenario

__all__ = ["CodecGain", "gains"]


@dataclass(frozen=True, slots=True)
class CodecGain:
    """The effect of one codec on one tier."""

    tier: str
    codec: str
    chosen: bool
    """Whether the configuration chooses it."""
    nbytes: int
    """Bytes that a step adds on the tier."""
    cpu_seconds: float
    """Processor time of all nodes to compress one step."""
    seconds: float
    """Time to promote one step."""
    saves_time_below: float
    """Speed of the whole tier, in bytes a second, below which the codec shortens a promotion; 0 if there is none, and
    for a codec that saves nothing."""


def gains(scenario: Scenario) -> tuple[CodecGain, ...]:
    """Every codec on every tier below RAM."""
    slower = (rung for rung in (*scenario.rungs, *scenario.derived) if not rung.ram)
    return tuple(_gain(scenario, rung, codec) for rung in slower for codec in CODECS)


def _gain(scenario: Scenario, rung: Rung, codec: str) -> CodecGain:
    nbytes = scenario.added(1)
    share, core = rung.kept.share(codec), rung.kept.encode(codec)
    plain = rung.kept.share("none")
    encode = core * rung.config.codec_threads * scenario.nodes
    return CodecGain(
        tier=rung.name,
        codec=codec,
        chosen=codec == rung.config.codec,
        nbytes=math.ceil(nbytes * share),
        cpu_seconds=nbytes / core,
        seconds=nbytes / min(encode, rung.device / share) if share else 0.0,
        saves_time_below=encode * plain if share < plain and math.isfinite(encode) else 0.0,
    )
