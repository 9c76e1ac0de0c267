"""One level of a tree: what a container holds under which names, and how to make it again."""

from __future__ import annotations

import copy
import dataclasses
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import optree

from tieredckpt.errors import Invalid, TieredCkptError
from tieredckpt.format.keys import MAX_KEY_BYTES, show_key
from tieredckpt.format.structure import (
    MAP,
    MAX_JSON_INT,
    ContainerNode,
    CustomNode,
    DataclassNode,
    DictNode,
    ListNode,
    NamedTupleNode,
    Node,
    ObjectNode,
    TupleNode,
    TypedNode,
)
from tieredckpt.tree.objects import to_plain
from tieredckpt.tree.typed import COUNTER, DEQUE, NAMESPACES, TENSOR, checked_text, key_name

__all__ = ["NAMESPACE", "Opened", "dict_with", "make_container", "node_name", "open_container"]

NAMESPACE = "tieredckpt"
"""The namespace of optree in which programs register containers of their own for checkpoints."""


_MORE_THAN_FIELDS = (type, Enum, dict, list, tuple, set, frozenset, str, bytes, int, float, complex)
"""A dataclass of these has content besides its fields, or, as a member of an enum, is no copy but the member itself."""


@dataclass(frozen=True, slots=True)
class Opened:
    """A container, opened: its kind, and its children with their names, in order."""

    kind: type[ContainerNode]
    names: Sequence[str | int]
    children: Sequence[object]
    make: Callable[[Sequence[Any]], object]
    """Makes the container again with other children, of the same names and order."""
    of: str = ""
    """Field of a `TypedNode`, as is ``about``."""
    about: Any = None


def open_container(path: str, value: object) -> Opened | None:
    """The container ``value`` at ``path``, or None when it is none.

    Containers are dict, OrderedDict, defaultdict, list, tuple, namedtuples, deque, whatever is registered with
    optree (in `NAMESPACE` or globally) or, where jax is loaded, with jax, other dataclasses, and Counter,
    Namespace, SimpleNamespace and torch's wrapper tensors, in this order. Parts of a registered type that its
    registration calls static are not children: they are not stored, and come from ``like``. Raises `Invalid` for names
    that cannot be stored and for containers that fail to open.
    """
    cls: Any = type(value)
    if cls is dict or cls is OrderedDict or cls is defaultdict:
        return _open_dict(path, value)
    if cls is list:
        return _open_sequence(value, ListNode, list)
    if cls is tuple:
        return _open_sequence(value, TupleNode, tuple)
    if issubclass(cls, tuple) and isinstance(getattr(cls, "_fields", None), tuple):
        return _open_sequence(value, NamedTupleNode, cls._make, cls._fields)
    if cls is deque:
        return _open_deque(path, value)
    try:
        return _open_registered(path, value) or _open_typed(path, value)
    except TieredCkptError:
        raise
    except Exception as error:
        raise Invalid(f"{show_key(path)}: a {cls.__name__} could not be opened: {error}") from error


def _open_dict(path: str, value: Any) -> Opened:
    keys = tuple(value)
    names = _plain_names(path, keys) if type(value) is not Counter else None

    def make(children: Sequence[Any]) -> object:
        return dict_with(value, keys, children)

    if names is not None:
        return Opened(DictNode, names, list(value.values()), make)
    of = COUNTER if type(value) is Counter else MAP
    return Opened(TypedNode, [key_name(path, _plain_key(key)) for key in keys], list(value.values()), make, of)


def dict_with(value: Any, keys: Sequence[object], children: Sequence[Any]) -> object:
    """A dict of the kind of ``value`` with these keys."""
    # A copy keeps the default factory, and attributes such as the _metadata of a torch state_dict.
    fresh = copy.copy(value)
    fresh.clear()
    fresh.update(dict(zip(keys, children, strict=True)))  # a Counter would count what is no dict
    return fresh


def make_container(path: str, node: ContainerNode, opened: Opened, children: Sequence[Any]) -> object:
    """The container ``opened`` again with restored children; raises `Invalid` where it refuses them."""
    try:
        return opened.make(children)
    except Exception as error:
        kind = f"{node_name(node)} of {len(children)}"
        raise Invalid(f"{show_key(path)}: the {kind} of `like` refused its restored children: {error}") from error


def node_name(node: Node) -> str:
    """Name of a node in the format, for people."""
    return str(node.of if isinstance(node, TypedNode | ObjectNode) else type(node).__struct_config__.tag)


def _plain_names(path: str, keys: Sequence[object]) -> list[str | int] | None:
    """The names of a dict's children under these keys; None if a `DictNode` cannot tell the keys apart by names."""
    if all(type(key) is str for key in keys):
        return [_checked_name(path, key) for key in keys]
    plain = [_plain_key(key) for key in keys]
    if not all(type(key) is str or (type(key) is int and abs(key) <= MAX_JSON_INT) for key in plain):
        return None
    return [_checked_name(path, key) for key in plain] if len(set(map(str, plain))) == len(plain) else None


def _plain_key(key: object) -> object:
    """``key`` as a plain str or int, if it is of a subclass such as an IntEnum."""
    if isinstance(key, str):
        return str.__str__(key)
    return int(key) if isinstance(key, int) and not isinstance(key, bool) else key


def _open_sequence(
    value: Any,
    kind: type[ContainerNode],
    make: Callable[[Sequence[Any]], object],
    fields: Sequence[str] | None = None,
) -> Opened:
    return Opened(kind, range(len(value)) if fields is None else fields, tuple(value), make)


def _open_deque(path: str, value: Any) -> Opened:
    limit = value.maxlen
    names = range(len(value))
    about = to_plain(path, limit)
    return Opened(TypedNode, names, tuple(value), lambda children: deque(children, limit), DEQUE, about)


def _open_registered(path: str, value: Any) -> Opened | None:
    # optree's registry, then jax's, then plain dataclasses: a registered dataclass knows its static fields.
    if not optree.tree_is_leaf(value, none_is_leaf=True, namespace=NAMESPACE):
        children, metadata, entries, unflatten = optree.tree_flatten_one_level(
            value, none_is_leaf=True, namespace=NAMESPACE
        )
        names = [_checked_name(path, _entry_name(entry)) for entry in entries]
        return Opened(CustomNode, names, list(children), lambda parts: unflatten(metadata, list(parts)))
    if "jax" in sys.modules:
        from tieredckpt.tree import jax_leaves

        opened = jax_leaves.one_level(value)
        if opened is not None:
            return Opened(CustomNode, [_checked_name(path, name) for name in opened.names], *opened[1:])
    if dataclasses.is_dataclass(value) and not isinstance(value, _MORE_THAN_FIELDS):
        return None if _is_module(value) else _open_dataclass(value)
    return None


def _open_typed(path: str, value: Any) -> Opened | None:
    cls = type(value)
    if cls is Counter:
        return _open_dict(path, value)
    if cls in NAMESPACES:
        names = [_checked_name(path, name) for name in vars(value)]
        return Opened(TypedNode, names, list(vars(value).values()), _namespace_maker(value), NAMESPACES[cls])
    tensor = getattr(sys.modules.get("torch"), "Tensor", None)
    if tensor is not None and isinstance(value, tensor):
        from tieredckpt.tree import torch_wrappers

        parts, children, about, make = torch_wrappers.opened(path, value)
        return Opened(TypedNode, parts, children, make, TENSOR, about)
    return None


def _namespace_maker(value: Any) -> Callable[[Sequence[Any]], object]:
    def make(children: Sequence[Any]) -> object:
        fresh = copy.copy(value)
        vars(fresh).update(zip(vars(value), children, strict=True))
        return fresh

    return make


def _is_module(value: Any) -> bool:
    module = getattr(getattr(sys.modules.get("torch"), "nn", None), "Module", None)
    return module is not None and isinstance(value, module)


def _open_dataclass(value: Any) -> Opened:
    names = [field.name for field in dataclasses.fields(value)]

    def make(children: Sequence[Any]) -> object:
        # Not dataclasses.replace: it refuses fields without init, and runs __init__ and __post_init__.
        fresh = copy.copy(value)
        for name, child in zip(names, children, strict=True):
            object.__setattr__(fresh, name, child)
        return fresh

    return Opened(DataclassNode, names, [getattr(value, name) for name in names], make)


def _checked_name(path: str, name: object) -> str | int:
    if type(name) is str and name.isascii() and len(name) <= MAX_KEY_BYTES:  # as most are
        return name
    plain = _plain_key(name)
    if type(plain) is int and -MAX_JSON_INT <= plain <= MAX_JSON_INT:
        return plain
    if not isinstance(plain, str):
        raise Invalid(
            f"{show_key(path)}: the name {name!r} of type {type(name).__name__} of a child cannot be stored; "
            f"names are str, or int up to 2**53"
        )
    return checked_text(path, plain)


def _entry_name(entry: object) -> str | int:
    return entry if isinstance(entry, str | int) and not isinstance(entry, bool) else str(entry)
