"""What a tier gains by a codec at its speed."""

from __future__ import annotations

import math
from dataclasses import dataclass

from tieredckpt.plan.assumed import CODECS
from tieredckpt.plan.scenario import Rung, Scenario

__all__ = ["CodecGain", "gains"]


@dataclass(frozen=True, slots=True)
class CodecGain:
    """What one codec does for one tier."""

    tier: str
    codec: str
    chosen: bool
    """The configuration says so."""
    nbytes: int
    """That a step adds on the tier."""
    cpu_seconds: float
    """Of all nodes, to compress one step."""
    seconds: float
    """To promote one step."""
    saves_time_below: float
    """Bytes a second of the tier as a whole, below which a promotion takes less time than without a codec; 0 for none,
    and for a codec that saves nothing."""


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
