"""Restores without a copy: the arrays of a step in RAM, seen where they lie."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from tieredckpt.blobs.base import ALIGNMENT
from tieredckpt.blobs.ram import RamStore
from tieredckpt.blobs.slab import aligned
from tieredckpt.blobs.window import Placed, window
from tieredckpt.errors import Invalid
from tieredckpt.format import layout
from tieredckpt.format.manifest import ArrayIndex, StepId
from tieredckpt.format.ocdbt import Extent

__all__ = ["can_view", "view_arrays"]


def can_view(array: ArrayIndex) -> bool:
    """Whether an array can be seen in one piece: its chunks end at page boundaries, or there is one only."""
    return array.grid.size <= 1 or array.grid.cell_nbytes % ALIGNMENT == 0


def view_arrays(
    ram: RamStore, step: StepId, arrays: Mapping[str, ArrayIndex], keys: Sequence[str]
) -> dict[str, npt.NDArray[Any]]:
    """Read-only arrays over the slab. While any of them lives, the step's memory is not reused.

    Raises:
        NotFound: the step was evicted from RAM.
        Invalid: an array for which `can_view` is false.
    """
    fd = ram.share(layout.manifest_key(step.step, step.serial))
    placed: list[Placed] = []
    starts: dict[str, int] = {}
    size = 0
    for key in keys:
        array = arrays[key]
        if not can_view(array):
            os.close(fd)
            raise Invalid(f"array {key!r} of {step} does not lie in whole pages")
        starts[key] = size
        for chunk in array.chunks:
            if isinstance(chunk.where, Extent):
                placed.append(Placed(size, chunk.where.offset, aligned(array.grid.cell_nbytes)))
                size += aligned(array.grid.cell_nbytes)
    memory = window(ram.slab.fileno(), size, placed, lambda: os.close(fd))
    return {key: _seen(arrays[key], memory[starts[key] :]) for key in keys}


def _seen(array: ArrayIndex, memory: npt.NDArray[np.uint8]) -> npt.NDArray[Any]:
    inline = [chunk.where for chunk in array.chunks if isinstance(chunk.where, bytes)]
    if inline:
        memory = np.frombuffer(inline[0], dtype=np.uint8)
    elif not array.chunks:
        memory = np.frombuffer(b"", dtype=np.uint8)
    return memory[: array.grid.nbytes].view(array.dtype).reshape(array.grid.shape)
