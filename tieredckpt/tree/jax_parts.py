"""Read jax arrays that have no view on the host, part by part, and without a copy that jax caches.

jax caches what `numpy.asarray` copies of an array for as long as the array lives. For a state on devices, or with
shards on several, the cache would be a second copy of the whole state in host memory.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
import numpy.typing as npt

from tieredckpt.tree.leaf import ArrayLeaf

__all__ = ["Parts", "parts"]

_HOST = ("pinned_host", "unpinned_host")
"""Kinds of memory of which NumPy has a view, whatever device they are of."""

_Offset = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Parts:
    """An array, or the part of one that a leaf is, to be read by its boxes."""

    offset: _Offset
    """Of the leaf in the array."""
    shards: Sequence[tuple[_Offset, jax.Array]]
    """The shards without further replicas: the offset of each in the array, and its data on one device."""
    _whole: dict[_Offset, npt.NDArray[Any]] = field(default_factory=dict)
    """Copies on the host of shards whose device has no memory for a box of them."""
    _guards_whole: threading.Lock = field(default_factory=threading.Lock)

    def read(self, box: tuple[slice, ...]) -> npt.NDArray[Any]:
        """A box of the leaf: a view where one shard on the host has it, else a copy. Raises as jax does."""
        starts = [part.start + start for part, start in zip(box, self.offset, strict=True)]
        ends = [part.stop + start for part, start in zip(box, self.offset, strict=True)]
        found: npt.NDArray[Any] | None = None
        for offset, data in self.shards:
            lows = list(map(max, starts, offset))
            highs = [min(end, start + size) for end, start, size in zip(ends, offset, data.shape, strict=True)]
            if any(low >= high for low, high in zip(lows, highs, strict=True)):
                continue
            here = self._host(offset, data, _less(lows, offset), _less(highs, lows))
            if (lows, highs) == (starts, ends):
                return here
            if found is None:
                found = np.empty(_less(ends, starts), here.dtype)
            found[tuple(map(slice, _less(lows, starts), _less(highs, starts)))] = here
        assert found is not None, "the shards are all of the array"
        return found

    def _host(self, offset: _Offset, data: jax.Array, starts: Sequence[int], sizes: Sequence[int]) -> npt.NDArray[Any]:
        """A box of the shard at ``offset``."""
        box = tuple(slice(start, start + size) for start, size in zip(starts, sizes, strict=True))
        if _is_here(data):
            view: npt.NDArray[Any] = np.asarray(data)
            return view[box]
        if tuple(sizes) == data.shape:
            return _copied(data)
        if offset not in self._whole:
            try:
                return np.asarray(_slice(data, starts, sizes))
            except RuntimeError as error:
                if "RESOURCE_EXHAUSTED" not in str(error):
                    raise
        with self._guards_whole:  # one copy serves all boxes
            if offset not in self._whole:
                self._whole[offset] = _copied(data)
        return self._whole[offset][box]


def parts(leaf: ArrayLeaf) -> Parts | None:
    """How to read the array of a leaf; None where jax has a view of it, or it was donated or deleted."""
    array: Any = leaf.source
    if array.is_deleted() or (len(array.sharding.device_set) == 1 and _is_here(array)):
        return None
    shards: dict[_Offset, jax.Array] = {}
    for shard in array.addressable_shards:
        shards.setdefault(tuple(index.start or 0 for index in shard.index), shard.data)
    if len(shards) == 1 and all(map(_is_here, shards.values())):
        return None
    inner = leaf.part or ()
    starts = [part.start or 0 for part in inner] + [0] * (len(array.shape) - len(inner))
    return Parts(tuple(starts), [*shards.items()])


def _copied(data: jax.Array) -> npt.NDArray[Any]:
    # jax caches the copy in this other array over the same memory, and so frees it with that array.
    other: Any = jax.make_array_from_single_device_arrays(data.shape, data.sharding, [data])
    return np.asarray(other)


def _slice(data: jax.Array, starts: Sequence[int], sizes: Sequence[int]) -> jax.Array:
    """A box of an array of one device, on that device."""
    if max(starts) > np.iinfo(np.int32).max:  # to which jax may cut the starts of a dynamic slice
        return jax.lax.slice(data, starts, [start + size for start, size in zip(starts, sizes, strict=True)])
    with jax.transfer_guard("allow"):  # of the start indices
        return jax.lax.dynamic_slice(data, starts, sizes)


def _is_here(array: Any) -> bool:
    kinds = {device.platform for device in array.sharding.device_set}
    return kinds == {"cpu"} or array.sharding.memory_kind in _HOST


def _less(these: Sequence[int], those: Sequence[int]) -> tuple[int, ...]:
    return tuple(one - other for one, other in zip(these, those, strict=True))
