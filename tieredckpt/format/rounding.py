"""Rounds floating-point values in place, to fewer mantissa bits or to multiples of a power of two; proves the bound.

The dtype stays, so every reader opens rounded values; a codec then stores the zeros at the end of each mantissa in next
to nothing. Rounding rounded values again changes nothing. Rounding is to the nearest, ties to even.

These values stay as they are: NaN, infinities, zeros, values that would round to infinity, and, for a relative bound,
subnormal numbers, which have fewer bits than the bound needs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from tieredckpt.errors import Invalid

__all__ = ["LEAST_ABSOLUTE", "MOST_ABSOLUTE", "MOST_RELATIVE", "Bound", "can_round", "round_values"]

LEAST_ABSOLUTE: Final = 2.0**-99
MOST_ABSOLUTE: Final = 2.0**99
"""The range of absolute bounds: within it, multiples of a power of two are exact in every dtype."""

MOST_RELATIVE: Final = 0.5
"""The largest relative bound: no bit of the mantissa is kept."""

_BLOCK = 1 << 16
"""Values at a time, so that they and intermediate results stay in the L2 cache."""

_Bits = NDArray[Any]


class _Float(NamedTuple):
    """The bit layout of a dtype."""

    bits: np.dtype[Any]
    """Unsigned integers of its size."""
    mantissa: int
    """Bits behind the exponent."""
    exponents: int
    """The exponent of infinities and NaN, in its place."""
    wide: np.dtype[Any]
    """The dtype in which absolute errors are computed, exactly."""


_F16, _F32, _F64 = np.dtype("<f2"), np.dtype("<f4"), np.dtype("<f8")
_BF16 = np.dtype(ml_dtypes.bfloat16)
_FLOATS: Final = {
    _F16: _Float(np.dtype("<u2"), 10, 0x7C00, _F32),
    _BF16: _Float(np.dtype("<u2"), 7, 0x7F80, _F32),
    _F32: _Float(np.dtype("<u4"), 23, 0x7F800000, _F32),
    _F64: _Float(np.dtype("<u8"), 52, 0x7FF0000000000000, _F64),
}


@dataclass(frozen=True, slots=True)
class Bound:
    """The largest allowed error of a rounded value."""

    most: float
    """At most 0.5 if it is relative, between 2^-99 and 2^99 if it is absolute; above 0."""
    absolute: bool = False

    def __post_init__(self) -> None:
        least, most = (LEAST_ABSOLUTE, MOST_ABSOLUTE) if self.absolute else (0.0, MOST_RELATIVE)
        if not (least <= self.most <= most and self.most > 0):
            kind = "an absolute" if self.absolute else "a relative"
            raise Invalid(f"{self.most!r} is not {kind} bound: it is to be above 0, and from {least:g} to {most:g}")

    @property
    def kept_bits(self) -> int:
        """Bits of the mantissa that a relative bound needs."""
        return -math.frexp(self.most)[1]  # exact, which a logarithm is not

    @property
    def unit(self) -> float:
        """The power of two whose multiples keep to an absolute bound."""
        return math.ldexp(1.0, math.frexp(2 * self.most)[1] - 1)


def can_round(dtype: np.dtype[Any]) -> bool:
    """Whether values of a dtype are rounded: little-endian float16, bfloat16, float32 and float64."""
    return dtype in _FLOATS


def round_values(memory: NDArray[np.uint8], dtype: np.dtype[Any], bound: Bound) -> float | None:
    """Round the values of ``dtype`` in ``memory`` in place.

    The error of every value is computed from the written value, and compared with the bound.

    Returns:
        The largest error, absolute or relative as the bound is, a relative one rounded up by less than the bound
        itself; None if some value is outside of the bound, which no known input causes; then the content of ``memory``
        is useless.
    """
    layout = _FLOATS[dtype]
    if not bound.absolute and bound.kept_bits >= layout.mantissa:
        return 0.0
    values = memory.view(layout.bits)
    # One for all blocks, as fresh memory costs more than what is computed in it.
    first, second = np.empty((2, min(_BLOCK, values.size)), layout.bits)
    worst = 0.0
    with np.errstate(all="ignore"):
        for begin in range(0, values.size, _BLOCK):
            block = values[begin : begin + _BLOCK]
            if bound.absolute:
                rounded = _to_multiples(block, dtype, layout, bound)
                error = _absolute_error(block, rounded, dtype, layout)
            else:
                rounded, spare = first[: block.size], second[: block.size]
                _to_bits(block, layout, bound, rounded, spare)
                error = _relative_error(block, rounded, layout, spare)
            if not error <= bound.most:  # also for NaN
                return None
            worst = max(worst, error)
            block[:] = rounded
    return worst


def _to_bits(block: _Bits, layout: _Float, bound: Bound, rounded: _Bits, spare: _Bits) -> None:
    """Values with fewer mantissa bits."""
    word = layout.bits.type
    cut = layout.mantissa - bound.kept_bits
    np.right_shift(block, word(cut), out=rounded)
    rounded &= word(1)  # so that a tie goes to the even neighbour
    rounded += word((1 << (cut - 1)) - 1)
    rounded += block
    rounded &= word((1 << (8 * layout.bits.itemsize)) - (1 << cut))
    top, least = word(layout.exponents), word(1 << layout.mantissa)
    np.bitwise_and(block, top, out=spare)
    spare -= least  # wraps below it, so that one comparison finds both ends
    kept = spare >= top - least
    np.bitwise_and(rounded, top, out=spare)
    kept |= spare == top
    _restore(rounded, block, kept)


def _relative_error(block: _Bits, rounded: _Bits, layout: _Float, spare: _Bits) -> float:
    """An upper bound of the largest relative error, at most twice it: units in the last place, of a mantissa of 1.

    The distance of two values of equal sign, in these units, is that of their bits, since rounding goes at most to the
    very beginning of the next power of two. Two values of unequal signs would be more units apart than any bound
    allows.
    """
    apart = np.subtract(rounded, block, out=spare).view(f"i{layout.bits.itemsize}")
    return math.ldexp(max(int(apart.max()), -int(apart.min())), -layout.mantissa)


def _to_multiples(block: _Bits, dtype: np.dtype[Any], layout: _Float, bound: Bound) -> _Bits:
    """The values as multiples of `Bound.unit`."""
    unit = layout.wide.type(bound.unit)
    values = _wide(block, dtype, layout)
    values *= layout.wide.type(1.0) / unit
    np.rint(values, out=values)
    values *= unit
    rounded = _narrow(values, dtype, layout)
    top = layout.bits.type(layout.exponents)
    _restore(rounded, block, (rounded & top) == top)  # values that are not finite, or would not be
    return rounded


def _absolute_error(block: _Bits, rounded: _Bits, dtype: np.dtype[Any], layout: _Float) -> float:
    """The largest absolute error. The differences are exact: a value is close to zero, or to its rounded value."""
    error = _wide(rounded, dtype, layout)
    error -= _wide(block, dtype, layout)
    np.abs(error, out=error)
    same = rounded == block
    error[same] = 0.0  # infinities and NaN have no error
    return float(error.max())


def _restore(rounded: _Bits, block: _Bits, kept: NDArray[np.bool_]) -> None:
    """Restore the bits of values that stay as they are."""
    if kept.any():
        np.copyto(rounded, block, where=kept)


def _wide(block: _Bits, dtype: np.dtype[Any], layout: _Float) -> NDArray[Any]:
    """Copies of the values in the dtype for errors, exactly."""
    if dtype == _BF16:
        return (block.astype(np.uint32) << np.uint32(16)).view(_F32)
    return block.view(dtype).astype(layout.wide)


def _narrow(values: NDArray[Any], dtype: np.dtype[Any], layout: _Float) -> _Bits:
    """The bits of values that are exact in their dtype."""
    if dtype == _BF16:
        return (values.view(np.uint32) >> np.uint32(16)).astype(np.uint16)
    return values.astype(dtype, copy=False).view(layout.bits)
