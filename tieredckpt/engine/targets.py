"""New memory for the arrays of a step, and whether arrays are what a step's index says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from tieredckpt.blobs.memory import memory_limit
from tieredckpt.errors import Corrupt, Invalid
from tieredckpt.format.manifest import StepIndex
from tieredckpt.units import format_size

__all__ = ["check_targets", "empty_targets"]


def empty_targets(index: StepIndex, keys: Sequence[str]) -> dict[str, npt.NDArray[Any]]:
    """New arrays for the given keys of a step.

    Raises:
        Corrupt: the index has no such array, though the record of another tier has.
        Invalid: they are larger than the memory of this process; one chunk may stand for very many.
    """
    if missing := [key for key in keys if key not in index.arrays]:
        raise Corrupt(f"{index.record.id}: array {missing[0]!r} is in its record on one tier, and not in its index")
    nbytes = sum(index.arrays[key].grid.nbytes for key in keys)
    limit, source = memory_limit()
    if nbytes > limit:
        raise Invalid(
            f"the arrays wanted of {index.record.id} take {format_size(nbytes)}, and {source} is {format_size(limit)}; "
            f"restore a part of it with keys=, or fill arrays of your own with into="
        )
    try:
        return {key: np.empty(index.arrays[key].grid.shape, index.arrays[key].dtype) for key in keys}
    except (MemoryError, ValueError) as error:  # ValueError: more than NumPy can address
        raise Invalid(f"there is no memory for {format_size(nbytes)} of {index.record.id}: {error}") from error


def check_targets(index: StepIndex, targets: Mapping[str, npt.NDArray[Any]], tier: str) -> None:
    """Raise `Corrupt` unless every target has the shape and dtype of the array in the index that ``tier`` gave."""
    for key, target in targets.items():
        array = index.arrays.get(key)
        if array is None or array.grid.shape != target.shape or array.dtype != target.dtype:
            found = "is missing" if array is None else f"is {array.dtype} of shape {array.grid.shape}"
            raise Corrupt(
                f"array {key!r} of {index.record.id} {found} on tier {tier!r}, and {target.dtype} of shape "
                f"{target.shape} on another: they cannot be the same step; restore from one tier alone"
            )
