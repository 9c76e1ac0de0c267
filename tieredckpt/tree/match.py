"""A stored structure against the tree that a reader gives as ``like``, and the restored tree in its image."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import msgspec
import numpy.typing as npt

from tieredckpt.errors import Invalid, TieredCkptError
from tieredckpt.format.keys import show_key
from tieredckpt.format.structure import (
    CONTAINERS,
    ArrayNode,
    CustomNode,
    DataclassNode,
    DictNode,
    NamedTupleNode,
    Node,
    NoneNode,
    ObjectNode,
    TypedNode,
    scalar_value,
    walk,
)
from tieredckpt.tree.arrays import as_template, restored, restored_pieces
from tieredckpt.tree.containers import Opened
from tieredckpt.tree.flatten import skeleton, stored_array, unflatten
from tieredckpt.tree.leaf import ArrayLeaf, Pieces
from tieredckpt.tree.objects import ENUM, object_node, restored_object
from tieredckpt.tree.typed import DEQUE, TENSOR

__all__ = ["AS_SAVED", "Match", "match"]

_SHOWN = 20


class _AsSaved:
    def __repr__(self) -> str:
        return "AS_SAVED"

    def __reduce__(self) -> str:
        return "AS_SAVED"  # a copy of it is itself


AS_SAVED: Final = _AsSaved()
"""A leaf of ``like`` or ``into`` for whatever the step has there, a leaf or a whole tree: it comes back as without
``like``, with arrays as ``as_="saved"`` has them."""


@dataclass(frozen=True, slots=True)
class Match:
    """A ``like`` and the stored structure that fits it."""

    structure: Node
    """Of ``like``, in its own order."""
    leaves: tuple[ArrayLeaf, ...]
    """The arrays of ``like``, in its own order, or the pieces of them that it asks for."""
    as_saved: tuple[ArrayNode, ...]
    """The arrays of the step where ``like`` has `AS_SAVED`."""
    _arrays: tuple[ArrayLeaf | Pieces, ...]
    _containers: tuple[Opened, ...]
    _stored: Mapping[str, Node]
    _objects: Mapping[str, object]

    def build(self, arrays: Mapping[str, npt.NDArray[Any]]) -> object:
        """The restored tree: containers of the types of ``like``, arrays of its kinds, scalars and objects as stored.

        Args:
            arrays: by key of the leaf, of the stored dtypes and of the leaves' shapes. They belong to the tree from
                here on.

        Raises `NotFound` for a missing array, `Corrupt` for one of another dtype or shape, and `Invalid` for
        a container that cannot be made from the restored children.
        """
        nodes = walk(self.structure)
        return _Build(nodes, iter(self._arrays), iter(self._containers), self._stored, arrays, self._objects).next()


@dataclass(frozen=True, slots=True)
class _Build:
    """Consumes nodes, leaves and containers in the order in which `skeleton` met them."""

    nodes: Iterator[tuple[str, Node]]
    leaves: Iterator[ArrayLeaf | Pieces]
    containers: Iterator[Opened]
    stored: Mapping[str, Node]
    arrays: Mapping[str, npt.NDArray[Any]]
    objects: Mapping[str, object]

    def next(self) -> object:
        path, node = next(self.nodes)
        stored = self.stored[path]
        if self.objects.get(path) is AS_SAVED:
            return unflatten(stored, self.arrays, "saved", path)
        if isinstance(stored, ArrayNode):
            leaf = next(self.leaves)
            if isinstance(leaf, ArrayLeaf):
                return restored(leaf, stored_array(stored, self.arrays))
            nodes = [msgspec.structs.replace(stored, key=piece.key, shape=piece.shape) for piece in leaf.leaves]
            return restored_pieces(leaf, {node.key: stored_array(node, self.arrays) for node in nodes})
        if isinstance(stored, ObjectNode):
            return restored_object(path, stored, self.objects.get(path))
        if not isinstance(node, CONTAINERS):
            assert not isinstance(stored, CONTAINERS)
            return scalar_value(stored)
        opened = next(self.containers)
        children = []
        for _ in opened.children:
            children.append(self.next())  # noqa: PERF401  # a comprehension costs a frame per level
        try:
            return opened.make(children)
        except TieredCkptError:
            raise
        except Exception as error:
            raise Invalid(
                f"{show_key(path)}: the {_name(node)} of `like` refused its restored children: {error}"
            ) from error


def match(like: object, structure: Node, *, part: bool = False) -> Match:
    """``structure`` as fitting ``like``, or one `Invalid` that lists every difference.

    Args:
        like: a tree as `flatten` takes it, whose arrays may also be torch meta tensors and
            `jax.ShapeDtypeStruct`. An array matches one of the same dtype and shape of any library, and a shard
            an array of its global shape; a typed PRNG key one of the same implementation; a scalar or small object
            one of its type, whatever the value, but the member of an enum only one whose name and value its class
            has; a wrapper tensor one of the same description. Containers match those of their kind (dict, list,
            tuple, namedtuple, dataclass, custom, and those that are stored with their type) with the same keys, in
            any order; a dict key ``1`` matches ``"1"``. `AS_SAVED` matches whatever is there.
        structure: as stored.
        part: ``like`` may leave out what the step has.
    """
    wanted = skeleton(like, as_template, _as_object)
    wanted_structure = wanted.structure
    stored = dict(walk(structure))
    if not wanted.objects and wanted_structure == structure:
        return Match(wanted_structure, wanted.leaves, (), wanted.arrays, wanted.containers, stored, {})
    likes = dict(walk(wanted_structure))
    unseen = [path for path, value in wanted.objects.items() if value is AS_SAVED and path in stored]
    as_saved = {path: node for top in unseen for path, node in walk(stored[top], top)}
    if isinstance(wanted_structure, CONTAINERS) != isinstance(structure, CONTAINERS):
        raise Invalid(
            f"`like` does not fit the step: `like` is one {_show(wanted_structure)}, the step one {_show(structure)}"
        )
    missing = [path for path, node in likes.items() if path not in stored and _is_end(node)]
    known = likes.keys() | as_saved
    extra = [] if part else [path for path, node in stored.items() if path not in known and _is_end(node)]
    mismatched = [
        f"{show_key(path)} ({why})"
        for path, node in likes.items()
        if path in stored and path not in as_saved and (why := _difference(path, node, stored[path], wanted.objects))
    ]
    if missing or extra or mismatched:
        parts = [
            _listed("missing from the step", [repr(path) for path in missing]),
            _listed("only in the step", [repr(path) for path in extra]),
            _listed("different", mismatched),
        ]
        raise Invalid(
            f"`like` does not fit the step: {'; '.join(part for part in parts if part)}. "
            f"Change `like`, restore a part with `keys`, or restore without `like` to see what is there"
        )
    arrays = tuple(node for node in as_saved.values() if isinstance(node, ArrayNode))
    return Match(wanted_structure, wanted.leaves, arrays, wanted.arrays, wanted.containers, stored, wanted.objects)


def _as_object(key: str, value: object) -> Node | None:
    return NoneNode() if value is AS_SAVED else object_node(key, value)


def _is_end(node: Node) -> bool:
    return not (isinstance(node, CONTAINERS) and node.children)


def _difference(path: str, like: Node, stored: Node, objects: Mapping[str, object]) -> str:
    """Why ``stored`` is not as ``like``; empty when it is."""
    if type(stored) is ArrayNode and like == stored:  # as most are
        return ""
    if not _fits(like, stored):
        return f"like: {_show(like)}, step: {_show(stored)}"
    if isinstance(stored, ObjectNode):
        try:
            restored_object(path, stored, objects.get(path))
        except Invalid as error:
            return str(error)
    return ""


def _fits(like: Node, stored: Node) -> bool:
    if isinstance(like, ArrayNode) and isinstance(stored, ArrayNode):
        return (like.dtype, like.shape, like.prng) == (stored.dtype, stored.shape, stored.prng)
    if _is_plain_form(like, stored):
        return True
    if isinstance(like, ObjectNode) and isinstance(stored, ObjectNode):
        return like.of == stored.of
    if isinstance(like, TypedNode) and isinstance(stored, TypedNode):
        return like.of == stored.of and (like.of != TENSOR or like.about == stored.about)
    if isinstance(like, TypedNode) and like.of == DEQUE:
        return isinstance(stored, CustomNode)  # as deques were stored before they had a kind of their own
    return type(like) is type(stored)


def _is_plain_form(like: Node, stored: Node) -> bool:
    """Whether ``like`` is what a restore without one gives for ``stored``, which has no class."""
    if isinstance(stored, ObjectNode):
        return stored.of == ENUM and not isinstance(like, (ArrayNode, ObjectNode, *CONTAINERS))
    return isinstance(like, DictNode) and isinstance(stored, NamedTupleNode | DataclassNode | CustomNode)


def _show(node: Node) -> str:
    if not isinstance(node, ArrayNode):
        return _name(node)
    shape = ", ".join(map(str, node.shape))
    return f"{node.dtype}[{shape}]" if node.prng is None else f"PRNG key {node.prng} of {node.dtype}[{shape}]"


def _name(node: Node) -> str:
    tag = node.of if isinstance(node, TypedNode | ObjectNode) else type(node).__struct_config__.tag
    return f"{tag} of {len(node.children)}" if isinstance(node, CONTAINERS) else str(tag)


def _listed(title: str, items: list[str]) -> str:
    if not items:
        return ""
    rest = f" and {len(items) - _SHOWN} more" if len(items) > _SHOWN else ""
    return f"{len(items)} {title}: {', '.join(items[:_SHOWN])}{rest}"
