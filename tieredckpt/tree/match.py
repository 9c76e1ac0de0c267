"""Match a stored structure with the tree given as ``like``, and build the restored tree in its types."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import msgspec
import numpy as np

from tieredckpt.errors import Invalid
from tieredckpt.format.keys import show_key
from tieredckpt.format.scalars import scalar_value
from tieredckpt.format.structure import (
    CONTAINERS,
    ArrayNode,
    CustomNode,
    DataclassNode,
    DictNode,
    ListNode,
    NamedTupleNode,
    Node,
    NoneNode,
    ObjectNode,
    TypedNode,
    is_dict,
    walk,
)
from tieredckpt.format.zarr import dtype_from_name
from tieredckpt.tree.arrays import as_template, restored, restored_pieces
from tieredckpt.tree.casts import as_array, cast, castable, fits_array, fits_scalar
from tieredckpt.tree.containers import Opened, make_container, node_name
from tieredckpt.tree.device_target import Filled
from tieredckpt.tree.flatten import skeleton, stored_array, unflatten
from tieredckpt.tree.leaf import ArrayLeaf, Pieces
from tieredckpt.tree.objects import ENUM, object_node, restored_object
from tieredckpt.tree.select import choose
from tieredckpt.tree.typed import DEQUE, TENSOR

__all__ = ["AS_SAVED", "Match", "match"]

_SHOWN = 20
_WITHOUT_TYPES = (
    ". A step that was imported from Orbax has dicts and lists for named tuples, tuples and classes: the "
    "CheckpointManager of tieredckpt.integrations.orbax restores it into them"
)


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
    """The arrays of ``like`` that are read, in its own order, or the pieces that it asks for; of the stored dtypes."""
    as_saved: tuple[ArrayNode, ...]
    """The arrays of the step where ``like`` has `AS_SAVED`."""
    scalars: tuple[ArrayNode, ...]
    """The arrays of the step where ``like`` has a scalar."""
    _arrays: tuple[ArrayLeaf | Pieces, ...]
    _containers: tuple[Opened, ...]
    _stored: Mapping[str, Node]
    _objects: Mapping[str, object]
    _kept: Collection[str] = ()

    @property
    def cast(self) -> set[str]:
        """The keys of the arrays that are read in another dtype than ``like`` has."""
        pieces = [piece for leaf in self._arrays for piece in _pieces(leaf)]
        wanted = {piece.key: piece.dtype for piece in pieces}
        return {leaf.key for leaf in self.leaves if leaf.dtype != wanted[leaf.key]}

    def build(self, arrays: Mapping[str, Filled]) -> object:
        """The restored tree: containers of the types of ``like``, arrays of its kinds, scalars and objects as stored.

        Args:
            arrays: by key of the leaf, of the stored dtypes and of the leaves' shapes. They belong to the tree from
                here on.

        Raises `NotFound` for a missing array, `Corrupt` for one of another dtype or shape, and `Invalid` for
        a container that cannot be made from the restored children.
        """
        nodes, leaves, containers = walk(self.structure), iter(self._arrays), iter(self._containers)
        return _Build(nodes, leaves, containers, self._stored, arrays, self._objects, self._kept).next()


@dataclass(frozen=True, slots=True)
class _Build:
    """Consumes nodes, leaves and containers in the order in which `skeleton` met them."""

    nodes: Iterator[tuple[str, Node]]
    leaves: Iterator[ArrayLeaf | Pieces]
    containers: Iterator[Opened]
    stored: Mapping[str, Node]
    arrays: Mapping[str, Filled]
    objects: Mapping[str, object]
    kept: Collection[str]

    def next(self) -> object:
        path, node = next(self.nodes)
        if path in self.kept and not isinstance(node, CONTAINERS):
            return self._of_like(path, node)
        if self.objects.get(path) is AS_SAVED:
            return unflatten(self.stored[path], self.arrays, "saved", path)
        if isinstance(node, ArrayNode):
            return self._array(path, next(self.leaves))
        if not isinstance(node, CONTAINERS):
            stored = self.stored[path]
            if isinstance(stored, ObjectNode):
                return restored_object(path, stored, self.objects.get(path))
            if isinstance(stored, ArrayNode):
                number = stored_array(stored, self.arrays)
                assert isinstance(number, np.ndarray), "it is read to the host"
                return number.item()
            assert not isinstance(stored, CONTAINERS)
            return scalar_value(stored)
        opened = next(self.containers)
        children = []
        for _ in opened.children:
            children.append(self.next())  # noqa: PERF401  # a comprehension costs a frame per level
        return make_container(path, node, opened, children)

    def _array(self, path: str, leaf: ArrayLeaf | Pieces) -> object:
        stored = self.stored[path]
        pieces = _pieces(leaf)
        made: dict[str, Filled]
        if not isinstance(stored, ArrayNode):
            made = {piece.key: as_array(stored, piece.dtype) for piece in pieces}
        elif isinstance(leaf, ArrayLeaf):
            made = {leaf.key: cast(path, stored_array(stored, self.arrays), leaf.dtype)}
        else:
            nodes = [msgspec.structs.replace(stored, key=piece.key, shape=piece.shape) for piece in pieces]
            found = zip(pieces, nodes, strict=True)
            made = {piece.key: cast(path, stored_array(node, self.arrays), piece.dtype) for piece, node in found}
        return restored(leaf, made[leaf.key]) if isinstance(leaf, ArrayLeaf) else restored_pieces(leaf, made)

    def _of_like(self, path: str, node: Node) -> object:
        if isinstance(node, ArrayNode):
            return next(self.leaves).source
        return self.objects[path] if path in self.objects else scalar_value(node)  # type: ignore[arg-type]  # no container


def _pieces(leaf: ArrayLeaf | Pieces) -> tuple[ArrayLeaf, ...]:
    return (leaf,) if isinstance(leaf, ArrayLeaf) else leaf.leaves


def match(
    like: object,
    structure: Node,
    *,
    part: bool = False,
    casts: bool = False,
    fills: bool = False,
    keys: Sequence[str] | None = None,
    whole: Node | None = None,
    mesh: Any = None,
    step: str = "the step",
) -> Match:
    """``structure`` as fitting ``like``, or one `Invalid` that lists every difference.

    Args:
        like: a tree as `flatten` takes it, whose arrays may also be torch meta tensors and
            `jax.ShapeDtypeStruct`. An array matches one of the same dtype and shape of any library, and a shard
            an array of its global shape; a typed PRNG key one of the same implementation; a scalar or small object
            one of its type, whatever the value, but the member of an enum only one whose name and value its class
            has; a wrapper tensor one of the same description. Containers match those of their kind (dict, list,
            tuple, namedtuple, dataclass, custom, and those that are stored with their type) with the same keys, in
            any order; a dict key ``1`` matches ``"1"``. `AS_SAVED` matches whatever is there. A scalar matches an
            array without dimensions, and such an array a scalar, as `tieredckpt.tree.casts` says.
        structure: as stored, or the part of it that ``keys`` select.
        part: ``like`` may leave out what the step has.
        casts: arrays of other dtypes match too, if they can be cast.
        fills: ``like`` is what the caller gave as ``into``: its arrays are filled in place, so that they must have the
            stored dtypes.
        keys: what of the step is wanted; leaves of ``like`` that they do not choose come back as they are.
        whole: the structure that ``keys`` select from.
        mesh: of jax, with devices: what arrays of ``like`` whose sharding has an abstract mesh are restored onto.
        step: what the error calls the step.
    """
    wanted = skeleton(like, partial(as_template, mesh=mesh), _as_object)
    wanted_structure = wanted.structure
    stored = dict(walk(structure))
    if not wanted.objects and wanted_structure == structure:
        return Match(wanted_structure, wanted.leaves, (), (), wanted.arrays, wanted.containers, stored, {})
    likes = dict(walk(wanted_structure))
    kept = _kept(likes, keys)
    containers = dict(walk(whole)) if kept and whole is not None else {}
    unseen = [path for path, value in wanted.objects.items() if value is AS_SAVED and path in stored]
    as_saved = {path: node for top in unseen for path, node in walk(stored[top], top)}
    said = "into" if fills else "like"
    if isinstance(wanted_structure, CONTAINERS) != isinstance(structure, CONTAINERS):
        raise Invalid(
            f"`{said}` does not fit {step}: it is one {_show(wanted_structure)}, the step one {_show(structure)}"
        )
    missing = [path for path, node in likes.items() if path not in stored and _is_end(node) and path not in kept]
    known = likes.keys() | as_saved
    extra = [] if part else [path for path, node in stored.items() if path not in known and _is_end(node)]
    compared = [path for path in likes if path in stored and path not in as_saved and path not in kept]
    dtypes = {leaf.array: leaf.dtype for leaf in wanted.leaves}
    mismatched: dict[str, str] = {}
    for path in compared:
        node, found = likes[path], stored[path]
        if isinstance(node, CONTAINERS) and path in containers and _fits(node, containers[path]):
            continue  # a list of which ``keys`` select a part has become a dict
        if why := _difference(path, node, found, wanted.objects, dtypes.get(path), casts=casts, fills=fills):
            mismatched[path] = f"{show_key(path)} ({why})"
    plain = not missing and not extra and all(_is_without_types(likes[path], stored[path]) for path in mismatched)
    _refuse_differences(said, step, missing, extra, [*mismatched.values()], plain=plain)
    arrays = tuple(node for node in as_saved.values() if isinstance(node, ArrayNode))
    pairs = [(likes[path], stored[path]) for path in compared]
    numbers = tuple(found for node, found in pairs if isinstance(found, ArrayNode) and not isinstance(node, ArrayNode))
    return Match(
        wanted_structure,
        _to_read(wanted.leaves, stored, kept),
        arrays,
        numbers,
        wanted.arrays,
        wanted.containers,
        stored,
        wanted.objects,
        kept,
    )


def _refuse_differences(
    said: str, step: str, missing: list[str], extra: list[str], mismatched: list[str], *, plain: bool
) -> None:
    """Raise one `Invalid` that lists all differences, if there are any.

    Args:
        plain: the step differs only in that it has dicts and lists where ``said`` has other containers.
    """
    if missing or extra or mismatched:
        parts = [
            _listed("missing from the step", [repr(path) for path in missing]),
            _listed("only in the step", [repr(path) for path in extra]),
            _listed("different", mismatched),
        ]
        raise Invalid(
            f"`{said}` does not fit {step}: {'; '.join(part for part in parts if part)}. "
            f"Change `{said}`, restore a part with `keys`, or restore without `{said}` to see what is there"
            + (_WITHOUT_TYPES if plain else "")
        )


def _kept(likes: Mapping[str, Node], keys: Sequence[str] | None) -> set[str]:
    """The leaves of ``like`` that ``keys`` do not choose."""
    ends = [path for path, node in likes.items() if _is_end(node)]
    return set() if keys is None else set(ends).difference(*[chosen for _, chosen in choose(keys, ends)])


def _to_read(leaves: Sequence[ArrayLeaf], stored: Mapping[str, Node], kept: Collection[str]) -> tuple[ArrayLeaf, ...]:
    found = []
    for leaf in leaves:
        node = stored.get(leaf.array)
        if leaf.array not in kept and isinstance(node, ArrayNode):
            dtype = dtype_from_name(node.dtype)
            found.append(leaf if leaf.dtype == dtype else msgspec.structs.replace(leaf, dtype=dtype))
    return tuple(found)


def _as_object(key: str, value: object) -> Node | None:
    return NoneNode() if value is AS_SAVED else object_node(key, value)


def _is_end(node: Node) -> bool:
    return not (isinstance(node, CONTAINERS) and node.children)


def _difference(
    path: str,
    like: Node,
    stored: Node,
    objects: Mapping[str, object],
    dtype: np.dtype[Any] | None,
    *,
    casts: bool,
    fills: bool,
) -> str:
    """Why ``stored`` is not as ``like``, of ``dtype`` if it is an array; empty when it is."""
    if type(stored) is ArrayNode and like == stored:  # as most are
        return ""
    differ = f"{'into' if fills else 'like'}: {_show(like)}, step: {_show(stored)}"
    if isinstance(like, ArrayNode) and isinstance(stored, ArrayNode):
        if _fits(like, stored):
            return ""
        if like.shape != stored.shape or like.prng or stored.prng or dtype is None or fills:
            return differ
        if not castable(dtype_from_name(stored.dtype), dtype):
            return differ
        return "" if casts else f"{differ}; cast=True converts it"
    if isinstance(like, ArrayNode) and not like.shape and dtype is not None and not fills:
        why = fits_array(stored, dtype, may_round=casts)
        return f"like: {_show(like)}, and {why}" if why else ""
    if not _fits(like, stored):
        return differ
    if isinstance(stored, ObjectNode):
        try:
            restored_object(path, stored, objects.get(path))
        except Invalid as error:
            return str(error)
    return ""


def _fits(like: Node, stored: Node) -> bool:
    if isinstance(like, ArrayNode) and isinstance(stored, ArrayNode):
        return (like.dtype, like.shape, like.prng) == (stored.dtype, stored.shape, stored.prng)
    if isinstance(stored, ArrayNode) and fits_scalar(like, stored):
        return True
    if _is_plain_form(like, stored) or (is_dict(like) and is_dict(stored)):
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


def _is_without_types(like: Node, stored: Node) -> bool:
    """Whether ``stored`` may be what an import gives where ``like`` has a container, such as a named tuple."""
    typed = isinstance(like, CONTAINERS) and not isinstance(like, DictNode | ListNode)
    return typed and isinstance(stored, DictNode | ListNode | NoneNode)


def _show(node: Node) -> str:
    if not isinstance(node, ArrayNode):
        return _name(node)
    shape = ", ".join(map(str, node.shape))
    return f"{node.dtype}[{shape}]" if node.prng is None else f"PRNG key {node.prng} of {node.dtype}[{shape}]"


def _name(node: Node) -> str:
    return f"{node_name(node)} of {len(node.children)}" if isinstance(node, CONTAINERS) else node_name(node)


def _listed(title: str, items: list[str]) -> str:
    if not items:
        return ""
    rest = f" and {len(items) - _SHOWN} more" if len(items) > _SHOWN else ""
    return f"{len(items)} {title}: {', '.join(items[:_SHOWN])}{rest}"
