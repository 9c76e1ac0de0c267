"""The share of a state that a tier's lossy rules keep: from the arrays of a step, or from assumptions."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tieredckpt.config import TierConfig
from tieredckpt.engine.inventory import ArrayInfo
from tieredckpt.engine.restoring.rules import as_recorded, first_rules, rounding_of
from tieredckpt.format.manifest import INLINE_MAX
from tieredckpt.format.rounding import Bound
from tieredckpt.format.zarr import dtype_from_name
from tieredckpt.plan.assumed import CODECS, DROPPED, MAGNITUDE, ROUNDING, lossy_share, rounded_share

__all__ = ["EXACT", "Kept", "kept_by"]


@dataclass(frozen=True, slots=True)
class Kept:
    """Shares of the bytes of a state, which are 1 together."""

    exact: float = 0.0
    rounded: Mapping[tuple[int, int], float] | None = None
    """By kept bits of the mantissa, and bits of a value; the latter are 0 for a whole state in mixed precision."""
    dropped: float = 0.0

    def share(self, codec: str) -> float:
        """Share of the state's bytes that is stored."""
        found = self.exact * CODECS[codec].share
        for (bits, of), part in (self.rounded or {}).items():
            found += part * (rounded_share(codec, bits, of) if of else lossy_share(codec, bits))
        return found

    def encode(self, codec: str) -> float:
        """Bytes of the state a second that one core rounds and compresses."""
        rounded = sum((self.rounded or {}).values())
        seconds = (self.exact + rounded) / CODECS[codec].encode + rounded / ROUNDING
        return 1 / seconds if seconds else math.inf


EXACT = Kept(exact=1.0)
"""The result for a tier without rules."""


def kept_by(tier: TierConfig, arrays: Sequence[ArrayInfo] | None = None) -> Kept:
    """Shares that a tier's rules keep of a step with these arrays, or of an unknown state if there are none.

    For an unknown state, the strictest bound of the tier counts for everything that is not dropped, and ``drop`` means
    `DROPPED`.
    """
    if not tier.lossy:
        return EXACT
    if arrays and sum(array.nbytes for array in arrays):
        return _of_arrays(tier, arrays)
    bounds = [rule.bound for rule in as_recorded(tier.lossy)]
    bits = max((_bits(bound) for bound in bounds if bound is not None), default=None)
    dropped = DROPPED if any(rule.drop for rule in tier.lossy) else 0.0
    left = 1 - dropped
    return Kept(left, None, dropped) if bits is None else Kept(0.0, {(bits, 0): left}, dropped)


def _of_arrays(tier: TierConfig, arrays: Sequence[ArrayInfo]) -> Kept:
    rules, total = as_recorded(tier.lossy), sum(array.nbytes for array in arrays)
    first = first_rules(rules, [array.key for array in arrays])
    rounded: Counter[tuple[int, int]] = Counter()
    dropped = 0
    for array in arrays:
        if (number := first.get(array.key)) is None:
            continue
        dtype = dtype_from_name(array.dtype)
        if rules[number].drop:
            dropped += array.nbytes
        elif array.nbytes > INLINE_MAX:
            bound = rounding_of(rules[number], array.key, len(array.shape), dtype)
            if bound is not None:
                rounded[_bits(bound), 8 * dtype.itemsize] += array.nbytes
    exact = total - dropped - sum(rounded.values())
    return Kept(exact / total, {of: nbytes / total for of, nbytes in rounded.items()}, dropped / total)


def _bits(bound: Bound) -> int:
    """Mantissa bits that a bound keeps; for an absolute bound, those of values of the size `MAGNITUDE`."""
    return max(0, math.ceil(math.log2(MAGNITUDE / bound.most)) - 1) if bound.absolute else bound.kept_bits
