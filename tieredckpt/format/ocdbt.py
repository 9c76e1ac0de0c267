"""Step indexes in TensorStore's OCDBT database format: written whole, read whole or key by key.

The format is published at https://google.github.io/tensorstore/kvstore/ocdbt/ ("Storage format"). Of it, this
library writes: one version of generation 1 in a single-file manifest, no compression, all B+tree nodes in one
file, values inline up to 1 MiB and otherwise as extents of any file below the root. It reads, besides, nodes
in several files and several versions (the newest counts). Stock TensorStore opens an index with::

    {"driver": "ocdbt",
     "base": {"driver": "file", "path": ROOT},
     "manifest": {"driver": "file", "path": ROOT + "/steps/0000001000-000007/"}}

A node lists its keys without the prefix that all keys below it share; its parent gives that prefix. Interior
nodes appear when there is more than one leaf, and their heights fall by one towards the leaves.
"""

from __future__ import annotations

from tieredckpt.format.ocdbt_codec import Extent, Value
from tieredckpt.format.ocdbt_read import NodeReader, Root, decode, decode_nodes, find, find_in_nodes, read_root
from tieredckpt.format.ocdbt_write import NODE_BYTES, Index, Keys, encode, encode_values

__all__ = [
    "NODE_BYTES",
    "Extent",
    "Index",
    "Keys",
    "NodeReader",
    "Root",
    "Value",
    "decode",
    "decode_nodes",
    "encode",
    "encode_values",
    "find",
    "find_in_nodes",
    "read_root",
]
