"""Reads a step index without trust: raises `Corrupt` for anything that does not fit.

See `tieredckpt.format.ocdbt` for the format and its source. Besides the frames, it checks key order and the range that
the parent gives, heights (they fall by one, so there are no cycles), paths, the limits of
`tieredckpt.format.ocdbt_codec`, and that the counts of keys, node bytes and value bytes add up at every node.
"""

from __future__ import annotations

import operator
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, islice, pairwise
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from tieredckpt.errors import Corrupt
from tieredckpt.format.ocdbt_codec import (
    MANIFEST_MAGIC,
    MAX_ARITY,
    MAX_ENTRIES,
    MAX_EXPANDED,
    MAX_INLINE,
    MAX_KEY,
    MAX_LENGTH,
    MAX_NODE_EXPANDED,
    MAX_UINT64,
    NODE_MAGIC,
    Cursor,
    Extent,
    Value,
    open_frame,
)

__all__ = ["NodeReader", "Root", "decode", "decode_nodes", "find", "find_in_nodes", "read_root"]

NodeReader: TypeAlias = Callable[[str, int, int], bytes | memoryview]
"""``read(path, offset, length)``: that range of a file below the root, or `Corrupt`."""

_MAX_HEIGHT = 32
_MAX_ARITY_LOG2 = 16


@dataclass(frozen=True, slots=True)
class Root:
    """The newest version in a manifest, and where the root node of its B+tree is."""

    uuid: bytes
    generation: int
    commit_time_ns: int
    """Nanoseconds since the epoch."""
    height: int
    """Height of the root node; leaves have 0."""
    path: str
    """File of the root node relative to the root folder; empty when the index is."""
    base: str
    """Part of ``path`` that the paths in the root node begin with."""
    offset: int
    length: int
    num_keys: int
    tree_bytes: int
    """Bytes of all nodes."""
    indirect_bytes: int
    """Bytes of all values outside the index."""


@dataclass(frozen=True, slots=True)
class _Reference:
    """A node, as described by its parent."""

    path: str
    base: str
    offset: int
    length: int
    height: int
    keys: int
    tree_bytes: int
    indirect_bytes: int
    prefix: bytes
    low: bytes
    high: bytes | None


def decode(manifest: bytes, btree: bytes, btree_path: str) -> list[tuple[bytes, Value]]:
    """All keys and values of an index whose nodes lie in one file, in ascending order of the keys.

    Raises:
        Corrupt: anything in the two files that `tieredckpt.format.ocdbt.encode` would not have written.
    """
    root = _root_within(manifest, btree)
    return _decode(root, _reader(btree, btree_path))


def decode_nodes(manifest: bytes, read: NodeReader) -> list[tuple[bytes, Value]]:
    """Decode nodes that lie in several files, as other writers of OCDBT leave them; otherwise as `decode`."""
    return _decode(read_root(manifest), read)


def find(manifest: bytes, btree: bytes, btree_path: str) -> Callable[[bytes], Value | None]:
    """Finds the value of a key, None if it is not there; decodes only the nodes on the way, and each once.

    Both calls raise `Corrupt`.
    """
    return _finder(_root_within(manifest, btree), _reader(btree, btree_path))


def find_in_nodes(manifest: bytes, read: NodeReader) -> Callable[[bytes], Value | None]:
    """Finds keys in nodes that lie in several files, as `find`."""
    return _finder(read_root(manifest), read)


def read_root(manifest: bytes) -> Root:
    """The newest version that a manifest names.

    Raises:
        Corrupt: torn, damaged, compressed, of the numbered kind, or with versions outside the manifest.
    """
    cursor = open_frame(manifest, MANIFEST_MAGIC, "manifest")
    uuid, kind = cursor.take(16), cursor.byte()
    cursor.varint((1 << 32) - 1)
    cursor.varint((1 << 32) - 1)
    arity, compression = cursor.byte(), cursor.varint(MAX_UINT64)
    if kind or compression or not 1 <= arity <= _MAX_ARITY_LOG2:
        raise Corrupt(f"manifest: kind {kind}, compression {compression}, arity 2**{arity}: not readable")
    files = cursor.files("")
    count = cursor.varint(1 << arity)
    if count == 0:
        raise Corrupt("manifest: it has no version")
    generations = cursor.column(count, MAX_UINT64).tolist()
    heights = cursor.take(count)
    places = cursor.column(count, len(files) - 1).tolist()
    offsets, lengths, keys, trees, values = (cursor.column(count, MAX_UINT64).tolist() for _ in range(5))
    time = int.from_bytes(cursor.take(8 * count)[-8:], "little")
    if cursor.varint(MAX_UINT64):
        raise Corrupt("manifest: older versions lie outside of it; only manifests with all versions are read")
    cursor.finish()
    if generations[0] == 0 or any(new <= old for old, new in pairwise(generations)):
        raise Corrupt(f"manifest: generations {generations[:20]} do not ascend from 1")
    file = files[places[-1]]
    root = Root(
        uuid, generations[-1], time, heights[-1], file.path, file.base,
        offsets[-1], lengths[-1], keys[-1], trees[-1], values[-1],
    )  # fmt: skip
    if root.offset == root.length == MAX_UINT64:
        fine = not (root.path or root.height or root.num_keys or root.tree_bytes or root.indirect_bytes)
    else:
        fine = root.path != "" and root.offset + root.length <= MAX_LENGTH and root.height <= _MAX_HEIGHT
        fine = fine and 1 <= root.num_keys <= MAX_ENTRIES and root.length <= root.tree_bytes
    if not fine:
        raise Corrupt(f"manifest: an impossible root: {root}")
    return root


def _root_within(manifest: bytes, btree: bytes) -> Root:
    root = read_root(manifest)
    if root.tree_bytes > len(btree):
        raise Corrupt(f"index: its nodes have {root.tree_bytes} bytes, and the file only {len(btree)}")
    return root


def _reader(btree: bytes, btree_path: str) -> NodeReader:
    view = memoryview(btree)

    def read(path: str, offset: int, length: int) -> memoryview:
        if path != btree_path or offset + length > len(view):
            raise Corrupt(f"{btree_path}: no node at {path!r}, offset {offset}, length {length}")
        return view[offset : offset + length]

    return read


def _top(root: Root) -> _Reference:
    return _Reference(
        root.path, root.base, root.offset, root.length, root.height,
        root.num_keys, root.tree_bytes, root.indirect_bytes, b"", b"", None,
    )  # fmt: skip


def _decode(root: Root, read: NodeReader) -> list[tuple[bytes, Value]]:
    entries: list[tuple[bytes, Value]] = []
    expanded = 0
    pending = [_top(root)] if root.path else []
    while pending:
        reference = pending.pop()
        if reference.height:
            pending.extend(reversed(_children(reference, read, MAX_EXPANDED)[1]))
        else:
            keys, values = _leaf(reference, read, MAX_EXPANDED - expanded)
            expanded += sum(map(len, keys))
            entries.extend(zip(keys, values, strict=True))
    return entries


def _finder(root: Root, read: NodeReader) -> Callable[[bytes], Value | None]:
    # Few are kept: the parts of a value lie side by side, and a hostile node may take `MAX_NODE_EXPANDED` of memory.
    children = lru_cache(4)(lambda reference: _children(reference, read, MAX_EXPANDED))
    values = lru_cache(1)(lambda reference: dict(zip(*_leaf(reference, read, MAX_EXPANDED), strict=True)))

    def find(key: bytes) -> Value | None:
        if not root.path:
            return None
        reference = _top(root)
        while reference.height:
            keys, below = children(reference)
            index = bisect_right(keys, key) - 1
            if index < 0:
                return None
            reference = below[index]
        return values(reference).get(key)

    return find


def _open(reference: _Reference, read: NodeReader) -> Cursor:
    what = f"index node at {reference.path}:{reference.offset}"
    data = read(reference.path, reference.offset, reference.length)
    if len(data) != reference.length:
        raise Corrupt(f"{what}: {len(data)} bytes instead of {reference.length}")
    cursor = open_frame(data, NODE_MAGIC, what)
    height = cursor.byte()
    if height != reference.height:
        raise Corrupt(f"{what}: height {height} instead of {reference.height}")
    return cursor


def _leaf(reference: _Reference, read: NodeReader, room: int) -> tuple[list[bytes], list[Value]]:
    """Keys and values of a leaf; ``room`` is how many bytes its keys may have."""
    cursor = _open(reference, read)
    files = cursor.files(reference.base)
    count = cursor.varint(MAX_ARITY)
    keys = _keys(cursor, count, reference, room, None)
    lengths = cursor.column(count, MAX_LENGTH)
    kinds = np.frombuffer(cursor.take(count), np.uint8)
    if kinds.max() > 1:
        raise Corrupt(f"{cursor.what}: a value of unknown kind {kinds.max()}")
    far = kinds == 1
    outside, inside = lengths[far], lengths[~far]
    places = cursor.column(outside.size, len(files) - 1)
    offsets = cursor.column(outside.size, MAX_LENGTH)
    if bool((offsets + outside > MAX_LENGTH).any()) or int(inside.max(initial=0)) > MAX_INLINE:
        raise Corrupt(f"{cursor.what}: a value's range or length is impossible")
    text = cursor.take(int(inside.sum()))
    cursor.finish()
    sizes = outside.tolist()
    _check_sums(reference, cursor.what, count, reference.length, sum(sizes))
    paths = [file.path for file in files]
    if any(bool((places == place).any()) for place, path in enumerate(paths) if path == ""):
        raise Corrupt(f"{cursor.what}: an extent without a path")
    extents = map(Extent, map(paths.__getitem__, places.tolist()), offsets.tolist(), sizes)
    ends = [0, *accumulate(inside.tolist())]
    pieces = (text[start:end] for start, end in pairwise(ends))
    return keys, [next(extents) if kind else next(pieces) for kind in kinds.tolist()]


def _children(reference: _Reference, read: NodeReader, room: int) -> tuple[list[bytes], list[_Reference]]:
    """First keys and references of an interior node's children."""
    cursor = _open(reference, read)
    files = cursor.files(reference.base)
    count = cursor.varint(MAX_ARITY)
    shared: list[int] = []
    keys = _keys(cursor, count, reference, room, shared)
    places = cursor.column(count, len(files) - 1).tolist()
    offsets, lengths = (cursor.column(count, MAX_LENGTH).tolist() for _ in range(2))
    counts, trees, values = (cursor.column(count, MAX_UINT64).tolist() for _ in range(3))
    cursor.finish()
    _check_sums(reference, cursor.what, sum(counts), sum(trees) + reference.length, sum(values))
    prefix = len(reference.prefix)
    highs = [*keys[1:], reference.high]
    children = [
        _Reference(
            files[place].path, files[place].base, offset, length, reference.height - 1,
            keys_below, tree_bytes, value_bytes, low[: prefix + common], low, high,
        )
        for place, offset, length, keys_below, tree_bytes, value_bytes, common, low, high in zip(
            places, offsets, lengths, counts, trees, values, shared, keys, highs, strict=True
        )
    ]  # fmt: skip
    if any(not child.path or child.offset + child.length > MAX_LENGTH for child in children):
        raise Corrupt(f"{cursor.what}: a child without a place")
    return keys, children


def _check_sums(reference: _Reference, what: str, keys: int, tree_bytes: int, indirect_bytes: int) -> None:
    found = (keys, min(tree_bytes, MAX_UINT64), min(indirect_bytes, MAX_UINT64))
    promised = (reference.keys, reference.tree_bytes, reference.indirect_bytes)
    if found != promised:
        raise Corrupt(f"{what}: keys, node bytes and value bytes are {found}, its parent says {promised}")


def _keys(cursor: Cursor, count: int, reference: _Reference, room: int, subtrees: list[int] | None) -> list[bytes]:
    """The whole keys of a node; an interior node's common prefix lengths are appended to ``subtrees``."""
    if count == 0:
        raise Corrupt(f"{cursor.what}: it is empty")
    prefix = reference.prefix
    shared: NDArray[Any] = np.zeros(count, np.uint64)
    shared[1:] = cursor.column(count - 1, MAX_KEY)
    added = cursor.column(count, MAX_KEY)
    whole = shared + added
    fine = bool((shared[1:] <= whole[:-1]).all()) and int(whole.max()) + len(prefix) <= MAX_KEY
    if subtrees is not None:
        common = cursor.column(count, MAX_KEY)
        fine = fine and bool((common <= whole).all())
        subtrees.extend(common.tolist())
    if not fine or int(whole.sum()) + count * len(prefix) > min(room, MAX_NODE_EXPANDED):
        raise Corrupt(f"{cursor.what}: its keys have impossible lengths")
    text = cursor.take(int(added.sum()))
    keys: list[bytes] = []
    key, start = prefix, 0
    known = (shared + np.uint64(len(prefix))).tolist()
    for skip, end in zip(known, np.cumsum(added).tolist(), strict=True):
        key = key[:skip] + text[start:end]
        start = end
        keys.append(key)
    if not all(map(operator.lt, keys, islice(keys, 1, None))):
        raise Corrupt(f"{cursor.what}: its keys do not ascend")
    if keys[0] < reference.low or (reference.high is not None and keys[-1] >= reference.high):
        raise Corrupt(f"{cursor.what}: its keys are outside the range that its parent gives")
    return keys
