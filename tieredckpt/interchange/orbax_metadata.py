"""Read and write ``_METADATA`` of Orbax's folders, which describes a tree.

It is JSON: each leaf by its path, with the type of each key on the path (index or name) and of the value. Orbax has no
integer keys of dicts and no tuples: they come back as text and as lists, as with Orbax itself.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tieredckpt.errors import Corrupt, NotFound
from tieredckpt.interchange.base import plain

__all__ = ["ARRAYS", "EMPTY", "Leaf", "TreeMetadata", "build", "load_json", "parse", "text_of"]

_LARGEST = 512 << 20
"""Most bytes of a JSON file; a leaf takes about 200."""
_DEEPEST = 256
"""Levels of a tree."""
_INDEX, _NAME = 1, 2
"""The types of a key."""
ARRAYS = ("jax.Array", "np.ndarray", "scalar")
"""The types of values that are arrays of zarr."""
EMPTY: Mapping[str, Callable[[], Any]] = {"Dict": dict, "List": list, "Tuple": tuple}
"""Types of empty containers; any other value that is not stored is None."""


@dataclass(frozen=True, slots=True)
class Leaf:
    """A value of a tree."""

    path: tuple[str | int, ...]
    """An integer is an index of a list, a text a key of a dict."""
    type: str
    """What Orbax calls the kind of value, such as ``jax.Array``."""
    stored: bool
    """Whether there is anything to read for it."""

    @property
    def name(self) -> str:
        """Name of its stored array."""
        return ".".join(map(str, self.path))


@dataclass(frozen=True, slots=True)
class TreeMetadata:
    """The content of ``_METADATA``, checked."""

    leaves: tuple[Leaf, ...]
    ocdbt: bool | None
    """Whether the arrays lie in an OCDBT database; None if it does not say."""
    zarr3: bool
    complete: bool
    """Whether every chunk is stored; else the missing chunks are zero."""


def load_json(path: Path) -> Any:
    """A JSON file. Raises `NotFound` and `Corrupt`."""
    try:
        with plain(path).open("rb") as file:
            text = file.read(_LARGEST + 1)
        if len(text) > _LARGEST:
            raise Corrupt(f"{path} is larger than any that Orbax writes")
        return json.loads(text)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise NotFound(f"{path} is not there") from error
    except (ValueError, RecursionError) as error:
        raise Corrupt(f"{path} is no JSON: {str(error)[:200]}") from error


def parse(path: Path) -> TreeMetadata:
    """Read and check ``_METADATA``. Raises `NotFound`, and `Corrupt` for contradictions."""
    found = load_json(path)
    entries = found.get("tree_metadata") if isinstance(found, dict) else None
    if not isinstance(entries, dict):
        raise Corrupt(f"{path} has no tree_metadata")
    flags = [found.get(flag) for flag in ("use_ocdbt", "use_zarr3", "store_array_data_equal_to_fill_value")]
    if not all(flag is None or isinstance(flag, bool) for flag in flags):
        raise Corrupt(f"{path}: use_ocdbt, use_zarr3 or store_array_data_equal_to_fill_value is neither true nor false")
    leaves = tuple(_leaf(path, *each) for each in entries.items())
    names = {leaf.name for leaf in leaves if leaf.stored}
    if len(names) < sum(leaf.stored for leaf in leaves):
        raise Corrupt(f"{path}: two values have one name, so Orbax stored one over the other")
    return TreeMetadata(leaves, flags[0], bool(flags[1]), bool(flags[2]))


def _leaf(path: Path, text: str, entry: Any) -> Leaf:
    try:
        keys = [(each["key"], each["key_type"]) for each in entry["key_metadata"]]
        value = entry["value_metadata"]
        kind, skipped = value["value_type"], value.get("skip_deserialize", False)
    except (TypeError, KeyError, AttributeError) as error:
        raise Corrupt(f"{path}: the entry of {text[:200]!r} is malformed") from error
    if len(keys) > _DEEPEST or not isinstance(kind, str) or not isinstance(skipped, bool):
        raise Corrupt(f"{path}: the entry of {text[:200]!r} is malformed")
    at: list[str | int] = []
    for key, of in keys:
        if of == _NAME and isinstance(key, str | int):
            at.append(str(key))
        elif of == _INDEX and str(key).isascii() and str(key).isdigit() and len(str(key)) < 10:
            at.append(int(key))
        else:
            raise Corrupt(f"{path}: {text[:200]!r} has the key {str(key)[:100]!r} of type {of!r}")
    return Leaf(tuple(at), kind, not skipped)


def build(path: Path, values: Sequence[tuple[Leaf, Any]]) -> Any:
    """The tree of leaves and their values. Raises `Corrupt` where the paths contradict each other."""
    if len(values) == 1 and not values[0][0].path:
        return values[0][1]
    root: dict[str | int, Any] = {}
    for leaf, value in values:
        node = root
        for key in leaf.path[:-1]:
            node = node.setdefault(key, _Children())
            if not isinstance(node, _Children):
                raise Corrupt(f"{path}: {leaf.name!r} lies in what is itself a value")
        if not leaf.path or leaf.path[-1] in node:
            raise Corrupt(f"{path}: {leaf.name!r} is a value and a container, or is there twice")
        node[leaf.path[-1]] = value
    return _container(path, root)


class _Children(dict[str | int, Any]):
    """Children of a container that may be a dict or a list."""


def _container(path: Path, children: dict[str | int, Any]) -> Any:
    made = {key: _container(path, value) if isinstance(value, _Children) else value for key, value in children.items()}
    indices = [key for key in made if isinstance(key, int)]
    if not indices:
        return made
    if sorted(indices) != list(range(len(made))):
        raise Corrupt(f"{path}: a list lacks items, or has names too: {', '.join(map(str, list(made)[:5]))}")
    return [made[at] for at in range(len(made))]


def text_of(leaves: Iterator[Leaf] | Sequence[Leaf]) -> bytes:
    """``_METADATA`` of a folder of OCDBT with zarr 3."""
    entries = {}
    for leaf in leaves:
        keys = [{"key": str(key), "key_type": _INDEX if isinstance(key, int) else _NAME} for key in leaf.path]
        value = {"value_type": leaf.type, "skip_deserialize": not leaf.stored}
        entries[str(tuple(map(str, leaf.path)))] = {"key_metadata": keys, "value_metadata": value}
    found = {
        "tree_metadata": entries,
        "use_ocdbt": True,
        "use_zarr3": True,
        "store_array_data_equal_to_fill_value": True,
        "custom_metadata": None,
    }
    return json.dumps(found).encode()
