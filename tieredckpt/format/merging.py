"""Merge the parts of all ranks into one step: one structure, one set of arrays, one record."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import filterfalse, islice
from typing import TypeAlias

import msgspec

from tieredckpt.errors import Conflict
from tieredckpt.format.joining import join
from tieredckpt.format.keys import LEAF_KEY, ROOT, child_key, show_key
from tieredckpt.format.layout import parse_block_key
from tieredckpt.format.manifest import ArrayIndex, Chunk, StepIndex, StepRecord
from tieredckpt.format.ocdbt import Extent
from tieredckpt.format.part import Part, PartArray
from tieredckpt.format.replicas import ReplicasDisagree, differences, show_difference, show_ranks
from tieredckpt.format.scalars import scalar_value
from tieredckpt.format.structure import (
    CONTAINERS,
    MAP,
    ArrayNode,
    ContainerNode,
    DictNode,
    Node,
    ObjectNode,
    TypedNode,
    is_dict,
    names_of,
    with_children,
)

__all__ = ["merge", "merge_structures", "show_ranks"]

_Group: TypeAlias = list[tuple[int, Node]]
"""Nodes at one path of the tree, one for each different node, with the lowest rank that has it."""


def merge(parts: Iterable[Part]) -> StepIndex:
    """Merge the parts of all ranks into a step; blocks on one grid are joined.

    The record is the lowest rank's, but with the structure and metrics of all, and without a rank.

    Raises:
        Conflict: a rank is missing or there twice, or ranks contradict each other; the message says which ranks
            and which key.
    """
    ordered = sorted(parts, key=_rank)
    record = _record(ordered)
    structure = merge_structures({_rank(part): part.record.structure for part in ordered})
    pieces = _arrays(ordered)
    # A million chunks take hundreds of MiB: the parts are freed before the whole is made.
    ordered.clear()
    arrays = join(structure, pieces)
    nbytes = sum(array.grid.nbytes for array in arrays.values())
    return StepIndex(msgspec.structs.replace(record, structure=structure, nbytes=nbytes), arrays)


def merge_structures(structures: Mapping[int, Node]) -> Node:
    """Merge the structures of all ranks, given by rank, into that of the whole tree.

    At every path all must have a container of one kind, or equal leaves. Dicts may have different keys, whatever the
    keys are: the merged one has all of them, in the order of the lowest rank that has them. Other containers are alike.

    Raises:
        Conflict: they differ; the message names path and ranks.
    """
    group = [(rank, structures[rank]) for rank in sorted(structures)]
    root = ROOT if isinstance(group[0][1], CONTAINERS) else LEAF_KEY
    return _merged(root, group)


def _rank(part: Part) -> int:
    rank = part.record.rank
    assert rank is not None  # encode_part and decode_part see to it
    return rank


def _record(parts: Sequence[Part]) -> StepRecord:
    """The record of the step without its structure and size; checks that all ranks are there and agree on the step."""
    if not parts:
        raise Conflict("no rank has a part of the step")
    first = parts[0].record
    ranks = [_rank(part) for part in parts]
    there = set(ranks)
    if (missing := first.ranks - len(there)) > 0:
        # One by one: a damaged record may name more ranks than fit in memory.
        absent = islice(filterfalse(there.__contains__, range(first.ranks)), 10)
        raise Conflict(f"{first.id} is not whole: {show_ranks(absent, missing)} of {first.ranks} did not contribute")
    metrics: dict[str, float | str] = {}
    for rank, part in zip(ranks, parts, strict=True):
        record = part.record
        for name in ("store", "step", "serial", "restored_from", "ranks"):
            ours, theirs = getattr(first, name), getattr(record, name)
            if ours != theirs:
                raise Conflict(
                    f"{first.id}: ranks {ranks[0]} and {rank} do not mean one step: {name} is {ours!r} and {theirs!r}"
                )
        if record.run != first.run:
            raise Conflict(f"{first.id}: ranks {ranks[0]} and {rank} have parts of it that different runs saved")
        metrics = {**record.metrics, **metrics}
    if len(ranks) != len(there):
        raise Conflict(f"{first.id} has two parts of one rank")
    return msgspec.structs.replace(first, rank=None, metrics=metrics)


def _merged(path: str, group: _Group) -> Node:
    group = _distinct(group)
    if any(isinstance(node, TypedNode) and node.of == MAP for _, node in group):
        group = [(rank, _as_map(node)) for rank, node in group]
    rank, first = group[0]
    if len(group) == 1:
        return first
    for other, node in group[1:]:
        if type(node) is not type(first):
            raise _differ(path, rank, other, f"{_show(first)} and {_show(node)}")
    if not isinstance(first, CONTAINERS):
        raise _differ(path, rank, group[1][0], f"{_show(first)} and {_show(group[1][1])}")
    children: dict[str | int, _Group] = {}
    for seen, node in group:
        assert isinstance(node, CONTAINERS)
        names = names_of(node)
        if (not is_dict(first) and list(names) != list(names_of(first))) or _typed(node) != _typed(first):
            raise _differ(path, rank, seen, f"{_show(first)} and {_show(node)}, which only dicts may have of their own")
        for name, child in zip(names, node.children, strict=True):
            children.setdefault(name, []).append((seen, child))
    paths: dict[str, str | int] = {}
    for name, below in children.items():
        key = child_key(path, name)
        if paths.setdefault(key, name) is not name:
            raise _differ(key, children[paths[key]][0][0], below[0][0], f"{paths[key]!r} and {name!r}")
    merged = [_merged(child_key(path, name), below) for name, below in children.items()]
    return with_children(first, list(children), merged)


def _as_map(node: Node) -> Node:
    """A dict as a map, if its children have the same names there; anything else as it is."""
    if isinstance(node, DictNode) and all(isinstance(name, str) and name[:1] != "=" for name in node.keys):
        return TypedNode(node.keys, node.children, MAP)
    return node


def _typed(node: ContainerNode) -> object:
    return (node.of, node.about) if isinstance(node, TypedNode) else None


def _distinct(group: _Group) -> _Group:
    """The distinct nodes of a group. Ranks with equal files share the same object."""
    seen: set[int] = set()
    found: _Group = []
    for rank, node in group:
        if id(node) not in seen:
            seen.add(id(node))
            if not found or node != found[0][1]:
                found.append((rank, node))
    return found


def _show(node: Node) -> str:
    if isinstance(node, ArrayNode):
        return f"an array ({node.kind}, {node.dtype}, shape {node.shape})"
    if isinstance(node, ObjectNode):
        return f"a {node.of} {node.value!r:.100}"
    if isinstance(node, CONTAINERS):
        kind = node.of if isinstance(node, TypedNode) else type(node).__name__.removesuffix("Node").lower()
        return f"a {kind} of {len(node.children)}"
    return f"{scalar_value(node)!r:.100}"


def _differ(path: str, one: int, other: int, what: str) -> Conflict:
    return Conflict(
        f"ranks {one} and {other} disagree at {show_key(path)}: {what}; save it under a key of its own for each "
        "rank, or make it the same on all"
    )


def _arrays(parts: Sequence[Part]) -> dict[str, ArrayIndex]:
    """Every array and block once, with the places of all its chunks."""
    found: dict[str, tuple[int, PartArray]] = {}
    again: list[tuple[str, int, PartArray]] = []
    for part in parts:
        rank = _rank(part)
        for key, array in part.arrays.items():
            if found.setdefault(key, (rank, array))[1] is not array:
                again.append((key, rank, array))
    wrong: dict[str, dict[int, list[bytes]]] = {}
    for key, rank, array in again:
        owner, first = found[key]
        if array.grid != first.grid or array.dtype != first.dtype:
            raise Conflict(f"ranks {owner} and {rank} cut {_show_array(key)} in different ways")
        if _digests(array) != _digests(first):
            wrong[key] = {owner: _digests(first)}
    if wrong:
        for key, rank, array in again:
            if key in wrong:
                wrong[key][rank] = _digests(array)
        raise _disagree(wrong)
    # A chunk that an owner leaves to another rank may be in that rank's copy of the same array, or in any other array.
    everywhere = [array for _, array in found.values()] + [array for _, _, array in again]
    places = _places(everywhere)
    return {key: _located(key, array, places) for key, (_, array) in found.items()}


def _digests(array: PartArray) -> list[bytes]:
    return [digest for digest, _ in array.chunks]


def _disagree(arrays: Mapping[str, Mapping[int, Sequence[bytes]]]) -> ReplicasDisagree:
    found = differences(arrays)
    told = "; ".join(map(show_difference, found[:4]))
    return ReplicasDisagree(
        f"{told}. Save it under a key of its own for each rank, or as shards of one array; if it should be the same on "
        "all, memory or computation of a rank is wrong",
        found,
    )


def _show_array(name: str) -> str:
    """An array, or a block of one, for a message."""
    block = parse_block_key(name)
    return f"array {name!r}" if block is None else f"the shard of array {block[0]!r} at {list(block[1])}"


def _places(arrays: Iterable[PartArray]) -> dict[bytes, Extent | bytes]:
    """Places of the chunks that some rank leaves to another."""
    arrays = list(arrays)
    wanted = {digest for array in arrays for digest, where in array.chunks if where is None}
    if not wanted:
        return {}
    return {
        digest: where for array in arrays for digest, where in array.chunks if where is not None and digest in wanted
    }


def _located(key: str, array: PartArray, places: Mapping[bytes, Extent | bytes]) -> ArrayIndex:
    chunks = [chunk for chunk in array.chunks if isinstance(chunk, Chunk)]
    if len(chunks) == len(array.chunks):
        return ArrayIndex(array.grid, array.dtype, chunks)
    chunks = []
    for digest, where in array.chunks:
        place = places.get(digest) if where is None else where
        if place is None:
            raise Conflict(f"a chunk of {_show_array(key)} was left to another rank, and no rank wrote it")
        chunks.append(Chunk(digest, place))
    return ArrayIndex(array.grid, array.dtype, chunks)
