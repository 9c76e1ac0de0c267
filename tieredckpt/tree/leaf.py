"""What is known of an array in a tree before its bytes are touched."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from tieredckpt.errors import Invalid
from tieredckpt.format.structure import MAX_RANK, ArrayNode, Kind
from tieredckpt.format.zarr import dtype_name

__all__ = ["ArrayLeaf", "array_node", "checked_dtype"]

_name_of = lru_cache(maxsize=256)(dtype_name)


@dataclass(frozen=True, slots=True)
class ArrayLeaf:
    """An array of a tree, saved or given as ``like``."""

    key: str
    source: object
    """What the tree holds; for a typed PRNG key that is saved, its data."""
    kind: Kind
    shape: tuple[int, ...]
    """As stored: that of a typed PRNG key is the shape of its data."""
    dtype: np.dtype[Any]
    """As stored."""
    immutable: bool
    """Nobody can write to the bytes, so they may be captured by reference."""
    prng: str | None
    """Implementation of a typed PRNG key, such as ``threefry2x32``."""


def checked_dtype(key: str, dtype: np.dtype[Any], rank: int) -> np.dtype[Any]:
    """``dtype`` itself if its arrays of ``rank`` dimensions can be stored, else `Invalid`, naming ``key``."""
    try:
        _name_of(dtype)
    except Invalid as error:
        raise Invalid(f"leaf {key!r}: an array of dtype {dtype} cannot be stored: {error}") from error
    if rank > MAX_RANK:
        raise Invalid(f"leaf {key!r}: an array of {rank} dimensions cannot be stored; {MAX_RANK} is the most")
    return dtype


def array_node(leaf: ArrayLeaf) -> ArrayNode:
    """``leaf`` as the structure of a tree names it."""
    return ArrayNode(leaf.key, _name_of(leaf.dtype), leaf.shape, leaf.kind, leaf.prng)
