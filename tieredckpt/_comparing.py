"""Compares two steps by the digests of their chunks; reads values only where the chunks are cut in different ways."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from operator import add, itemgetter
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from tieredckpt._batches import batches
from tieredckpt.engine.engine import Engine
from tieredckpt.engine.inventory import scalar_of
from tieredckpt.engine.restoring.pieces import Form
from tieredckpt.engine.restoring.reader import fill
from tieredckpt.engine.restoring.source import StepSource
from tieredckpt.engine.restoring.targets import empty_targets
from tieredckpt.format.boxes import Box
from tieredckpt.format.grid import cell_box, cells
from tieredckpt.format.keys import LEAF_KEY, ROOT, child_key
from tieredckpt.format.layout import block_key
from tieredckpt.format.manifest import StepId, StepIndex
from tieredckpt.format.structure import CONTAINERS, ArrayNode, ContainerNode, Node, ObjectNode, TypedNode, names_of
from tieredckpt.format.zarr import dtype_from_name
from tieredckpt.sync import SyncStore
from tieredckpt.tree.select import choose, select

__all__ = ["ONLY", "Comparison", "Difference", "Side", "compare"]

ONLY = ("only in STEP", "only in OTHER")
"""What a `Difference` says of a leaf that only one step has."""

_PART = 512 << 20
"""Bytes of one side that are read together; a larger chunk is read alone."""


@dataclass(frozen=True, slots=True)
class Side:
    """One of two steps that are compared: its store, which is open, and its index there."""

    store: SyncStore
    step: StepId
    index: StepIndex

    @classmethod
    def of(cls, store: SyncStore, number: int, serial: int | None) -> Side:
        """The step of that number, as it was saved. Raises as `SyncStore.describe`."""

        async def look(engine: Engine) -> Side:
            async with StepSource.open(engine.state, engine.state.find(number, serial)) as source:
                return cls(store, source.step, source.index)

        return store._run(store._life.look(look))

    def read(self, forms: Mapping[str, Form]) -> dict[str, npt.NDArray[Any]]:
        """Boxes of arrays by `block_key`, verified. Raises `NotFound`, `Corrupt` and `TierUnavailable`."""

        async def look(engine: Engine) -> dict[str, npt.NDArray[Any]]:
            async with StepSource.open(engine.state, self.step) as source:
                targets = await asyncio.to_thread(empty_targets, self.step, forms)
                await fill(engine.state, source, targets)
                return targets

        return self.store._run(self.store._life.look(look))


@dataclass(frozen=True, slots=True)
class Difference:
    """A leaf or a container that is not the same in both steps."""

    key: str
    """Empty for the root."""
    what: tuple[str, ...]
    """One of `ONLY`; or what differs: ``kind``, ``dtype``, ``shape``, ``values``, ``value``; of containers ``about``,
    data besides the children, or ``keys``, the order of the children or the type of their names."""
    before: Mapping[str, Any] | None
    """In the first step: its kind, and what else it is, under those names; None if it is not there."""
    after: Mapping[str, Any] | None
    """In the other step."""
    chunks: int = 0
    """Of the array in the other step."""
    differing_chunks: int = 0
    differing_nbytes: int = 0
    """Bytes of the array in these chunks."""

    @property
    def of_array(self) -> bool:
        """Whether an array is in either step."""
        return "dtype" in {**(self.before or {}), **(self.after or {})}


@dataclass(frozen=True, slots=True)
class Comparison:
    """How two steps differ."""

    differences: tuple[Difference, ...]
    """In the order of the tree."""
    same_arrays: int
    nbytes: int
    """Bytes of all compared arrays of the other step."""


@dataclass
class _Cells:
    """The chunks of an array in the other step, and how many of them differ."""

    node: ArrayNode
    chunks: int = 0
    differing: int = 0
    nbytes: int = 0
    """Bytes of the array in those."""
    unread: list[Box] = field(default_factory=list)
    """Those that the first step has not cut alike, so that digests do not tell."""

    def differs(self, box: Box) -> None:
        self.differing += 1
        self.nbytes += self.nbytes_of(box.shape)

    def nbytes_of(self, shape: tuple[int, ...]) -> int:
        return prod(shape) * dtype_from_name(self.node.dtype).itemsize


def compare(
    one: Side, other: Side, keys: Sequence[str] | None = None, progress: Callable[[float], None] = lambda part: None
) -> Comparison:
    """Compare two steps bit for bit: NaN is the same as NaN with the same bits, and -0.0 is not 0.0.

    Args:
        one: the first step.
        other: the other one.
        keys: only the leaves that these choose in either step, as in `select`.
        progress: told each part of what has to be read; all of it is 1.

    Raises:
        NotFound: one of ``keys`` chooses nothing in both steps; or a step has left its store meanwhile.
        Corrupt, TierUnavailable: values that have to be read cannot be.
    """
    first, second = one.index.record.structure, other.index.record.structure
    pairs = list(_pairs(first, second))
    if keys is not None:
        ends = [key for key, a, b in pairs if _is_end(a) or _is_end(b)]
        chosen: set[str] = set()
        for pattern, found in choose(keys, ends):
            if not found:
                select(first, [pattern], f"{one.step}, as {other.step},")  # which raises, with near misses
            chosen.update(found)
        pairs = [pair for pair in pairs if pair[0] in chosen]
    arrays = {key: _compare_digests(one.index, other.index, a, b) for key, a, b in pairs if isinstance(b, ArrayNode)}
    _compare_values(one, other, arrays.values(), progress)
    told = {key: _difference(key, a, b, arrays.get(key)) for key, a, b in pairs}
    differences = tuple([each for each in told.values() if each is not None])
    nbytes = sum(each.nbytes_of(each.node.shape) for each in arrays.values())
    return Comparison(differences, sum(told[key] is None for key in arrays), nbytes)


def _pairs(one: Node, other: Node) -> Iterator[tuple[str, Node | None, Node | None]]:
    """Path and both nodes of everything in either of two trees, parents first; None where one tree lacks it."""
    root = ROOT if isinstance(one, CONTAINERS) or isinstance(other, CONTAINERS) else LEAF_KEY
    stack: list[tuple[str, Node | None, Node | None]] = [(root, one, other)]
    while stack:
        path, a, b = stack.pop()
        yield path, a, b
        below: dict[str, list[Node | None]] = {}
        for side, node in enumerate((a, b)):
            if isinstance(node, CONTAINERS):
                for name, child in zip(names_of(node), node.children, strict=True):
                    below.setdefault(child_key(path, name), [None, None])[side] = child
        stack += [(key, a, b) for key, (a, b) in reversed(below.items())]


def _is_end(node: Node | None) -> bool:
    """Whether there is a node with nothing below it."""
    return node is not None and not (isinstance(node, CONTAINERS) and node.children)


def _compare_digests(index: StepIndex, other: StepIndex, a: Node | None, b: ArrayNode) -> _Cells:
    """Compare an array without its bytes.

    A chunk is zero where it reaches beyond the array. So chunks with cells of one shape, at one place of the array,
    have equal values exactly if their digests are equal.
    """
    found = _Cells(b)
    alike = isinstance(a, ArrayNode) and (a.dtype, a.shape) == (b.dtype, b.shape)
    known = {(box, cell): digest for box, cell, digest in _chunks(index, b.key)} if alike else {}
    for box, cell, digest in _chunks(other, b.key):
        found.chunks += 1
        there = known.get((box, cell))
        if alike and there is None:
            found.unread.append(box)
        elif there != digest:
            found.differs(box)
    return found


def _chunks(index: StepIndex, key: str) -> Iterator[tuple[Box, tuple[int, ...], bytes]]:
    """Every chunk of an array: the box of the array that it has, the shape of its cell, and its digest."""
    for block, name in index.blocks(key):
        grid = index.arrays[name].grid
        for cell, chunk in zip(cells(grid), index.arrays[name].chunks, strict=True):
            part = cell_box(grid, cell.index)
            yield Box(tuple(map(add, block.offset, part.offset)), part.shape), grid.cell, chunk.digest


def _compare_values(one: Side, other: Side, arrays: Iterable[_Cells], progress: Callable[[float], None]) -> None:
    """Read, some at a time, what digests do not tell about."""
    unread = [(each, box, each.nbytes_of(box.shape)) for each in arrays for box in each.unread]
    whole = sum(nbytes for _, _, nbytes in unread)
    for part in batches(unread, itemgetter(2), _PART):
        names = [block_key(each.node.key, box.offset) for each, box, _ in part]
        forms = [Form(box.shape, dtype_from_name(each.node.dtype)) for each, box, _ in part]
        wanted = dict(zip(names, forms, strict=True))
        here, there = one.read(wanted), other.read(wanted)
        for name, (each, box, _) in zip(names, part, strict=True):
            if not np.array_equal(here[name].view(np.uint8), there[name].view(np.uint8)):
                each.differs(box)
        progress(sum(nbytes for _, _, nbytes in part) / whole)


def _difference(key: str, a: Node | None, b: Node | None, found: _Cells | None) -> Difference | None:
    one, other = _form(a), _form(b)
    if a is None or b is None or one is None or other is None:
        # A container with leaves differs by these.
        what = [ONLY[a is None]] if _is_end(a) or _is_end(b) else []
    elif isinstance(a, ArrayNode) and isinstance(b, ArrayNode):
        what = [name for name in one if one[name] != other[name]]
        if found is not None and found.differing and what in ([], ["kind"]):
            what.append("values")
    elif one["kind"] != other["kind"]:
        what = ["kind"]
    elif isinstance(a, CONTAINERS) and isinstance(b, CONTAINERS):
        one["keys"], other["keys"] = _unlike_names(key, a, b)
        what = [name for name in ("about", "keys") if one.get(name) != other.get(name)]
    else:
        what = ["value"] if msgspec.json.encode(a) != msgspec.json.encode(b) else []
    if not what:
        return None
    counts = () if found is None else (found.chunks, found.differing, found.nbytes)
    return Difference(key, tuple(what), one, other, *counts)


def _form(node: Node | None) -> dict[str, Any] | None:
    """What a node is, without the values of an array and without children."""
    if node is None:
        return None
    if isinstance(node, ArrayNode):
        kind = node.kind if node.prng is None else f"{node.kind} {node.prng}"
        return {"kind": kind, "dtype": node.dtype, "shape": node.shape}
    kind = node.of if isinstance(node, TypedNode | ObjectNode) else str(node.__struct_config__.tag)
    if not isinstance(node, CONTAINERS):
        return {"kind": kind, "value": scalar_of(node)}
    about = node.about if isinstance(node, TypedNode) else None
    return {"kind": kind} | ({} if about is None else {"about": msgspec.json.encode(about).decode()})


def _unlike_names(key: str, a: ContainerNode, b: ContainerNode) -> tuple[list[str | int], list[str | int]]:
    """The names of the children that both containers have, from the first that is another, or of another type."""
    sides = [{child_key(key, name): name for name in names_of(node)} for node in (a, b)]
    common = sides[0].keys() & sides[1].keys()
    one, other = ([name for path, name in side.items() if path in common] for side in sides)
    first = next((at for at, (x, y) in enumerate(zip(one, other, strict=True)) if x != y), len(one))
    return one[first:], other[first:]
