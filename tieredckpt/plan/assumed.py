"""Default assumptions of a plan or a simulation, and their sources.

The figures of machines are from one published training, so that they fit each other: A. Grattafiori et al., "The Llama
3 Herd of Models", 2024, arXiv:2407.21783, section 3.3. It ran on 16,384 GPUs, eight per node, had 419 unexpected
interruptions in 54 days, and stored up to 4 GB of state per GPU on a file system that took 2 TB/s.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

__all__ = [
    "CODECS",
    "COPY_OF_A_NODE",
    "DROPPED",
    "MAGNITUDE",
    "MEDIUM_OF_A_NODE",
    "NETWORK_OF_A_NODE",
    "NODE_MTBF",
    "ROUNDING",
    "SHARED_AT_MOST",
    "SHARED_BY_A_NODE",
    "SOURCE",
    "STATE_OF_A_NODE",
    "Assumption",
    "CodecFigures",
    "lossy_share",
    "rounded_share",
]

SOURCE = "Llama 3, arXiv:2407.21783"

NODE_MTBF = 54 * 86400 * 2048 / 419
"""Seconds, 264 days."""

STATE_OF_A_NODE = 8 * 4 * 10**9
"""Bytes."""

COPY_OF_A_NODE, MEDIUM_OF_A_NODE, NETWORK_OF_A_NODE = 5e9, 2e9, 10e9
"""Bytes a second that one node copies in memory, writes to its own medium, and sends."""

SHARED_BY_A_NODE, SHARED_AT_MOST = 1e9, 2e12
"""Bytes a second of a file system or object store that all nodes use: 1 GB/s for each node, 2 TB/s for all."""


@dataclass(frozen=True, slots=True)
class CodecFigures:
    """Figures of a codec on one core."""

    share: float
    """Share of a state's bytes that is stored."""
    encode: float
    """Bytes of the state a second, compressed, decompressed and compared."""
    decode: float
    """Bytes of the state a second."""


CODECS: Final = {
    "none": CodecFigures(1.0, math.inf, math.inf),
    "fast": CodecFigures(0.850, 1.2e9, 3.3e9),
    "small": CodecFigures(0.814, 0.6e9, 2.8e9),
}
"""Of a GPT of 10 million parameters in mixed precision with AdamW after 100 steps, in processor time of one of two
virtual cores of an AMD EPYC (Zen 5); `docs/explanation/performance-log.md` has the runs."""

ROUNDING = 0.7e9
"""Bytes of the state a second that one core rounds for a lossy tier: once for the digests and once for the writes."""

_EXPONENTS = {"fast": 4.9, "small": 3.7}
"""Bits to which a codec compresses sign and exponent of a value; the kept bits of the mantissa come on top."""
_WEIGHTS_16 = 10.9
"""Bits of a compressed bfloat16 weight."""


def lossy_share(codec: str, kept_bits: int) -> float:
    """The share of a state's bytes that a tier stores if it keeps so many bits of every mantissa.

    This holds for a state in mixed precision: 16-bit weights, and weights and two moments in 32 bits. Without a codec
    the zeros at the ends of mantissas take as many bytes as before.
    """
    share = CODECS[codec].share
    if codec not in _EXPONENTS:
        return share
    bits = kept_bits + _EXPONENTS[codec]
    return min(share, (3 * bits + min(bits, _WEIGHTS_16)) / 112)


def rounded_share(codec: str, kept_bits: int, of: int) -> float:
    """As `lossy_share`, for values of so many bits."""
    share = CODECS[codec].share
    return share if codec not in _EXPONENTS else min(share, (kept_bits + _EXPONENTS[codec]) / of)


MAGNITUDE = 0.02
"""Assumed size of values under an absolute bound: that of weights of transformers. Adam's moments are smaller, and take
fewer bits."""

DROPPED = 8 / 14
"""Share of such a state that a rule with ``drop`` drops if its arrays are unknown: the two moments."""


@dataclass(frozen=True, slots=True)
class Assumption:
    """An input that was not given."""

    what: str
    value: str
    why: str
