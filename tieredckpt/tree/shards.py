"""Shards: leaves that are boxes of a larger array, of which other ranks have the rest."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from operator import index
from typing import Any

from msgspec.structs import replace

from tieredckpt.errors import Invalid
from tieredckpt.format.boxes import Box, Boxes, tile
from tieredckpt.format.structure import Kind, Node, array_nodes
from tieredckpt.tree.leaf import ArrayLeaf, Pieces, Place, array_node, nothing, storage_key

__all__ = ["Shard", "Sharded", "check_whole", "pieces", "shards_of"]


@dataclass(frozen=True, slots=True, eq=False)
class Shard:
    """A box of a global array, as a leaf of a tree.

    Saved, it is this process's part of the array; the shards of all ranks together must cover the array, and
    no item twice. In ``like`` or ``into`` it says which box is wanted, however the step was cut.

    Args:
        array: what this process has; an array of NumPy, PyTorch or JAX.
        shape: of the global array.
        offset: of the first item of ``array`` in it.
        cut: shape of a full shard, where all begin at multiples of it and only the last along an axis are shorter,
            as ``torch.chunk`` cuts. Such shards are stored as one array; without it, uneven ones may not be.
    """

    array: Any
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    cut: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Sharded:
    """Several shards of one array, as one leaf of a tree."""

    shards: Sequence[Shard]

    def __post_init__(self) -> None:
        object.__setattr__(self, "shards", tuple(self.shards))  # they are gone through more than once


def shards_of(value: object) -> tuple[Shard, ...] | None:
    """The shards that the leaf ``value`` consists of, or None when it is no `Shard` and no `Sharded`."""
    if isinstance(value, Shard):
        return (value,)
    return tuple(value.shards) if isinstance(value, Sharded) else None


def pieces(key: str, value: object, as_leaf: Callable[[str, object], ArrayLeaf | Pieces | None]) -> Pieces:
    """The `Shard` or `Sharded` ``value`` as pieces; ``as_leaf`` tells what their arrays are.

    Raises `Invalid`, naming the key, for shards that do not lie in their array, overlap, or are of several
    dtypes or global shapes.
    """
    shards = shards_of(value)
    assert shards is not None
    if not shards:
        raise Invalid(
            f"leaf {key!r}: a Sharded without shards does not tell shape and dtype; give one of no rows, or leave "
            f"the leaf out on the ranks that have nothing of it"
        )
    found = [_piece(key, shard, as_leaf) for shard in shards]
    nodes = [array_node(leaf) for leaf in found]
    for other in nodes:
        if (other.dtype, other.shape) != (nodes[0].dtype, nodes[0].shape):
            raise Invalid(
                f"leaf {key!r}: its shards are of {nodes[0].dtype}{list(nodes[0].shape)} and of "
                f"{other.dtype}{list(other.shape)}; all are boxes of one array"
            )
    if not all(nodes[0].shape):
        return Pieces(nodes[0], value, (nothing(nodes[0], found[0].dtype),))
    leaves = tuple(leaf for leaf in found if leaf.box.size)
    _check_apart(key, [leaf.box for leaf in leaves])
    return Pieces(nodes[0], value, leaves)


def _piece(key: str, shard: object, as_leaf: Callable[[str, object], ArrayLeaf | Pieces | None]) -> ArrayLeaf:
    if not isinstance(shard, Shard):
        raise Invalid(f"leaf {key!r}: a Sharded holds Shards, not a {type(shard).__name__}")
    leaf = as_leaf(key, shard.array)
    if not isinstance(leaf, ArrayLeaf):
        raise Invalid(f"leaf {key!r}: a {type(shard.array).__name__} cannot be the array of a Shard")
    if leaf.prng is not None:
        raise Invalid(f"leaf {key!r}: typed PRNG keys cannot be a Shard; shard their key_data")
    try:
        shape, offset = tuple(map(index, shard.shape)), tuple(map(index, shard.offset))
        cut = None if shard.cut is None else tuple(map(index, shard.cut))
    except TypeError as error:
        raise Invalid(f"leaf {key!r}: shape, offset and cut of a Shard are sequences of int: {error}") from error
    box = Box(offset, leaf.shape)
    if not Box.whole(shape).contains(box):
        raise Invalid(
            f"leaf {key!r}: a shard of shape {list(leaf.shape)} at {list(offset)} does not lie in an array of shape "
            f"{list(shape)}; `shape` is that of the global array, `offset` that of the shard's first item"
        )
    if cut is not None and box.size and not _begins(offset, cut):
        raise Invalid(
            f"leaf {key!r}: no shard of a cut by {list(cut)} begins at {list(offset)}; `cut` is the shape of a full "
            f"shard, and every offset a multiple of it"
        )
    kind: Kind = "numpy" if leaf.kind == "numpy-scalar" else leaf.kind
    # A shard that is all of the array keeps its place, so that `replicated` does not take it for a replica.
    return replace(leaf, key=storage_key(key, shape, box), kind=kind, place=Place(key, shape, offset, cut))


def _begins(offset: tuple[int, ...], cut: tuple[int, ...]) -> bool:
    return len(offset) == len(cut) and all(n >= 1 and start % n == 0 for start, n in zip(offset, cut, strict=True))


def _check_apart(key: str, boxes: Sequence[Box]) -> None:
    """Raise `Invalid` when two boxes share an item."""
    if len(boxes) < 2:
        return
    known = Boxes(boxes)
    for i, box in enumerate(boxes):
        for j in known.meeting(box):
            if i != j:
                raise Invalid(
                    f"leaf {key!r}: the shards of shape {list(box.shape)} at {list(box.offset)} and of shape "
                    f"{list(boxes[j].shape)} at {list(boxes[j].offset)} overlap; give every item once"
                )


def check_whole(structure: Node, leaves: Iterable[ArrayLeaf]) -> None:
    """Raise `Invalid`, naming the key, unless ``leaves`` are all of every array that ``structure`` names."""
    boxes: dict[str, list[Box]] = {}
    for leaf in leaves:
        boxes.setdefault(leaf.array, []).append(leaf.box)
    for node in array_nodes(structure):
        found = boxes.get(node.key, [])
        if (len(found) != 1 or found[0].shape != node.shape) and not tile(node.shape, found):
            raise Invalid(
                f"leaf {node.key!r}: the shards that were given are not all of an array of shape {list(node.shape)} "
                f"({sum(box.size for box in found)} of its {math.prod(node.shape)} items), and no other rank saves "
                f"with this one; give the rest too, or open the store with `ranks`"
            )
