"""What a tier gains by a codec at its speed."""

from __future__ import annotations

import math
from dataclasses import dataclass

from tieredckpt.plan.assumed import CODECS, ROUNDING, CodecFigures, lossy_share
from tieredckpt.plan.scenario import Rung, Scenario, kept_bits

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
    slower = (rung for rung in (*scenario.rungs, *scenario.derived) if not rung.ram)
    return tuple(_gain(scenario, rung, codec, figures) for rung in slower for codec, figures in CODECS.items())


def _gain(scenario: Scenario, rung: Rung, codec: str, figures: CodecFigures) -> CodecGain:
    nbytes = scenario.added(1)
    share, core = figures.share, figures.encode
    if (bits := kept_bits(rung.config)) is not None:
        share, core = lossy_share(codec, bits), 1 / (1 / figures.encode + 1 / ROUNDING)
    encode = core * rung.config.codec_threads * scenario.nodes
    return CodecGain(
        tier=rung.name,
        codec=codec,
        chosen=codec == rung.config.codec,
        nbytes=math.ceil(nbytes * share),
        cpu_seconds=nbytes / core,
        seconds=nbytes / min(encode, rung.device / share),
        saves_time_below=encode if math.isfinite(encode) else 0.0,
    )
