"""The form of a tree (containers, names, and the shapes and dtypes of arrays), and trees that have it again.

A training saves the same tree over and over with other values, and restores into it. The results of the first `flatten`
are kept; a later tree is only compared with them, column by column, mostly without a call for each leaf.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat
from operator import attrgetter, eq
from typing import Any, Final, TypeGuard

import msgspec

from tieredckpt.errors import Invalid
from tieredckpt.format.keys import LEAF_KEY, ROOT, child_key, show_key
from tieredckpt.format.scalars import scalar_node, scalar_value
from tieredckpt.format.structure import (
    CONTAINERS,
    ArrayNode,
    ContainerNode,
    DictNode,
    Kind,
    Node,
    NoneNode,
    ObjectNode,
    TypedNode,
    names_of,
    walk,
    with_children,
)
from tieredckpt.tree.arrays import as_array_leaf, looks, restored
from tieredckpt.tree.containers import dict_with, make_container, open_container
from tieredckpt.tree.device_target import Filled
from tieredckpt.tree.flatten import Flat, Skeleton, flat_of, skeleton
from tieredckpt.tree.leaf import ArrayLeaf
from tieredckpt.tree.objects import object_node, restored_object

__all__ = ["Flattener", "Refill"]

_ONE_BY_ONE: Final = ("jax", "jax-key")
"""Kinds of arrays whose leaves hold more than `looks` compares: their leaves are made again for every tree."""


class Flattener:
    """Flattens the trees of one training; each reuses what it has in common with the tree before.

    It keeps no reference to values of a tree. Calls may come from several threads.
    """

    def __init__(self) -> None:
        self._last: _Form | None = None

    def flatten(self, tree: object) -> Flat:
        """Flatten as `tieredckpt.tree.flatten`. Trees of one ``Flat.form`` differ in values alone."""
        last = self._last
        if last is not None and (flat := last.flatten(tree)) is not None:
            return flat
        found = skeleton(tree, as_array_leaf)
        flat = flat_of(found)
        self._last = None if flat.in_pieces else _Form(tree, found, flat.arrays)
        return dataclasses.replace(flat, form=self._last)

    def refill(self, tree: object, structure: Node) -> Refill | None:
        """How to fill ``tree`` with a step of that structure, if they differ only in values; else None, see `match`."""
        try:
            form = (flat := self.flatten(tree)).form
        except Invalid:  # such as for the placeholder `AS_SAVED`
            return None
        if not isinstance(form, _Form) or (values := form.fitted(tree, structure)) is None:
            return None
        return Refill(flat.arrays, form, values)


@dataclass(frozen=True, slots=True)
class Refill:
    """A tree of a known form whose arrays are to be filled in place; serves as its `tieredckpt.tree.match.Match`."""

    leaves: tuple[ArrayLeaf, ...]
    _form: _Form
    _values: list[Any]
    as_saved: tuple[ArrayNode, ...] = ()
    scalars: tuple[ArrayNode, ...] = ()
    cast: frozenset[str] = frozenset()

    def build(self, arrays: Mapping[str, Filled]) -> object:
        """Build the tree, as `Match.build`; ``arrays`` are over the memory of the tree's own."""
        return self._form.rebuilt(self._values, [restored(leaf, arrays[leaf.key]) for leaf in self.leaves])


@dataclass(frozen=True, slots=True)
class _Level:
    """A container. Nodes are numbered level by level, so that the children of a container are one range."""

    place: int
    first: int
    """Place of the first child."""
    path: str
    cls: type
    node: ContainerNode
    """Without children."""
    names: list[str | int]
    by_key: bool
    """Whether it is a dict, whose keys are the names."""

    def children(self, value: Any) -> Collection[object] | None:
        """The children of ``value``; None if it is another container."""
        cls: type = type(value)
        if cls is not self.cls:
            return None
        if self.by_key:
            same = list(value) == self.names and _are_texts(value)
            return value.values() if same else None
        if cls in (list, tuple):
            return value if len(value) == len(self.names) else None
        opened = open_container(self.path, value)
        if opened is None or type(self.node) is not opened.kind or list(opened.names) != self.names:
            return None
        if isinstance(self.node, TypedNode):
            about = opened.of, msgspec.json.encode(opened.about)
            return opened.children if about == (self.node.of, msgspec.json.encode(self.node.about)) else None
        return opened.children

    def fits(self, node: Node) -> TypeGuard[ContainerNode]:
        """Whether a stored node is this container, but for its children."""
        if type(node) is not type(self.node) or list(names_of(node)) != self.names:
            return False
        if isinstance(node, TypedNode) and isinstance(self.node, TypedNode):
            return (node.of, msgspec.json.encode(node.about)) == (self.node.of, msgspec.json.encode(self.node.about))
        return True

    def remade(self, value: Any, children: Sequence[object]) -> object:
        """The container ``value`` with other children. Raises `Invalid` where it cannot be made."""
        if self.by_key:
            return dict_with(value, self.names, children)
        opened = open_container(self.path, value)
        if opened is None:
            raise Invalid(f"{show_key(self.path)}: it is no container any more; it changed while it was restored into")
        return make_container(self.path, self.node, opened, children)


class _Column:
    """The arrays of one kind: their indices in ``Flat.arrays``, and what they looked like."""

    def __init__(self, kind: Kind, numbers: list[int], leaves: Sequence[ArrayLeaf]) -> None:
        self._numbers = numbers
        which = [leaves[number].source for number in numbers]
        self._types = list(map(type, which))
        self._looks = list(looks(kind, which))
        dtypes = [leaves[number].dtype for number in numbers]
        self._times = [(number, of.str) for number, of in zip(numbers, dtypes, strict=True) if of.kind in "mM"]
        """The times among them by their text, since M8[s] equals M8[1000ms]."""

    def fits(self, kind: Kind, sources: Sequence[Any]) -> bool:
        """Whether the arrays among ``sources`` look the same."""
        which = [sources[number] for number in self._numbers]
        same = list(map(type, which)) == self._types and all(map(eq, looks(kind, which), self._looks))
        return same and all(sources[number].dtype.str == text for number, text in self._times)


class _Form:
    def __init__(self, tree: object, skeleton: Skeleton, arrays: Sequence[ArrayLeaf]) -> None:
        """Of a tree, its skeleton, and its arrays, none of which is in pieces."""
        found, paths = [tree], [ROOT]
        containers = [node for _, node in walk(skeleton.structure) if isinstance(node, CONTAINERS)]
        # Not opened again: a container may open to other children each time.
        opened_at = dict(zip(map(id, containers), skeleton.containers, strict=True))
        self._levels: list[_Level] = []
        self._nodes: list[Node] = [skeleton.structure]
        """By place; without the values of scalars and objects, whose nodes are made for every tree."""
        self._scalars: list[tuple[int, str]] = []
        self._objects: list[tuple[int, str, type]] = []
        place_of: dict[str, int] = {}
        for place, node in enumerate(self._nodes):  # which grows
            value: Any = found[place]
            if isinstance(node, ArrayNode):
                place_of[node.key] = place
            elif isinstance(node, CONTAINERS):
                opened = opened_at[id(node)]
                by_key = type(node) is DictNode and _are_texts(value)
                names = list(opened.names)
                empty = with_children(node, names, [])
                self._levels.append(_Level(place, len(found), paths[place], type(value), empty, names, by_key))
                self._nodes[place] = empty
                found += opened.children
                self._nodes += node.children
                paths += map(child_key, repeat(paths[place]), names)
            elif isinstance(node, ObjectNode):
                self._objects.append((place, paths[place] or LEAF_KEY, type(value)))
                self._nodes[place] = NoneNode()
            else:
                self._scalars.append((place, paths[place] or LEAF_KEY))
                self._nodes[place] = NoneNode()
        self._places = [place_of[leaf.key] for leaf in arrays]
        self._leaves = [msgspec.structs.replace(leaf, source=None) for leaf in arrays]
        self._about = [list(map(attrgetter(name), arrays)) for name in ("key", "kind", "shape", "dtype", "immutable")]
        """Properties that the leaves of all such trees share, as columns."""
        numbers: dict[Kind, list[int]] = {}
        for number, leaf in enumerate(arrays):
            numbers.setdefault(leaf.kind, []).append(number)
        self._one_by_one = [number for kind in _ONE_BY_ONE for number in numbers.pop(kind, ())]
        self._columns = {kind: _Column(kind, which, arrays) for kind, which in numbers.items()}

    def flatten(self, tree: object) -> Flat | None:
        """Flatten as `Flattener.flatten`; None for a tree of another form."""
        found = self._opened(tree)
        if found is None:
            return None
        arrays = self._arrays([found[place] for place in self._places])
        if arrays is None:
            return None
        structure = self._structure(found)
        return None if structure is None else Flat(structure, tuple(arrays), form=self)

    def _opened(self, tree: object) -> list[Any] | None:
        """Everything in ``tree``, by place; None if its containers are others."""
        found = [tree]
        for level in self._levels:
            children = level.children(found[level.place])
            if children is None:
                return None
            found += children
        return found

    def fitted(self, tree: object, structure: Node) -> list[Any] | None:
        """All values of ``tree`` by place, with the scalars and objects of a stored structure.

        ``tree`` is of this form. None if the structure is of another form, or has a value that ``tree`` cannot hold.
        """
        values, nodes = self._opened(tree), [structure]
        for level in self._levels:
            if not level.fits(node := nodes[level.place]):
                return None
            nodes += node.children
        if values is None or [nodes[place] for place in self._places] != [self._nodes[place] for place in self._places]:
            return None
        for place, key in self._scalars:
            node = nodes[place]
            if type(scalar_node(key, values[place])) is not type(node):
                return None
            values[place] = scalar_value(node)
        try:
            for place, key, _ in self._objects:
                node, like = nodes[place], object_node(key, values[place])
                if not (isinstance(node, ObjectNode) and isinstance(like, ObjectNode) and node.of == like.of):
                    return None
                values[place] = restored_object(key, node, values[place])
        except Invalid:
            return None
        return values

    def rebuilt(self, values: list[Any], arrays: Iterable[object]) -> object:
        """A tree of this form: ``values`` by place with the containers as they were, and the arrays in its order."""
        for place, array in zip(self._places, arrays, strict=True):
            values[place] = array
        for level in reversed(self._levels):
            children = values[level.first : level.first + len(level.names)]
            values[level.place] = level.remade(values[level.place], children)
        return values[0]

    def _arrays(self, sources: Sequence[object]) -> list[ArrayLeaf] | None:
        if not all(column.fits(kind, sources) for kind, column in self._columns.items()):
            return None
        keys, kinds, shapes, dtypes, immutable = self._about
        arrays = list(map(ArrayLeaf, keys, sources, kinds, shapes, dtypes, immutable, repeat(None)))
        for number in self._one_by_one:
            leaf = as_array_leaf(self._leaves[number].key, sources[number])
            if not isinstance(leaf, ArrayLeaf) or msgspec.structs.replace(leaf, source=None) != self._leaves[number]:
                return None
            arrays[number] = leaf
        return arrays

    def _structure(self, found: Sequence[object]) -> Node | None:
        nodes = self._nodes.copy()
        for place, key in self._scalars:
            scalar = scalar_node(key, found[place])
            if scalar is None:
                return None
            nodes[place] = scalar
        for place, key, cls in self._objects:
            small = object_node(key, found[place]) if type(found[place]) is cls else None
            if small is None:
                return None
            nodes[place] = small
        for level in reversed(self._levels):
            children = nodes[level.first : level.first + len(level.names)]
            nodes[level.place] = with_children(level.node, level.names, children)
        return nodes[0]


def _are_texts(keys: Iterable[object]) -> bool:
    return {*map(type, keys)} <= {str}
