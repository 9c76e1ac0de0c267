"""New memory for the arrays of a step, and whether arrays are what a step's index says."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from tieredckpt.blobs.memory import memory_limit
from tieredckpt.engine.pieces import Form, box_of
from tieredckpt.errors import Corrupt, Invalid
from tieredckpt.format.manifest import StepId, StepIndex
from tieredckpt.units import format_size

__all__ = ["check_targets", "empty_targets"]


def empty_targets(step: StepId, forms: Mapping[str, Form]) -> dict[str, npt.NDArray[Any]]:
    """New arrays of those forms, to be filled from a step.

    Raises:
        Invalid: they are larger than the memory of this process; one chunk may stand for very many.
    """
    nbytes = sum(prod(form.shape) * form.dtype.itemsize for form in forms.values())
    limit, source = memory_limit()
    if nbytes > limit:
        raise Invalid(
            f"the arrays wanted of {step} take {format_size(nbytes)}, and {source} is {format_size(limit)}; "
            f"restore a part of it with keys=, or fill arrays of your own with into="
        )
    try:
        return {name: np.empty(form.shape, form.dtype) for name, form in forms.items()}
    except (MemoryError, ValueError) as error:  # ValueError: more than NumPy can address
        raise Invalid(f"there is no memory for {format_size(nbytes)} of {step}: {error}") from error


def check_targets(index: StepIndex, targets: Mapping[str, npt.NDArray[Any]], tier: str) -> None:
    """Raise `Corrupt` unless the index that ``tier`` gave has every target's array, of its dtype and its shape.

    Boxes of arrays are of their own shape; that they lie inside their arrays shows when they are filled.
    """
    for name, target in targets.items():
        stored = index.arrays.get(name)
        if stored is not None and stored.grid.shape == target.shape and stored.dtype == target.dtype:
            continue
        key, _ = box_of(name, target.shape)
        arrays = [index.arrays[block] for _, block in index.blocks(key)]
        other_size = name == key and sum(prod(array.grid.shape) for array in arrays) != target.size
        other_size = other_size or (name == key and stored is not None and stored.grid.shape != target.shape)
        if not arrays or other_size or any(array.dtype != target.dtype for array in arrays):
            found = "is missing" if not arrays else f"is {arrays[0].dtype} of shape {arrays[0].grid.shape}"
            raise Corrupt(
                f"array {key!r} of {index.record.id} {found} on tier {tier!r}, and {target.dtype} of shape "
                f"{target.shape} on another: they cannot be the same step; restore from one tier alone"
            )
