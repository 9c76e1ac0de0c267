"""New memory for the arrays of a step, and whether arrays can hold what a step's index says."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from itertools import pairwise
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from tieredckpt.blobs.memory import memory_limit
from tieredckpt.engine.restoring.pieces import Form, box_of
from tieredckpt.errors import Corrupt, Invalid
from tieredckpt.format.boxes import Boxes
from tieredckpt.format.manifest import StepId, StepIndex
from tieredckpt.units import format_size

__all__ = ["check_memory", "check_targets", "empty_targets"]


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


def check_memory(index: StepIndex, targets: Mapping[str, npt.NDArray[Any]]) -> None:
    """Raise `Invalid` if two targets share memory, unless it is all of both and the step has the same bytes for them.

    Tied arrays may be given where they were equal when they were saved. The targets are C-contiguous.
    """
    if all(array.flags.owndata for array in targets.values()) and len({*map(id, targets.values())}) == len(targets):
        return
    by_address = sorted((array.ctypes.data, name) for name, array in targets.items() if array.nbytes)
    for (start, one), (other_start, other) in pairwise(by_address):
        array, another = targets[one], targets[other]
        if other_start >= start + array.nbytes:
            continue
        same = other_start == start and (array.shape, array.dtype) == (another.shape, another.dtype)
        if not same or _content(index, one, array) != _content(index, other, another):
            raise Invalid(
                f"`into`: {_shown(one, array)} and {_shown(other, another)} share memory, and {index.record.id} has "
                f"not the same for both, so that one would overwrite the other; give each memory of its own, or use "
                f"`like`"
            )


def _content(index: StepIndex, name: str, target: npt.NDArray[Any]) -> Hashable:
    """What tells the bytes that the step has for a target: the blocks of its array that it meets, and their digests."""
    key, box = box_of(name, target.shape)
    blocks = index.blocks(key)
    meeting = [blocks[place] for place in Boxes([block for block, _ in blocks]).meeting(box)]
    arrays = [(block.within(box), index.arrays[stored]) for block, stored in meeting]
    return tuple((block, array.grid, tuple(chunk.digest for chunk in array.chunks)) for block, array in arrays)


def _shown(name: str, target: npt.NDArray[Any]) -> str:
    key, box = box_of(name, target.shape)
    return f"leaf {key!r}" if key == name else f"the piece of leaf {key!r} at {list(box.offset)}"
