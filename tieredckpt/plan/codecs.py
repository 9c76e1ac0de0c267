"""What a tier gains by a codec at its speed."""

from __future__ import annotations

import math
from dataclasses import dataclass

from tieredckpt.plan.assumed import CODECS, CodecFigures
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
    """Bytes a second of the tier as a whole; at more than that the codec takes longer than it saves."""


def gains(scenario: Scenario) -> tuple[CodecGain, ...]:
    """Every codec on every tier below RAM."""
    slower = (rung for rung in scenario.rungs if not rung.ram)
    return tuple(_gain(scenario, rung, codec, figures) for rung in slower for codec, figures in CODECS.items())


def _gain(scenario: Scenario, rung: Rung, codec: str, figures: CodecFigures) -> CodecGain:
    nbytes = scenario.added(1)
    encode = figures.encode * rung.config.codec_threads * scenario.nodes
    return CodecGain(
        tier=rung.name,
        codec=codec,
        chosen=codec == rung.config.codec,
        nbytes=math.ceil(nbytes * figures.share),
        cpu_seconds=nbytes / figures.encode,
        seconds=nbytes / min(encode, rung.device / figures.share),
        saves_time_below=encode if math.isfinite(encode) else 0.0,
    )
