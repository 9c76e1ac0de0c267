"""Writes a step as a folder that stock Orbax restores, by linking the store's packs where that is possible."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tieredckpt.engine.exporting.content import StepContent
from tieredckpt.errors import Invalid
from tieredckpt.format.ocdbt import Extent, Value
from tieredckpt.interchange.base import content, is_name
from tieredckpt.interchange.linked_packs import link, stored_indexes
from tieredckpt.interchange.orbax_folders import CUSTOM, DEFAULT, ITEMS, METADATA, STEP_METADATA
from tieredckpt.interchange.orbax_index import COPIES, INDEX, LINKS, add_array, summary
from tieredckpt.interchange.orbax_index import read_back as arrays_of
from tieredckpt.interchange.orbax_index import write as write_index
from tieredckpt.interchange.orbax_metadata import EMPTY, Leaf, text_of
from tieredckpt.tree.leaf import ArraySpec

__all__ = ["read_back", "write"]

_STRINGS = "_strings.json"
_KEYS = "array_metadatas/process_0"
_HANDLERS = {
    "tree": "orbax.checkpoint._src.handlers.standard_checkpoint_handler.StandardCheckpointHandler",
    "json": "orbax.checkpoint._src.handlers.json_checkpoint_handler.JsonCheckpointHandler",
}
"""Names that Orbax stores for its own use; here they are text, and import nothing."""


@dataclass(frozen=True, slots=True)
class _Tree:
    """A tree in Orbax's form: leaf by leaf."""

    leaves: list[Leaf]
    values: dict[str, ArraySpec | npt.NDArray[Any] | str]
    """An array of the step, a number as an array, or a text, by its name in the folder."""


def write(step: StepContent, to: Path, *, copy: bool = False) -> dict[str, bytes]:
    """Write a tree to ``to``, or, if ``to`` is named by a number, a step of a `CheckpointManager` with its items.

    Args:
        copy: copy the arrays even if their packs could be linked.
    """
    tree = step.tree()
    items = _items(tree)
    if items is not None and not to.name.isdigit():
        raise Invalid(
            f"step {step.info.step} has the items {', '.join(items)}: give a path that ends in a number, as steps of a "
            f"CheckpointManager do, or --part with the name of one"
        )
    kinds = {DEFAULT: "tree"} if items is None else items
    values = {DEFAULT: tree} if items is None else tree
    custom = {} if items is None else tree.get(CUSTOM, {})
    folders = {name: to / name if to.name.isdigit() else to for name in kinds}
    trees = {name: _tree(values[name]) for name, kind in kinds.items() if kind == "tree"}
    others = {name: _files(name, kind, values[name]) for name, kind in kinds.items() if kind != "tree"}
    _check_whole(step, trees.values(), others.values())
    written: dict[str, bytes] = {}
    to.mkdir()
    for name, found in trees.items():
        digests = _write_tree(step, folders[name], found, copy=copy)
        written |= {_named(to, folders[name], array): each for array, each in digests.items()}
    for name, files in others.items():
        _write_files(step, folders[name], files)
    handlers = {name: _HANDLERS.get(kind) for name, kind in kinds.items()}
    (to / STEP_METADATA).write_bytes(_about(step, handlers if to.name.isdigit() else handlers[DEFAULT], custom))
    return written | dict(_small_files(to))


def _items(tree: Any) -> dict[str, str] | None:
    """The kinds of a step's items by name; None for a step without item names. Raises `Invalid`."""
    if not isinstance(tree, dict) or ITEMS not in tree:
        return None
    items = tree[ITEMS]
    if not isinstance(items, dict):
        raise Invalid(f"leaf {ITEMS!r} is no table of items; export a part without it")
    for name, kind in items.items():
        if not isinstance(name, str) or not is_name(name) or name not in tree:
            raise Invalid(f"item {name!r:.200} is not in the step, or its name is not that of a folder")
        if kind not in ("tree", "json", "files"):
            raise Invalid(f"item {name!r:.200} is of the kind {kind!r:.50}, which is none of tree, json and files")
    return items


def _check_whole(step: StepContent, trees: Iterable[_Tree], files: Iterable[Mapping[str, Any]]) -> None:
    found = [value for tree in trees for value in tree.values.values()]
    found += [value for each in files for value in each.values()]
    left_out = {info.key for info in step.arrays} - {spec.key for spec in found if isinstance(spec, ArraySpec)}
    if left_out:
        raise Invalid(f"array {min(left_out)!r} lies in a container that Orbax does not have; export another part")


def _about(step: StepContent, handlers: Any, custom: Any) -> bytes:
    nanoseconds = int(step.info.saved_at * 1e9)
    about = {
        "item_handlers": handlers,
        "metrics": {},
        "performance_metrics": {},
        "init_timestamp_nsecs": nanoseconds,
        "commit_timestamp_nsecs": nanoseconds,
        "custom_metadata": custom,
    }
    return json.dumps(about).encode()


# -- what goes out ----------------------------------------------------------------------------------------


def _tree(tree: Any) -> _Tree:
    """The leaves of a tree. Raises `Invalid`, naming the path, for a leaf that Orbax cannot hold."""
    made = _Tree([], {})
    names: dict[str, Leaf] = {}
    for path, value in _leaves(tree, ()):
        kind = _type(path, value)
        leaf = Leaf(path, kind, value is not None and kind not in EMPTY)
        if leaf.stored and names.setdefault(leaf.name, leaf) is not leaf:
            raise Invalid(f"{names[leaf.name].path} and {path} would both be called {leaf.name!r} by Orbax")
        made.leaves.append(leaf)
        if isinstance(value, ArraySpec | str):
            made.values[leaf.name] = value
        elif leaf.stored:
            made.values[leaf.name] = np.asarray(value)
    if not any(leaf.stored for leaf in made.leaves):
        raise Invalid("Orbax has no checkpoint without a value; export another part")
    return made


def _leaves(tree: Any, path: tuple[str | int, ...]) -> Iterator[tuple[tuple[str | int, ...], Any]]:
    if isinstance(tree, dict) and tree:
        for key, value in tree.items():
            yield from _leaves(value, (*path, str(key)))
    elif isinstance(tree, list | tuple) and tree:
        for at, value in enumerate(tree):
            yield from _leaves(value, (*path, at))
    else:
        yield path, tree


def _type(path: tuple[str | int, ...], value: Any) -> str:
    """Orbax's name of the kind of a leaf."""
    name = "/".join(map(str, path))
    if isinstance(value, ArraySpec):
        if value.dtype.kind in "mM":
            raise Invalid(f"array {value.key!r}: Orbax has no dtype {value.dtype}; leave it out with a part or keys")
        return "np.ndarray"  # without a target, a jax.Array is restored only on the devices of its writer
    for empty, make in EMPTY.items():
        if type(value) is make:
            return empty
    if value is None:
        return "None"
    if isinstance(value, str):
        return "string"
    if type(value) not in (bool, int, float, complex) or (type(value) is int and not -(1 << 63) <= value < 1 << 63):
        raise Invalid(
            f"leaf {name!r}: Orbax cannot have {type(value).__name__} {value!r:.50}; export a part without it"
        )
    return "np.ndarray" if isinstance(value, complex) else "scalar"  # Orbax has only real scalars


def _files(name: str, kind: str, value: Any) -> dict[str, bytes | ArraySpec]:
    """The files of an item that is not a tree: one of JSON, or those that its own handler wrote."""
    if kind == "json":
        try:
            return {"metadata": json.dumps(value).encode()}
        except (TypeError, ValueError) as error:
            raise Invalid(f"item {name!r} is no JSON: {error}") from error
    if not isinstance(value, dict) or not all(isinstance(each, ArraySpec) for each in value.values()):
        raise Invalid(f"item {name!r} is of the kind {kind!r} and does not consist of files")
    for path in value:
        if not all(map(is_name, path.split("/"))):
            raise Invalid(f"item {name!r} has the file {path!r}, which is no path in its folder")
    return value


# -- writing ----------------------------------------------------------------------------------------------


def _write_files(step: StepContent, folder: Path, files: Mapping[str, bytes | ArraySpec]) -> None:
    infos = {info.key: info for info in step.arrays}
    specs = {value.key: name for name, value in files.items() if isinstance(value, ArraySpec)}
    data = {specs[info.key]: array.tobytes() for info, array in step.read([infos[key] for key in specs])}
    folder.mkdir()
    for name, value in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(value if isinstance(value, bytes) else data[name])


def _write_tree(step: StepContent, folder: Path, tree: _Tree, *, copy: bool) -> dict[str, bytes]:
    """Write a tree to a new folder; returns the summary of each array, by name."""
    (folder / INDEX).parent.mkdir(parents=True)
    infos = {info.key: info for info in step.arrays}
    specs = {name: value for name, value in tree.values.items() if isinstance(value, ArraySpec)}
    arrays = {} if copy else _linked(step, folder, specs)
    copied = {spec.key: name for name, spec in specs.items() if name not in arrays}
    digests: dict[Extent, bytes] = {}
    with (folder / COPIES).open("xb") as file:
        for info, array in step.read([infos[key] for key in copied]):
            arrays[copied[info.key]] = add_array(array, file, digests)
        for name, value in tree.values.items():
            if isinstance(value, np.ndarray):
                arrays[name] = add_array(value, file, digests)
    write_index(folder, arrays)
    texts = {name: value for name, value in tree.values.items() if isinstance(value, str)}
    if texts:
        (folder / _STRINGS).write_text(json.dumps(texts))
    keys = {name: spec for name, spec in specs.items() if spec.prng is not None}
    if keys:
        (folder / _KEYS).parent.mkdir()
        (folder / _KEYS).write_bytes(_about_keys(keys))
    (folder / METADATA).write_bytes(text_of(tree.leaves))
    return {name: summary(entries, digests.__getitem__) for name, entries in arrays.items()}


def _linked(step: StepContent, folder: Path, specs: Mapping[str, ArraySpec]) -> dict[str, dict[bytes, Value]]:
    """The entries of the arrays whose packs could be linked into the folder, by name."""
    for index in stored_indexes(step):
        stored = {name: index.arrays.get(spec.key.encode()) for name, spec in specs.items()}
        found = {name: entries for name, entries in stored.items() if entries is not None}
        extents = [value for entries in found.values() for value in entries.values() if isinstance(value, Extent)]
        if link(index.root, extents, folder / LINKS):
            return {name: {key: _moved(value) for key, value in entries.items()} for name, entries in found.items()}
    return {}


def _moved(value: Value) -> Value:
    if isinstance(value, bytes):
        return value
    return Extent(f"{LINKS}/{value.path.rpartition('/')[2]}", value.offset, value.length)


def _about_keys(keys: Mapping[str, ArraySpec]) -> bytes:
    """Metadata that lists the typed PRNG keys, and the PRNG of each."""
    entries = []
    for name, spec in keys.items():
        shape = list(spec.shape)
        about = {"param_name": name, "write_shape": shape, "chunk_shape": shape}
        entries.append({"array_metadata": {**about, "ext_metadata": {"random_key_impl": spec.prng}}})
    return json.dumps({"array_metadatas": entries}).encode()


# -- reading back -----------------------------------------------------------------------------------------


def read_back(to: Path) -> Iterator[tuple[str, bytes]]:
    """The summary of each array, and the digest of every small file. Raises `Corrupt`."""
    for folder in _trees(to):
        for name, found in arrays_of(folder):
            yield _named(to, folder, name), found
    yield from _small_files(to)


def _named(to: Path, folder: Path, array: str) -> str:
    return array if folder == to else f"{folder.name}/{array}"


def _trees(to: Path) -> list[Path]:
    """The folders of trees; an item of another kind may have such folders deeper inside."""
    return [file.parent for file in (*to.glob(METADATA), *sorted(to.glob(f"*/{METADATA}")))]


def _small_files(to: Path) -> Iterator[tuple[str, bytes]]:
    """The content of each file that is no array and lies in no folder of arrays."""
    arrays = {folder / name for folder in _trees(to) for name in (LINKS, Path(INDEX).parent)}
    for file in sorted(to.rglob("*")):
        if file.is_file() and arrays.isdisjoint(file.parents):
            yield f"./{file.relative_to(to).as_posix()}", content(np.frombuffer(file.read_bytes(), np.uint8))
