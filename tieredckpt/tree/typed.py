"""Containers that a step stores with their type: dicts of any keys, deques, counters, namespaces, wrapper tensors.

Without ``like`` each comes back as what it was, except a wrapper tensor: no class is stored, so that becomes a dict of
the tensors that it consists of.
"""

from __future__ import annotations

import argparse
import sys
import types
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from tieredckpt._decoders import UNREADABLE
from tieredckpt.errors import Corrupt, Invalid
from tieredckpt.format.keys import MAX_KEY_BYTES, show_key
from tieredckpt.format.structure import MAP, TypedNode
from tieredckpt.tree.objects import from_plain, json_of, to_plain

__all__ = ["COUNTER", "DEQUE", "FIXED", "NAMESPACES", "TENSOR", "checked_text", "key_name", "made_typed"]

COUNTER, DEQUE, TENSOR = "counter", "deque", "tensor"
NAMESPACES = {argparse.Namespace: "namespace", types.SimpleNamespace: "simple-namespace"}
FIXED = (DEQUE, TENSOR)
"""Kinds of containers that stop being of their kind when they lose a child."""


def key_name(path: str, key: object) -> str:
    """The name of the child ``key`` of a dict with any keys: the key itself, or ``=`` and its JSON.

    Raises `Invalid`, naming the dict, for a key that cannot be stored.
    """
    if type(key) is str and not key.startswith("="):
        name = key
    else:
        try:
            name = "=" + json_of(to_plain(path, key)).decode()
        except Invalid as error:
            raise Invalid(
                f"{show_key(path)}: the dict key {key!r:.100} of type {type(key).__name__} cannot be stored; keys are "
                f"scalars, small objects and tuples of them"
            ) from error
    return checked_text(path, name)


def checked_text(path: str, name: str) -> str:
    """``name`` itself if a child of the container at ``path`` can be stored under it, else `Invalid`."""
    try:
        nbytes = len(name.encode())
    except UnicodeEncodeError as error:
        raise Invalid(f"{show_key(path)}: the dict key {name!r:.100} holds a lone surrogate; rename it") from error
    if nbytes > MAX_KEY_BYTES:
        raise Invalid(
            f"{show_key(path)}: the dict key {name[:64]!r}… takes more than {MAX_KEY_BYTES} bytes; shorten it"
        )
    return name


def made_typed(path: str, node: TypedNode, children: Sequence[Any]) -> object:
    """The container of ``node`` with those children.

    Raises `Corrupt`, naming ``path``, for a malformed one, and `Invalid` for one of a later version of this library.
    """
    make = _MAKERS.get(node.of)
    if make is None:
        raise Invalid(
            f"{show_key(path)} is a {node.of!r}, which this version of tieredckpt does not know; use a later one, or "
            f"restore the rest with keys="
        )
    return make(path, node, children)


def _made_dict(path: str, node: TypedNode, children: Sequence[Any]) -> dict[Any, Any]:
    found: dict[Any, Any] = {}
    for name, child in zip(node.keys, children, strict=True):
        key = _key(path, name)
        try:
            twice = key in found
        except TypeError as error:
            raise Corrupt(f"{show_key(path)} has the key {str(name)[:64]!r}, which no dict has: {error}") from error
        if twice:
            raise Invalid(
                f"{show_key(path)} has two keys that are {key!r} without the classes of their enums; restore it with "
                f"`like`"
            )
        found[key] = child
    return found


def _key(path: str, name: str | int) -> object:
    if not isinstance(name, str) or not name.startswith("="):
        return name
    try:
        plain = msgspec.json.decode(name[1:])
    except UNREADABLE as error:
        raise Corrupt(f"{show_key(path)} has the malformed key {name[:64]!r}: {error}") from error
    return from_plain(path, plain)


def _made_deque(path: str, node: TypedNode, children: Sequence[Any]) -> deque[Any]:
    limit = from_plain(path, node.about)
    known = limit is None or (type(limit) is int and len(children) <= limit <= sys.maxsize)
    if node.keys != list(range(len(children))) or not known:
        raise Corrupt(f"{show_key(path)} is a malformed deque of {len(children)}")
    return deque(children, limit)


def _made_namespace(cls: Callable[[], Any]) -> Callable[[str, TypedNode, Sequence[Any]], object]:
    def made(path: str, node: TypedNode, children: Sequence[Any]) -> object:
        namespace = cls()
        # Not setattr: a name may be that of an attribute that every object has.
        vars(namespace).update(zip(map(str, node.keys), children, strict=True))
        return namespace

    return made


_MAKERS: dict[str, Callable[[str, TypedNode, Sequence[Any]], object]] = {
    MAP: _made_dict,
    COUNTER: lambda path, node, children: Counter(_made_dict(path, node, children)),
    DEQUE: _made_deque,
    TENSOR: lambda path, node, children: dict(zip(node.keys, children, strict=True)),
    **{of: _made_namespace(cls) for cls, of in NAMESPACES.items()},
}
