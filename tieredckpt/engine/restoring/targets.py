"""Makes memory for the arrays of a step, and checks whether given arrays can hold what a step's index says."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from itertools import pairwise
from math import prod
from operator import attrgetter
from typing import Any

import numpy as np
import numpy.typing as npt

from tieredckpt.blobs.memory import memory_limit
from tieredckpt.devices.base import Device, Event, Stream
from tieredckpt.engine.restoring.pieces import Form, Target, box_of
from tieredckpt.errors import Corrupt, Invalid
from tieredckpt.format.boxes import Boxes
from tieredckpt.format.manifest import StepId, StepIndex
from tieredckpt.tree.arrays import device_view
from tieredckpt.tree.device_target import DeviceTarget, Filled
from tieredckpt.tree.leaf import ArrayLeaf
from tieredckpt.units import format_size

__all__ = ["check_memory", "check_targets", "empty_targets", "given_on_device", "new_on_device"]

_OWNS = attrgetter("flags.owndata")


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


def given_on_device(leaf: ArrayLeaf, ready: Mapping[Device, Event]) -> DeviceTarget | None:
    """Device memory of a leaf, to be filled once that is ``ready``; None for a leaf on the host.

    Raises `Invalid` for an array in which several items share memory.
    """
    if (found := device_view(leaf)) is None:
        return None
    target = DeviceTarget(*found, leaf.shape, leaf.dtype, ready.get(found[0]))
    name, low, high = target.span
    if high - low < target.nbytes:
        raise Invalid(
            f"leaf {leaf.key!r}: items of it share memory of {name}, as in an expanded tensor, and cannot be restored "
            f"into; use `like`"
        )
    return target


def new_on_device(leaf: ArrayLeaf, streams: Mapping[Device, Stream]) -> DeviceTarget:
    """New memory of the form of a leaf, on the leaf's device. Raises `DeviceUnavailable`.

    It belongs to the trainer's stream, one of ``streams``, like memory that the trainer allocates itself.
    """
    found = device_view(leaf)
    assert found is not None, "it lies on a device"
    device, view = found
    stream = streams.get(device)
    array = device.empty(view, stream)
    # What had the memory before may still be used by what that stream has to do.
    return DeviceTarget(device, array, leaf.shape, leaf.dtype, None if stream is None else stream.record())


def check_targets(index: StepIndex, targets: Mapping[str, Target], tier: str) -> None:
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


def check_memory(index: StepIndex, targets: Mapping[str, Filled]) -> None:
    """Raise `Invalid` if two targets share memory, unless they are the same memory and the step has equal bytes.

    Tied arrays may be given where they were equal when they were saved. The targets are C-contiguous.
    """
    owned = {*map(type, targets.values())} <= {np.ndarray} and all(map(_OWNS, targets.values()))
    if owned and len({*map(id, targets.values())}) == len(targets):
        return
    by_address = sorted((*_span(array), name) for name, array in targets.items() if array.nbytes)
    for (where, start, end, one), (other_where, other_start, _, other) in pairwise(by_address):
        array, another = targets[one], targets[other]
        if other_where != where or other_start >= end:
            continue
        same = other_start == start and (array.shape, array.dtype) == (another.shape, another.dtype)
        if not same or _content(index, one, array) != _content(index, other, another):
            raise Invalid(
                f"`into`: {_shown(one, array)} and {_shown(other, another)} share memory, and {index.record.id} has "
                f"not the same for both, so that one would overwrite the other; give each memory of its own, or use "
                f"`like`"
            )


def _span(target: Filled) -> tuple[str, int, int]:
    """The memory that a target lies in, and its first and last address there."""
    if isinstance(target, DeviceTarget):
        return target.span
    return "", target.ctypes.data, target.ctypes.data + target.nbytes


def _content(index: StepIndex, name: str, target: Filled) -> Hashable:
    """Identify the bytes that the step has for a target: the blocks of its array that overlap it, and their digests."""
    key, box = box_of(name, target.shape)
    blocks = index.blocks(key)
    meeting = [blocks[place] for place in Boxes([block for block, _ in blocks]).meeting(box)]
    arrays = [(block.within(box), index.arrays[stored]) for block, stored in meeting]
    return tuple((block, array.grid, tuple(chunk.digest for chunk in array.chunks)) for block, array in arrays)


def _shown(name: str, target: Filled) -> str:
    key, box = box_of(name, target.shape)
    return f"leaf {key!r}" if key == name else f"the piece of leaf {key!r} at {list(box.offset)}"
