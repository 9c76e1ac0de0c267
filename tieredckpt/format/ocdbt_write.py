"""Writes a step index: a B+tree of ascending keys in one piece, and the manifest that names its root.

See `tieredckpt.format.ocdbt` for the format and its source.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, repeat
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from tieredckpt.errors import Invalid
from tieredckpt.format.ocdbt_codec import (
    MANIFEST_MAGIC,
    MAX_ARITY,
    MAX_ENTRIES,
    MAX_EXPANDED,
    MAX_INLINE,
    MAX_KEY,
    MAX_LENGTH,
    MAX_UINT64,
    NODE_MAGIC,
    Extent,
    Value,
    column,
    file_table,
    frame,
    framed,
    is_data_path,
    shared_prefix,
    varint,
)

__all__ = ["NODE_BYTES", "Index", "Keys", "encode", "encode_values"]

NODE_BYTES: Final = 128 << 10
"""Decoded size of a node. A million keys in nodes of 128 KiB to 4 MiB took the same time to write and to read within a
fifth, and smaller nodes make a lookup of one key faster: here two milliseconds."""

_ENTRY_BYTES = 24
"""Bytes of an entry besides its key and inline value, for dividing entries into nodes."""

_ARITY_LOG2 = 4
_GENERATION = 1


@dataclass(frozen=True, slots=True)
class Index:
    """The two files of a step index: all nodes (``btree``), and the manifest, to be written last."""

    nodes: Sequence[bytes]
    """The first file in pieces: joining some ten megabytes takes as long as encoding them."""
    manifest: bytes

    @property
    def btree(self) -> bytes:
        """The first file."""
        return b"".join(self.nodes)

    @property
    def nbytes(self) -> int:
        """Bytes of both files."""
        return sum(map(len, self.nodes)) + len(self.manifest)


@dataclass(frozen=True, slots=True)
class _Subtree:
    """A written node, with the fields that its parent stores about it."""

    first: bytes
    last: bytes
    offset: int
    length: int
    keys: int
    tree_bytes: int
    indirect_bytes: int


@dataclass(frozen=True, slots=True)
class _Columns:
    """The values of all keys: ``lengths`` and ``far`` (is it an extent) of each; the rest of extents only."""

    lengths: NDArray[np.int64]
    far: NDArray[np.bool_]
    before: NDArray[np.int64]
    """How many extents precede each key."""
    files: NDArray[np.int64]
    """Indices into ``paths``."""
    offsets: NDArray[np.int64]
    paths: list[str]
    """Ascending."""


class Keys:
    """The keys of an index, checked and encoded; the next index with the same keys reuses them.

    Args:
        keys: in strictly ascending order, at most 65535 bytes each.

    Raises:
        Invalid: keys out of order, too long, or too many.
    """

    def __init__(self, keys: list[bytes]) -> None:
        _check_keys(keys)
        self.all = keys
        self.lengths = np.fromiter(map(len, keys), np.int64, len(keys))
        self._last: dict[tuple[int, int], bytes] = {}
        self._before: dict[tuple[int, int], bytes] = {}
        """Of the division before the last: RAM and a slower tier divide in turns, and checksums shift the nodes."""

    def columns(self, nodes: Sequence[tuple[int, int]]) -> list[bytes]:
        """Key columns of every leaf node, given as a range of keys."""
        last, before = self._last, self._before
        found = {node: last.get(node) or before.get(node) or self._encoded(node, len(nodes)) for node in nodes}
        self._last, self._before = found, last
        return [found[node] for node in nodes]

    def _encoded(self, node: tuple[int, int], nodes: int) -> bytes:
        keys = self.all[slice(*node)]
        skip = 0 if nodes == 1 else shared_prefix(keys[0], keys[-1])
        return b"".join(_key_columns(keys, skip))


def encode(
    entries: Iterable[tuple[bytes, Value]],
    btree_path: str,
    *,
    uuid: bytes,
    commit_time_ns: int,
    max_node_bytes: int = NODE_BYTES,
) -> Index:
    """Encode entries in strictly ascending order of their keys, as `encode_values`."""
    pairs = list(entries)
    keys, values = Keys([key for key, _ in pairs]), [value for _, value in pairs]
    return encode_values(
        keys, values, btree_path, uuid=uuid, commit_time_ns=commit_time_ns, max_node_bytes=max_node_bytes
    )


def encode_values(
    keys: Keys,
    values: Sequence[Value],
    btree_path: str,
    *,
    uuid: bytes,
    commit_time_ns: int,
    max_node_bytes: int = NODE_BYTES,
) -> Index:
    """The files of an index with one version, generation 1, uncompressed.

    Args:
        keys: of the index.
        values: of the keys: at most 1 MiB each, or an extent.
        btree_path: where ``Index.btree`` will be, relative to the root.
        uuid: 16 bytes that identify the database.
        commit_time_ns: nanoseconds since the epoch.
        max_node_bytes: decoded size of a node, exceeded only by single large entries.

    Raises:
        Invalid: values too large, paths that leave the root, or sizes out of range.
    """
    if len(uuid) != 16 or not is_data_path(btree_path) or not 0 <= commit_time_ns <= MAX_UINT64:
        raise Invalid(f"no index at {btree_path!r} with uuid {uuid.hex()} and commit time {commit_time_ns}")
    if not 1 <= max_node_bytes < 1 << 32:
        raise Invalid(f"max_node_bytes is {max_node_bytes}: it must be at least 1 and below 4 GiB")
    columns = _columns(keys.all, values)

    parts: list[bytes] = []
    position = 0
    level: list[_Subtree] = []

    def write(body: Sequence[bytes], first: bytes, last: bytes, count: int, below: int, indirect: int) -> _Subtree:
        nonlocal position
        node = framed(NODE_MAGIC, *body)
        parts.extend(node)
        start, length = position, sum(map(len, node))
        position += length
        return _Subtree(first, last, start, length, count, below + length, indirect)

    weights = keys.lengths + _ENTRY_BYTES
    weights[~columns.far] += columns.lengths[~columns.far]
    groups = list(_divide(weights, max_node_bytes, 1))
    for (start, end), key_columns in zip(groups, keys.columns(groups), strict=True):
        body, indirect = _leaf(key_columns, values, columns, start, end)
        level.append(write(body, keys.all[start], keys.all[end - 1], end - start, 0, indirect))

    height = 0
    while len(level) > 1:
        height += 1
        weights = np.fromiter((len(child.first) for child in level), np.int64, len(level)) + _ENTRY_BYTES
        groups = list(_divide(weights, max_node_bytes, 2))
        above: list[_Subtree] = []
        for start, end in groups:
            children = level[start:end]
            first, last = children[0].first, children[-1].last
            skip = 0 if len(groups) == 1 else shared_prefix(first, last)
            count, below, indirect = (
                sum(getattr(child, name) for child in children) for name in ("keys", "tree_bytes", "indirect_bytes")
            )
            node = _interior(children, height, skip, btree_path)
            above.append(write([node], first, last, count, below, indirect))
        level = above

    manifest = _manifest(level, height, btree_path, uuid, commit_time_ns, max_node_bytes)
    return Index(parts, manifest)


def _check_keys(keys: list[bytes]) -> None:
    if not {*map(type, keys)} <= {bytes}:
        raise Invalid("the keys of an index are bytes")
    if not all(map(operator.lt, keys, islice(keys, 1, None))):
        index = next(i for i in range(1, len(keys)) if keys[i - 1] >= keys[i])
        raise Invalid(f"the keys of an index must ascend, but {keys[index]!r} follows {keys[index - 1]!r}")
    longest = max(keys, key=len, default=b"")
    if len(longest) > MAX_KEY:
        raise Invalid(f"the key {longest[:80]!r}... has {len(longest)} bytes, {MAX_KEY} are possible")
    if len(keys) > MAX_ENTRIES or sum(map(len, keys)) > MAX_EXPANDED:
        raise Invalid(
            f"{len(keys)} keys of {sum(map(len, keys))} bytes are too many for one index "
            f"({MAX_ENTRIES} of {MAX_EXPANDED} bytes are possible): use larger chunks"
        )


def _columns(keys: list[bytes], values: Sequence[Value]) -> _Columns:
    types = {*map(type, values)}
    if not types <= {bytes, Extent}:
        raise Invalid("the values of an index are bytes or Extent")
    if Extent in types:
        extents = [value for value in values if isinstance(value, Extent)]
        inline: Sequence[Any] = [value for value in values if isinstance(value, bytes)]
        far = np.fromiter(map(operator.is_, map(type, values), repeat(Extent)), np.bool_, len(values))
    else:  # for a tree of many small arrays: no value is looked at alone
        extents, inline, far = [], values, np.zeros(len(values), np.bool_)
    paths = sorted({extent.path for extent in extents})
    for path in paths:
        if not is_data_path(path):
            raise Invalid(f"{path!r} is no path below the root: components of [A-Za-z0-9._-], no '.' or '..'")
    place = {path: index for index, path in enumerate(paths)}
    files = np.fromiter((place[extent.path] for extent in extents), np.int64, len(extents))
    try:
        offsets = np.fromiter((extent.offset for extent in extents), np.int64, len(extents))
        lengths = np.empty(len(values), np.int64)
        lengths[far] = np.fromiter((extent.length for extent in extents), np.int64, len(extents))
        lengths[~far] = np.fromiter(map(len, inline), np.int64, len(inline))
    except OverflowError as error:
        raise Invalid(f"an extent of an index ends beyond 2**63 bytes: {error}") from error
    wrong = (offsets < 0) | (lengths[far] < 0) | (offsets > MAX_LENGTH - lengths[far])
    if wrong.any():
        raise Invalid(f"{extents[int(wrong.argmax())]} is no range of a file")
    large = ~far & (lengths > MAX_INLINE)
    if large.any():
        index = int(large.argmax())
        raise Invalid(
            f"the value of {keys[index]!r} has {int(lengths[index])} bytes, inline are at most {MAX_INLINE}: "
            "store it in a file and refer to it by an Extent"
        )
    return _Columns(lengths, far, np.cumsum(far) - far, files, offsets, paths)


def _divide(weights: NDArray[np.int64], limit: int, fewest: int) -> Iterator[tuple[int, int]]:
    """Consecutive ranges with weights up to ``limit``, but of at least ``fewest`` entries where so many are left."""
    sums = np.cumsum(weights)
    start = done = 0
    while start < sums.size:
        fitting = int(np.searchsorted(sums, done + limit, "right"))
        end = min(max(fitting, start + fewest), start + MAX_ARITY, sums.size)
        yield start, end
        start, done = end, int(sums[end - 1])


def _leaf(keys: bytes, values: Sequence[Value], columns: _Columns, start: int, end: int) -> tuple[Sequence[bytes], int]:
    """Body of a leaf node in pieces, from its encoded keys, and the bytes of all its extents."""
    far, lengths = columns.far[start:end], columns.lengths[start:end]
    first = int(columns.before[start])
    extents = slice(first, first + int(far.sum()))
    inline: Any = values[start:end]
    if extents.stop > first:
        inline = [value for value in inline if isinstance(value, bytes)]
    of_extents = columns.files[extents]
    seen = np.bincount(of_extents) > 0
    used, files = np.flatnonzero(seen), (np.cumsum(seen) - 1)[of_extents]
    body = (
        b"\0" + file_table([columns.paths[index] for index in used.tolist()]) + varint(end - start),
        keys,
        column(lengths) + far.tobytes() + column(files) + column(columns.offsets[extents]),
        *inline,
    )
    return body, min(sum(lengths[far].tolist()), MAX_UINT64)


def _interior(children: list[_Subtree], height: int, skip: int, btree_path: str) -> bytes:
    key_lengths, key_text = _key_columns([child.first for child in children], skip)
    fields: tuple[Any, ...] = (
        [child.offset for child in children],
        [child.length for child in children],
        [child.keys for child in children],
        [child.tree_bytes for child in children],
        [min(child.indirect_bytes, MAX_UINT64) for child in children],
    )
    return (
        bytes((height,))
        + file_table([btree_path])
        + varint(len(children))
        + key_lengths
        + column([shared_prefix(child.first, child.last) - skip for child in children])
        + key_text
        + bytes(len(children))
        + b"".join(map(column, fields))
    )


def _manifest(
    level: list[_Subtree], height: int, btree_path: str, uuid: bytes, commit_time_ns: int, max_node_bytes: int
) -> bytes:
    config = uuid + b"\0" + varint(MAX_INLINE) + varint(max_node_bytes) + bytes((_ARITY_LOG2, 0))
    if level:
        root = level[0]
        path = btree_path
        numbers = [root.offset, root.length, root.keys, root.tree_bytes, min(root.indirect_bytes, MAX_UINT64)]
    else:
        # OCDBT's way to say that there is no root.
        path, numbers = "", [MAX_UINT64, MAX_UINT64, 0, 0, 0]
    version = varint(1) + varint(_GENERATION) + bytes((height, 0)) + b"".join(map(varint, numbers))
    older = varint(0)
    time = commit_time_ns.to_bytes(8, "little")
    return frame(MANIFEST_MAGIC, config, file_table([path]), version, time, older)


def _key_columns(keys: list[bytes], skip: int) -> tuple[bytes, bytes]:
    """Columns of prefix and suffix lengths, and the suffixes; all keys share their first ``skip`` bytes."""
    lengths = np.fromiter(map(len, keys), np.int64, len(keys))
    shared = np.full(len(keys), skip, np.int64)
    shared[1:] = _shared_with_next(keys, lengths, skip)
    suffixes = [key[known:] for key, known in zip(keys, shared.tolist(), strict=True)]
    return column(shared[1:] - skip) + column(lengths - shared), b"".join(suffixes)


def _shared_with_next(keys: list[bytes], lengths: NDArray[np.int64], skip: int) -> NDArray[np.int64]:
    """How many leading bytes each key but the last has in common with the next; at least ``skip``."""
    text = np.frombuffer(b"".join(keys), np.uint8)
    starts = np.cumsum(lengths) - lengths
    shortest = np.minimum(lengths[:-1], lengths[1:])
    shared = np.full(len(keys) - 1, skip, np.int64)
    equal = np.arange(len(keys) - 1)
    for position in range(skip, int(shortest.max(initial=0))):
        equal = equal[shortest[equal] > position]
        equal = equal[text[starts[equal] + position] == text[starts[equal + 1] + position]]
        if equal.size == 0:
            break
        shared[equal] = position + 1
    return shared
