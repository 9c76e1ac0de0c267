"""Convert trees of any framework to a structure and arrays, and back.

`flatten` takes a tree apart. `unflatten` rebuilds it from plain containers; `match` and `Match.build` rebuild it in the
types of a given tree. `select` chooses a part. `arrays` recognizes arrays and finds their bytes, `casts` converts
values to other dtypes, and `copies` copies arrays near their device.
"""

from __future__ import annotations

from tieredckpt.tree.arrays import as_array_leaf, host_view, row_major_bytes, writable_view
from tieredckpt.tree.flatten import Flat, flatten, unflatten
from tieredckpt.tree.leaf import ArrayLeaf, Pieces, Place
from tieredckpt.tree.match import Match, match
from tieredckpt.tree.select import select
from tieredckpt.tree.shards import Shard, Sharded

__all__ = [
    "ArrayLeaf",
    "Flat",
    "Match",
    "Pieces",
    "Place",
    "Shard",
    "Sharded",
    "as_array_leaf",
    "flatten",
    "host_view",
    "match",
    "row_major_bytes",
    "select",
    "unflatten",
    "writable_view",
]
