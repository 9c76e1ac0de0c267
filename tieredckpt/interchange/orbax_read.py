"""Reads checkpoints of Orbax through TensorStore and without Orbax: no code that a folder names is run.

Arrays become whole NumPy arrays, whatever their sharding was; typed PRNG keys become JAX's.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorstore as ts

from tieredckpt.blobs.memory import memory_limit
from tieredckpt.errors import Corrupt, Invalid, NotFound
from tieredckpt.interchange.base import is_name, plain
from tieredckpt.interchange.orbax_folders import CUSTOM, DEFAULT, ITEMS, METADATA, custom_of, files_of, items_of
from tieredckpt.interchange.orbax_metadata import ARRAYS, EMPTY, Leaf, TreeMetadata, build, load_json, parse
from tieredckpt.units import format_size

__all__ = ["open_arrays", "prng_keys", "read"]

_TOGETHER = 256
"""Arrays that are opened at a time."""
_LARGEST_CHUNK = 4 << 30
"""Most bytes of a chunk; Orbax writes an array of one shard as one chunk."""
_CACHE = 64 << 20
"""Bytes of OCDBT nodes that TensorStore caches."""


def read(path: Path) -> Any:
    """The tree of a folder with ``_METADATA``; of a step, its one item or its items by name."""
    if (path / METADATA).is_file():
        return _read_tree(path)
    items, custom = items_of(path), custom_of(path)
    if items == {DEFAULT: "tree"} and not custom:
        return _read_tree(path / DEFAULT)
    tree: dict[str, Any] = {}
    for name, kind in items.items():
        if kind == "tree":
            tree[name] = _read_tree(path / name)
        elif kind == "json":
            tree[name] = load_json(path / name / "metadata")
        else:
            found = files_of(path / name)
            tree[name] = {file: np.frombuffer(data, np.uint8) for file, data in found.items()}
    return {**tree, ITEMS: dict(items), **({CUSTOM: custom} if custom else {})}


def _read_tree(folder: Path) -> Any:
    metadata = folder / METADATA
    found = parse(metadata)
    texts, keys = _texts(folder, found), prng_keys(folder)
    arrays = _read_arrays(folder, found, [leaf for leaf in found.leaves if leaf.stored and leaf.type in ARRAYS])
    values: list[tuple[Leaf, Any]] = []
    for leaf in found.leaves:
        if not leaf.stored:
            values.append((leaf, EMPTY.get(leaf.type, lambda: None)()))
        elif leaf.type == "string":
            if leaf.name not in texts:
                raise Corrupt(f"{folder / '_strings.json'} does not have {leaf.name!r}, which {METADATA} lists")
            values.append((leaf, texts[leaf.name]))
        elif leaf.type not in ARRAYS:
            raise Invalid(
                f"{metadata}: {leaf.name!r} is of the type {leaf.type[:100]!r}, which only the program that wrote it "
                f"knows; restore it there, and save it as arrays"
            )
        else:
            array = arrays.pop(leaf.name)
            values.append((leaf, _value(metadata, leaf, array, keys.get(leaf.name))))
    return build(metadata, values)


def _value(metadata: Path, leaf: Leaf, array: Any, prng: str | None) -> Any:
    if leaf.type == "scalar":
        if array.shape not in ((), (1,)):
            raise Corrupt(f"{metadata}: {leaf.name!r} is said to be a number, and has the shape {array.shape}")
        return array.reshape(()).item()
    if prng is None:
        return array
    try:
        from tieredckpt.tree.jax_leaves import made
    except ModuleNotFoundError as error:
        what = f"{metadata}: {leaf.name!r} is a typed PRNG key"
        raise Invalid(f"{what}, which needs {error.name}: pip install {error.name}") from error
    return made(leaf.name, array, prng)


def _texts(folder: Path, metadata: TreeMetadata) -> dict[str, str]:
    if not any(leaf.stored and leaf.type == "string" for leaf in metadata.leaves):
        return {}
    found = load_json(folder / "_strings.json")
    if not isinstance(found, dict):
        raise Corrupt(f"{folder / '_strings.json'} is no JSON object")
    return {name: text for name, text in found.items() if isinstance(text, str)}


def prng_keys(folder: Path) -> dict[str, str]:
    """The PRNG of each array that is a typed key, by name."""
    found: dict[str, str] = {}
    for file in sorted((folder / "array_metadatas").glob("process_*")):
        entries = load_json(file)
        try:
            for each in entries["array_metadatas"]:
                about = each["array_metadata"]
                prng = (about.get("ext_metadata") or {}).get("random_key_impl")
                if prng is not None:
                    found[str(about["param_name"])] = str(prng)
        except (TypeError, KeyError, AttributeError) as error:
            raise Corrupt(f"{file} is malformed: {type(error).__name__}") from error
    return found


# -- arrays -----------------------------------------------------------------------------------------------


def _read_arrays(folder: Path, metadata: TreeMetadata, leaves: Sequence[Leaf]) -> dict[str, Any]:
    for at, _, files in os.walk(folder):
        for file in files:
            plain(Path(at, file))  # TensorStore would wait for a named pipe
    limit, source = memory_limit()
    total = 0
    opened = []
    for leaf, array in open_arrays(folder, metadata, leaves):
        total += math.prod(array.shape) * array.dtype.numpy_dtype.itemsize
        if total > limit:
            raise Invalid(
                f"{folder}: its arrays are said to take more than the {format_size(limit)} of {source}, in which an "
                f"import holds all of them; is the folder damaged?"
            )
        opened.append((leaf, array))
    found = {}
    for leaf, array in opened:
        try:
            data = array.read().result()
        except Exception as error:  # TensorStore's errors differ only in their text
            raise Corrupt(f"{folder}: {leaf.name!r} cannot be read: {_first_line(error)}") from error
        found[leaf.name] = np.asarray(data)
    return found


def open_arrays(folder: Path, metadata: TreeMetadata, leaves: Sequence[Leaf]) -> Iterator[tuple[Leaf, Any]]:
    """Each leaf with its array, opened by TensorStore and not read. Raises `Corrupt` and `NotFound`, naming it."""
    ocdbt = (folder / "manifest.ocdbt").is_file() if metadata.ocdbt is None else metadata.ocdbt
    if ocdbt and leaves and not (folder / "manifest.ocdbt").is_file():
        raise NotFound(f"{folder / 'manifest.ocdbt'} is not there: the checkpoint was not finished, or lost a file")
    context = ts.Context({"cache_pool": {"total_bytes_limit": _CACHE}})
    base = {"driver": "file", "path": f"{folder}/"}
    for start in range(0, len(leaves), _TOGETHER):
        futures = []
        for leaf in leaves[start : start + _TOGETHER]:
            if not ocdbt and leaf.name and not all(map(is_name, leaf.name.split("/"))):
                raise Corrupt(f"{folder / METADATA}: {leaf.name!r} is no path in the folder")
            below = {"driver": "ocdbt", "base": base, "path": f"{leaf.name}/"}
            spec = {
                "driver": "zarr3" if metadata.zarr3 else "zarr",
                "kvstore": below if ocdbt else {"driver": "file", "path": f"{folder / leaf.name}/"},
                "fill_missing_data_reads": not metadata.complete,
                "recheck_cached_data": False,
                "recheck_cached_metadata": False,
            }
            futures.append((leaf, ts.open(spec, read=True, open=True, context=context)))
        for leaf, future in futures:
            yield leaf, _opened(folder, leaf, future)


def _opened(folder: Path, leaf: Leaf, future: Any) -> Any:
    try:
        array = future.result()
    except Exception as error:
        kind = NotFound if "NOT_FOUND" in str(error) else Corrupt
        raise kind(f"{folder}: {leaf.name!r} cannot be opened: {_first_line(error)}") from error
    shape, dtype = array.shape, array.dtype.numpy_dtype
    if dtype is None or dtype == np.dtype(object):
        raise Invalid(f"{folder}: {leaf.name!r} has the dtype {array.dtype.name}, which no step can have")
    chunk = array.chunk_layout.read_chunk.shape or ()
    if math.prod(chunk) * dtype.itemsize > max(_LARGEST_CHUNK, 2 * math.prod(shape) * dtype.itemsize):
        raise Corrupt(f"{folder}: a chunk of {leaf.name!r} is said to have the shape {list(chunk)}")
    return array


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)[:300]
