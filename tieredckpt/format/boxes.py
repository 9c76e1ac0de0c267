"""Boxes: axis-aligned parts of an array, and whether some of them tile it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["Box", "Boxes", "tile"]

_MOST_NUMBERS = 1 << 23
"""Most coordinates held at once; boxes with a larger outline come from no real cut of an array."""


class Box(NamedTuple):
    """The items of an array at ``offset`` and as many along each axis as ``shape`` says."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @staticmethod
    def whole(shape: tuple[int, ...]) -> Box:
        """The box that is all of an array of ``shape``."""
        return Box((0,) * len(shape), shape)

    @property
    def end(self) -> tuple[int, ...]:
        """The first index behind the box, along each axis."""
        return tuple([start + size for start, size in zip(self.offset, self.shape, strict=True)])

    @property
    def size(self) -> int:
        """Number of items; 1 for a box without axes."""
        return prod(self.shape)

    def contains(self, other: Box) -> bool:
        """Whether every item of ``other`` is in this box; an empty box lies where its offset and end do."""
        if not len(self.offset) == len(other.offset) == len(other.shape):
            return False
        for a, n, b, m in zip(self.offset, self.shape, other.offset, other.shape, strict=True):
            if b < a or b + m > a + n:
                return False
        return True

    def intersection(self, other: Box) -> Box | None:
        """The items that both have, None when there are none."""
        offset = tuple([max(a, b) for a, b in zip(self.offset, other.offset, strict=True)])
        shape = tuple([min(a, b) - o for a, b, o in zip(self.end, other.end, offset, strict=True)])
        return Box(offset, shape) if min(shape, default=1) > 0 else None

    def within(self, outer: Box) -> Box:
        """This box as seen from the start of ``outer``."""
        return Box(tuple([a - b for a, b in zip(self.offset, outer.offset, strict=True)]), self.shape)

    def slices(self) -> tuple[slice, ...]:
        """Slices that index the array."""
        return tuple([slice(start, start + size) for start, size in zip(self.offset, self.shape, strict=True)])


class Boxes:
    """Boxes of one array, with a fast search for those that overlap a given box."""

    def __init__(self, boxes: Sequence[Box]) -> None:
        self._starts = np.array([box.offset for box in boxes], np.int64)
        self._ends = np.array([box.end for box in boxes], np.int64)

    def meeting(self, box: Box) -> list[int]:
        """Positions of the boxes that share an item with ``box``, ascending."""
        if not len(self._starts):
            return []
        shared = np.minimum(self._ends, box.end) > np.maximum(self._starts, box.offset)
        found: list[int] = np.flatnonzero(shared.all(axis=-1)).tolist()
        return found


def tile(shape: tuple[int, ...], boxes: Iterable[Box]) -> bool:
    """Whether ``boxes`` cover an array of ``shape`` and no item twice; boxes without items do not count.

    Thousands of boxes cost milliseconds. An array without items is tiled by any empty boxes in it.
    """
    everything = Box.whole(shape)
    found = list(boxes)
    if not all(map(everything.contains, found)):
        return False
    found = [box for box in found if box.size]
    if sum(box.size for box in found) != everything.size:
        return False
    if len(found) <= 1:
        return True
    return _cover(shape, found)


def _cover(shape: tuple[int, ...], boxes: list[Box]) -> bool:
    """Whether the boxes' indicator functions add up to that of the whole.

    They do exactly when their differences along every axis do, since only the zero function has none. Such a
    difference turns an interval into its two ends with opposite signs, and the ends of neighbours cancel: a
    mesh of boxes shrinks to its outline axis by axis.
    """
    starts = np.array([box.offset for box in boxes], np.int64)
    bounds = np.stack([starts, starts + np.array([box.shape for box in boxes], np.int64)], axis=2)
    whole = np.stack([np.zeros(len(shape), np.int64), np.array(shape, np.int64)], axis=1)
    bounds = np.concatenate([bounds, whole[None]])
    weights = np.ones(len(bounds), np.int64)
    weights[-1] = -1
    for axis in range(len(shape)):
        if 2 * bounds.size > _MOST_NUMBERS:
            return False
        low, high = bounds.copy(), bounds.copy()
        low[:, axis, 1] = low[:, axis, 0]
        high[:, axis, 0] = high[:, axis, 1]
        bounds, weights = _add_up(np.concatenate([low, high]), np.concatenate([weights, -weights]))
    return not weights.size


def _add_up(bounds: NDArray[np.int64], weights: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Join equal rows and add their weights; drop rows whose weights add up to zero."""
    if not len(bounds):
        return bounds, weights
    columns = bounds.reshape(len(bounds), -1)
    order = np.lexsort(columns.T)
    columns, weights = columns[order], weights[order]
    first = np.concatenate([[True], (columns[1:] != columns[:-1]).any(axis=1)])
    sums = np.add.reduceat(weights, np.flatnonzero(first))
    kept = sums != 0
    return columns[first][kept].reshape(-1, *bounds.shape[1:]), sums[kept]
