"""Flatten a tree to its structure and arrays; unflatten them to plain containers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

from tieredckpt.devices.base import Device, Event
from tieredckpt.errors import Corrupt, Invalid, NotFound
from tieredckpt.format.keys import LEAF_KEY, MAX_KEY_BYTES, ROOT, child_key, show_key
from tieredckpt.format.scalars import scalar_node, scalar_value
from tieredckpt.format.structure import (
    CONTAINERS,
    MAX_DEPTH,
    ArrayNode,
    ListNode,
    Node,
    NoneNode,
    ObjectNode,
    TupleNode,
    TypedNode,
    container,
    names_of,
)
from tieredckpt.format.zarr import dtype_from_name
from tieredckpt.tree.arrays import MadeAs, as_array_leaf, made
from tieredckpt.tree.containers import NAMESPACE, Opened, open_container
from tieredckpt.tree.device_target import DeviceTarget, Filled
from tieredckpt.tree.leaf import ArrayLeaf, Pieces, array_node
from tieredckpt.tree.objects import object_node, restored_object
from tieredckpt.tree.typed import made_typed

__all__ = [
    "Flat",
    "Replicated",
    "Skeleton",
    "flat_of",
    "flatten",
    "plain_tree",
    "skeleton",
    "stored_array",
    "unflatten",
]

_NAMED_IN_ERRORS = (*CONTAINERS, ObjectNode)


@dataclass(frozen=True, slots=True)
class Replicated:
    """Leaves that several ranks hold alike, cut into pieces; each rank stores some of the pieces."""

    ranks: tuple[int, ...]
    here: tuple[str, ...]
    """Storage keys of the pieces that this rank stores."""
    elsewhere: tuple[ArrayLeaf, ...]
    """The other pieces, as this rank has them."""


@dataclass(frozen=True, slots=True)
class Flat:
    """A flattened tree: its structure, and its arrays in the same order, or the pieces of them that are here."""

    structure: Node
    arrays: tuple[ArrayLeaf, ...]
    in_pieces: bool = False
    """Whether some array is given in pieces."""
    replicated: tuple[Replicated, ...] = ()
    """Leaves of which this rank stores a share."""
    form: object = None
    """The common form of trees that differ only in values; None where it is not known."""
    ready: Mapping[Device, Event] = field(default_factory=dict)
    """For each device that holds some of the arrays: completes when they have the values to save."""


@dataclass(frozen=True, slots=True)
class Skeleton:
    """A flattened tree: its structure, its arrays in the same order, and the opened containers, outermost first."""

    structure: Node
    arrays: tuple[ArrayLeaf | Pieces, ...]
    containers: tuple[Opened, ...]
    objects: Mapping[str, object]
    """The small objects, by path."""

    @property
    def leaves(self) -> tuple[ArrayLeaf, ...]:
        """The arrays; for an array that is given in pieces, its pieces."""
        found: list[ArrayLeaf] = []
        for array in self.arrays:
            found += (array,) if isinstance(array, ArrayLeaf) else array.leaves
        return tuple(found)


@dataclass(slots=True)
class _Frame:
    """A container that is being flattened: its pending children, and the nodes of those that are done."""

    value: object
    pending: Iterator[tuple[int, str, object]]
    nodes: list[Node]


def flatten(tree: object) -> Flat:
    """The structure and arrays of ``tree``.

    Leaves are arrays (NumPy, torch, jax), shards of arrays (see `as_array_leaf`), NumPy scalars, int, float,
    complex, bool, str, bytes and None, and the small objects of `tieredckpt.tree.objects`; for containers see
    `tieredckpt.tree.containers`, for keys `tieredckpt.format.keys`. Arrays are not read.

    Raises `Invalid`, naming the key, for any other object, a leaf that cannot be stored, two children of one
    key, a container inside itself, and one deeper than `MAX_DEPTH`.
    """
    return flat_of(skeleton(tree, as_array_leaf))


def flat_of(found: Skeleton) -> Flat:
    """The structure and arrays of a tree with this skeleton."""
    in_pieces = any(isinstance(array, Pieces) for array in found.arrays)
    return Flat(found.structure, found.leaves, in_pieces=in_pieces)


def skeleton(
    tree: object,
    as_array: Callable[[str, object], ArrayLeaf | Pieces | None],
    as_object: Callable[[str, object], Node | None] = object_node,
) -> Skeleton:
    """Flatten ``tree``; ``as_array`` recognizes arrays, and ``as_object`` small objects."""
    arrays: list[ArrayLeaf | Pieces] = []
    containers: list[Opened] = []
    objects: dict[str, object] = {}
    frames: list[_Frame] = []

    def enter(path: str, value: object) -> Node:
        opened = open_container(path, value)
        if opened is None:
            node = as_object(path or LEAF_KEY, value)
            if node is not None:
                objects[path or LEAF_KEY] = value
                return node
            stateful = hasattr(type(value), "state_dict")  # as modules and optimizers of torch
            raise Invalid(
                f"leaf {path or LEAF_KEY!r}: a {_type_name(value)} cannot be stored; "
                f"{'give its state_dict(), ' if stateful else ''}keep it out of the tree, convert it to arrays and "
                f"scalars, or register its type with optree (namespace={NAMESPACE!r})"
            )
        if any(frame.value is value for frame in frames):
            raise Invalid(f"{show_key(path)}: a {type(value).__name__} contains itself; break the cycle")
        if len(frames) == MAX_DEPTH:
            raise Invalid(f"{show_key(path[:64])}…: the tree nests deeper than {MAX_DEPTH} containers")
        nodes: list[Node] = [NoneNode()] * len(opened.children)
        keys = _child_keys(path, opened)
        pending = zip(range(len(nodes)), keys, opened.children, strict=True)
        containers.append(opened)
        frames.append(_Frame(value, pending, nodes))
        return container(opened.kind, opened.names, nodes, opened.of, opened.about)

    def visit(path: str, key: str, value: object) -> Node:
        scalar = scalar_node(key, value)
        if scalar is not None:
            return scalar
        try:
            leaf = as_array(key, value)
        except OSError as error:  # when the modules for torch or jax arrays are imported
            raise Invalid(f"leaf {key!r}: a {_type_name(value)} could not be looked at: {error}") from error
        if leaf is None:
            return enter(path, value)
        if len(key) * 4 > MAX_KEY_BYTES and len(key.encode()) > MAX_KEY_BYTES:
            raise Invalid(f"leaf {key[:64]!r}…: the key takes more than {MAX_KEY_BYTES} bytes; shorten it")
        arrays.append(leaf)
        return array_node(leaf) if isinstance(leaf, ArrayLeaf) else leaf.node

    # An explicit stack: the depth of a tree must not depend on how deep the caller's own calls are.
    structure = visit(ROOT, LEAF_KEY, tree)
    while frames:
        frame = frames[-1]
        depth = len(frames)
        for i, key, value in frame.pending:
            frame.nodes[i] = visit(key, key, value)
            if len(frames) > depth:
                break
        else:
            frames.pop()
    return Skeleton(structure, tuple(arrays), tuple(containers), objects)


def unflatten(structure: Node, arrays: Mapping[str, Filled], kind: MadeAs = "numpy", path: str = ROOT) -> object:
    """The tree of ``structure``, at ``path``, in plain containers, with ``arrays`` by key as leaves.

    Lists stay lists and tuples tuples, and objects that `tieredckpt.tree.typed` and `tieredckpt.tree.objects` know come
    back as they were. Dicts, namedtuples, dataclasses and custom containers become dicts of their children by name.
    `made` makes the arrays, of ``kind``. Raises `NotFound` for a missing array, `Corrupt` for one of another dtype or
    shape and for malformed nodes, and `Invalid` for a leaf or container that cannot be made.
    """

    def leaf(node: ArrayNode) -> object:
        array = stored_array(node, arrays)
        assert not isinstance(array, DeviceTarget), "without an example, arrays are made on the host"
        return made(node, array, kind)

    return plain_tree(structure, leaf, path)


def plain_tree(structure: Node, leaf: Callable[[ArrayNode], object], path: str = ROOT) -> object:
    """Unflatten ``structure`` as `unflatten` does; ``leaf`` makes each array."""
    if isinstance(structure, ArrayNode):
        return leaf(structure)
    if isinstance(structure, ObjectNode):
        return restored_object(path or LEAF_KEY, structure)
    if not isinstance(structure, CONTAINERS):
        return scalar_value(structure)
    names = names_of(structure)
    children = []
    for name, child in zip(names, structure.children, strict=True):
        below = child_key(path, name) if isinstance(child, _NAMED_IN_ERRORS) else ""
        children.append(plain_tree(child, leaf, below))  # a comprehension costs a frame per level
    if isinstance(structure, ListNode):
        return children
    if isinstance(structure, TupleNode):
        return tuple(children)
    if isinstance(structure, TypedNode):
        return made_typed(path, structure, children)
    return dict(zip(names, children, strict=True))


def stored_array(node: ArrayNode, arrays: Mapping[str, Filled]) -> Filled:
    """The array that ``node`` names, in the dtype that it names (zarr keeps times as int64).

    Raises `NotFound` for a missing array, `Corrupt` for one of another dtype or shape.
    """
    array = arrays.get(node.key)
    if array is None:
        raise NotFound(f"array {node.key!r} is named by the tree's structure and was not given")
    dtype = dtype_from_name(node.dtype)
    if (
        dtype.kind in "mM"
        and not isinstance(array, DeviceTarget)
        and array.dtype == np.dtype(np.int64).newbyteorder(dtype.byteorder)
    ):
        array = array.view(dtype)
    if array.shape != node.shape or array.dtype != dtype:
        raise Corrupt(
            f"array {node.key!r} is {array.dtype}{list(array.shape)}; "
            f"the tree's structure says {node.dtype}{list(node.shape)}"
        )
    return array


def _child_keys(path: str, opened: Opened) -> list[str]:
    keys = [child_key(path, name) for name in opened.names]
    if len(set(keys)) != len(keys):
        seen: dict[str, str | int] = {}
        for key, name in zip(keys, opened.names, strict=True):
            if key in seen:
                raise Invalid(
                    f"{show_key(path)}: the children {seen[key]!r} and {name!r} would both have "
                    f"the key {key!r}; rename one"
                )
            seen[key] = name
    return keys


def _type_name(value: object) -> str:
    cls = type(value)
    return cls.__name__ if cls.__module__ == "builtins" else f"{cls.__module__}.{cls.__qualname__}"
