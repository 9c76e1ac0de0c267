"""What codecs make of a state, and what a tier gains by one at its speed.

The figures are those of a GPT of 10 million parameters in mixed precision with AdamW after 300 steps, on one core of an
AMD EPYC (Zen 5); ``tieredckpt bench codecs`` measures a state of yours.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from tieredckpt.blobs.codecs import Codec

if TYPE_CHECKING:
    from tieredckpt.plan.scenario import Rung, Scenario

__all__ = ["FIGURES", "CodecFigures", "CodecGain", "gains"]


@dataclass(frozen=True, slots=True)
class CodecFigures:
    """A codec on one core."""

    share: float
    """Of a state's bytes that is stored."""
    encode: float
    """Bytes of the state a second."""
    decode: float
    """Bytes of the state a second."""


FIGURES: Final[dict[Codec, CodecFigures]] = {
    "none": CodecFigures(1.0, math.inf, math.inf),
    "fast": CodecFigures(0.846, 2.6e9, 4.5e9),
    "small": CodecFigures(0.809, 1.0e9, 3.2e9),
}


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
    return tuple(_gain(scenario, rung, codec, figures) for rung in slower for codec, figures in FIGURES.items())


def _gain(scenario: Scenario, rung: Rung, codec: Codec, figures: CodecFigures) -> CodecGain:
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
