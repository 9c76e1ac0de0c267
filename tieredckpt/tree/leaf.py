"""Leaves: what is known of an array in a tree before its bytes are read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from tieredckpt.errors import Invalid
from tieredckpt.format.boxes import Box
from tieredckpt.format.layout import block_key
from tieredckpt.format.structure import MAX_RANK, ArrayNode, Kind
from tieredckpt.format.zarr import dtype_from_name, dtype_name

__all__ = [
    "ArrayLeaf",
    "ArraySpec",
    "Pieces",
    "Place",
    "array_node",
    "array_spec",
    "checked_dtype",
    "nothing",
    "storage_key",
]


@dataclass(frozen=True, slots=True)
class Place:
    """Place of a piece in the array that it is a box of."""

    key: str
    """Of the array."""
    shape: tuple[int, ...]
    """Of the array."""
    offset: tuple[int, ...]
    cut: tuple[int, ...] | None = None
    """Multiples at which every piece of the array begins, such as the shape of a shard, where they are known."""
    cell: tuple[int, ...] | None = None
    """Shape of a cell of the grid, where the grid is decided already."""
    replicas: tuple[int, ...] = ()
    """The ranks that have this very piece, where there are several."""


class ArrayLeaf(msgspec.Struct, frozen=True, gc=False):
    """An array of a tree, or a piece of one, saved or given as ``like``."""

    key: str
    """Storage key; for a whole array, the path of the leaf. See `storage_key`."""
    source: object
    """Object in the tree; for a typed PRNG key that is saved, its data."""
    kind: Kind
    shape: tuple[int, ...]
    """Stored shape; of a typed PRNG key it is the shape of its data."""
    dtype: np.dtype[Any]
    """Stored dtype."""
    immutable: bool
    """Whether no code can write to the bytes, so that they may be captured by reference."""
    prng: str | None
    """Implementation of a typed PRNG key, such as ``threefry2x32``."""
    place: Place | None = None
    """Set for a piece, and for a whole array that was given as a `Shard` or has known replicas."""
    part: tuple[slice, ...] | None = None
    """The part of ``source`` that this leaf is, where it is not all of it."""

    @property
    def array(self) -> str:
        """Key of the array that this leaf is, or is a piece of; the path of the leaf."""
        return self.key if self.place is None else self.place.key

    @property
    def box(self) -> Box:
        """The box of the array that this leaf is."""
        return Box((0,) * len(self.shape) if self.place is None else self.place.offset, self.shape)


@dataclass(frozen=True, slots=True)
class ArraySpec:
    """An array of a step without its values: what ``restore(as_="specs")`` has for it."""

    key: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    kind: Kind
    """Kind of the array in the saved tree."""
    prng: str | None = None
    """Implementation of a typed PRNG key, such as ``threefry2x32``; dtype and shape are those of its data."""


@dataclass(frozen=True, slots=True)
class Pieces:
    """A leaf of a tree that is some boxes of a larger array."""

    node: ArrayNode
    """The array as the structure of the tree names it."""
    source: object
    """Object in the tree."""
    leaves: tuple[ArrayLeaf, ...]
    """The boxes that hold something."""


def storage_key(key: str, shape: Sequence[int], box: Box) -> str:
    """The key under which a box of the array ``key`` is stored: that of the array if it is all of it."""
    return key if box.shape == tuple(shape) else block_key(key, box.offset)


def checked_dtype(key: str, dtype: np.dtype[Any], rank: int) -> np.dtype[Any]:
    """``dtype`` itself if its arrays of ``rank`` dimensions can be stored, else `Invalid`, naming ``key``."""
    try:
        dtype_name(dtype)
    except Invalid as error:
        raise Invalid(f"leaf {key!r}: {error}") from error
    if rank > MAX_RANK:
        raise Invalid(f"leaf {key!r}: an array of {rank} dimensions cannot be stored; {MAX_RANK} is the most")
    return dtype


def array_node(leaf: ArrayLeaf) -> ArrayNode:
    """The array of ``leaf`` as the structure of a tree names it."""
    shape = leaf.shape if leaf.place is None else leaf.place.shape
    return ArrayNode(leaf.array, dtype_name(leaf.dtype), shape, leaf.kind, leaf.prng)


def array_spec(node: ArrayNode) -> ArraySpec:
    """Description of the array of ``node`` in a step, for people and programs."""
    return ArraySpec(node.key, dtype_from_name(node.dtype), node.shape, node.kind, node.prng)


def nothing(node: ArrayNode, dtype: np.dtype[Any]) -> ArrayLeaf:
    """The one piece of an array without items: all of it, so that somebody stores it."""
    empty = np.empty(node.shape, dtype)
    return ArrayLeaf(node.key, empty, "numpy", empty.shape, dtype, True, None)
