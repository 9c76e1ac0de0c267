"""A part of a stored structure, chosen by patterns over the keys of its leaves."""

from __future__ import annotations

import difflib
import re
from bisect import bisect_left
from collections.abc import Collection, Iterator, Sequence
from functools import lru_cache

from tieredckpt.errors import Invalid, NotFound
from tieredckpt.format.keys import ROOT, child_key
from tieredckpt.format.structure import (
    CONTAINERS,
    ContainerNode,
    DictNode,
    ListNode,
    Node,
    TupleNode,
    TypedNode,
    names_of,
    walk,
    with_children,
)
from tieredckpt.tree.typed import FIXED

__all__ = ["choose", "select", "without"]

_COMPARED = 10_000


def select(structure: Node, keys: Sequence[str], step: str = "the step") -> Node:
    """``structure`` reduced to the leaves that ``keys`` choose, and the containers that hold them.

    Each of ``keys`` is a path, which chooses the leaf there or every leaf below, or a pattern over whole keys
    of leaves: ``*`` and ``?`` stand for characters other than ``/``, ``[ab]`` for one of a set, ``[!ab]`` for
    one outside it, ``**`` for anything, ``**/`` also for nothing. Scalars and empty containers are leaves.

    Kept leaves keep their keys: a list, tuple or deque that loses a child becomes a dict by index, and a wrapper tensor
    that loses an inner tensor becomes a dict of the others.

    Raises `NotFound`, with ``step`` as the name of the step and near misses, when one of ``keys`` chooses nothing, and
    `Invalid` for no ``keys``.
    """
    if isinstance(keys, str) or not keys:
        raise Invalid(f"keys={keys!r} chooses nothing: give a sequence of paths or patterns, or leave it out")
    ends = [path for path, node in walk(structure) if not (isinstance(node, CONTAINERS) and node.children)]
    kept: set[str] = set()
    for pattern, chosen in choose(keys, ends):
        if not chosen:
            raise NotFound(f"{step} has no leaf that matches {pattern!r}{_near_misses(pattern, ends)}")
        kept.update(chosen)
    if len(kept) == len(ends):
        return structure
    assert isinstance(structure, CONTAINERS), "a bare leaf is kept wholly or not at all"
    part = _pruned(ROOT, structure, kept)
    assert part is not None
    return part


def without(structure: Node, keys: Collection[str]) -> Node:
    """``structure`` without the leaves of these keys, and without containers that had nothing else.

    Kept leaves keep their keys, as `select` says; if nothing is left, the result is an empty dict.
    """
    if not keys:
        return structure
    ends = {path for path, node in walk(structure) if not (isinstance(node, CONTAINERS) and node.children)}
    part = _pruned(ROOT, structure, ends.difference(keys)) if isinstance(structure, CONTAINERS) else None
    return part if part is not None else DictNode([], [])


def choose(patterns: Sequence[str], keys: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """Every pattern, and those of ``keys`` that it chooses, in any order; see `select`."""
    known = set(keys)
    in_order: list[str] = []
    for pattern in patterns:
        # Keys and paths are looked up without a pass over all keys: a caller may name thousands.
        if pattern in known:
            yield pattern, [pattern]
            continue
        in_order = in_order or sorted(keys)
        yield pattern, _chosen(pattern, in_order)


def _chosen(pattern: str, in_order: list[str]) -> list[str]:
    path = pattern.rstrip("/")
    at, first, end = (bisect_left(in_order, path + after) for after in ("", "/", chr(ord("/") + 1)))
    chosen = in_order[first:end]  # those below the path lie side by side
    if in_order[at : at + 1] == [path]:
        chosen.append(path)
    if not chosen and any(sign in pattern for sign in "*?["):
        matches = _compiled(pattern).fullmatch
        chosen = [key for key in in_order if matches(key)]
    return chosen


def _pruned(path: str, node: ContainerNode, kept: set[str]) -> ContainerNode | None:
    names: list[str | int] = []
    children: list[Node] = []
    whole = True
    for name, child in zip(names_of(node), node.children, strict=True):
        key = child_key(path, name)
        part: Node | None = child
        if isinstance(child, CONTAINERS) and child.children:
            part = _pruned(key, child, kept)
        elif key not in kept:
            part = None
        whole = whole and part is child
        if part is not None:
            names.append(name)
            children.append(part)
    if whole:
        return node
    if not children:
        return None
    if len(children) < len(node.children) and not _may_lose(node):
        return DictNode(names, children)
    return with_children(node, names, children)


def _may_lose(node: ContainerNode) -> bool:
    """Whether a container of this kind may have fewer children, under the names that they have."""
    return not isinstance(node, ListNode | TupleNode) and not (isinstance(node, TypedNode) and node.of in FIXED)


def _near_misses(pattern: str, ends: list[str]) -> str:
    candidates = set(ends[:_COMPARED])
    for key in ends[:_COMPARED]:
        parts = key.split("/")
        candidates.update("/".join(parts[:i]) for i in range(1, len(parts)))
    near = difflib.get_close_matches(pattern, sorted(candidates), n=5)
    return f"; near: {', '.join(map(repr, near))}" if near else f"; the step has {len(ends)} leaves"


@lru_cache(maxsize=256)
def _compiled(pattern: str) -> re.Pattern[str]:
    parts = []
    for mark in re.findall(r"\*\*/|\*\*|\*|\?|\[!?\]?[^\]/]*\]|.", pattern, re.DOTALL):
        if mark == "**/":
            parts.append("(?:.*/)?")
        elif mark == "**":
            parts.append(".*")
        elif mark == "*":
            parts.append("[^/]*")
        elif mark == "?":
            parts.append("[^/]")
        elif len(mark) > 1:
            inside = mark[1:-1]
            negated = inside.startswith("!")
            members = re.sub(r"([\\\[\]^&~|])", r"\\\1", inside[negated:])
            parts.append(f"(?!/)[{'^' if negated else ''}{members}]")
        else:
            parts.append(re.escape(mark))
    try:
        return re.compile("".join(parts), re.DOTALL)
    except re.error as error:
        raise Invalid(f"keys: {pattern!r} is not a pattern: {error}") from error
