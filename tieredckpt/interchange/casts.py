"""Casts floats to 16 bits, block by block: a value becomes the nearest one, of two equally near ones the even one.

Where the native code was built, 32-bit floats are cast at 30 GB/s on one thread, and NumPy's casts serve everything
else, with the same results: to bfloat16 at 9 GB/s, to float16 at 1.6.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any, Final

import ml_dtypes
import numpy as np
import numpy.typing as npt

from tieredckpt.errors import Invalid

__all__ = ["CASTS", "blocks", "cast", "new_memory"]

Array = npt.NDArray[Any]

CASTS: Final[dict[str, np.dtype[Any]]] = {"bf16": np.dtype(ml_dtypes.bfloat16), "fp16": np.dtype(np.float16)}
"""The dtypes that floats are cast to, by their names in options."""

_BLOCK = 1 << 20
"""Items that are cast at a time. Fewer are not faster: after each of these steps the thread waits for its turn of the
GIL, which the engine's threads that read the next piece take many times."""

_native: dict[np.dtype[Any], Callable[[Array, Array], bool]] = {}
try:
    from tieredckpt._native import NARROW_ACCELERATED, narrow_bf16, narrow_fp16
except ImportError:
    pass
else:
    if NARROW_ACCELERATED:
        _native = {CASTS["bf16"]: narrow_bf16, CASTS["fp16"]: narrow_fp16}


def blocks(key: str, piece: Array, dtype: np.dtype[Any], memory: Array) -> Iterator[Array]:
    """A flat piece in that dtype, in little-endian blocks that follow each other, cast into ``memory``.

    Each is free to go once the next one is asked for. Raises `Invalid`, naming the key, for a finite value that the
    dtype cannot have.
    """
    for start in range(0, piece.size, _BLOCK):
        part = piece[start : start + _BLOCK]
        if dtype == part.dtype.newbyteorder("="):
            found = np.ascontiguousarray(part.astype(dtype, copy=False))
        else:
            found = memory[: part.size].view(dtype)
            if not cast(part, found):
                other = "cast to bf16, or not at all" if dtype == CASTS["fp16"] else "export it without a cast"
                raise Invalid(f"array {key!r} has values beyond the largest of {dtype}; {other}")
        yield found if sys.byteorder == "little" else found.byteswap()


def new_memory() -> npt.NDArray[np.uint16]:
    """Memory for `blocks`, for use by one piece after the other: new memory costs more than the cast."""
    return np.empty(_BLOCK, np.uint16)


def cast(array: Array, into: Array) -> bool:
    """Round the items of a flat array to those of ``into``, of a dtype of `CASTS`; whether finite ones stay so."""
    narrow = _native.get(into.dtype)
    fits = array.dtype == np.float32 and array.flags.c_contiguous
    if narrow is not None and fits and narrow(array, into.view(np.uint16)):
        return True
    # Values that are infinite or not numbers become what NumPy makes of them.
    with np.errstate(over="ignore", invalid="ignore"):
        np.copyto(into, array, casting="unsafe")
    exponent = np.uint16(0x7C00 if into.dtype == CASTS["fp16"] else 0x7F80)
    if not array.size or np.bitwise_and(into.view(np.uint16), exponent).max() != exponent:
        return True  # sooner than `numpy.isfinite` tells
    return bool(np.isfinite(into[np.isfinite(array)]).all())
