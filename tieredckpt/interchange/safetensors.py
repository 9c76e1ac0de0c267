"""Weights as Hugging Face reads them: files of safetensors, one or several with an index.

A file is the length of its header (8 bytes, little-endian), the header in JSON, and the bytes of the tensors back to
back (https://github.com/huggingface/safetensors). It is read and written here, array by array, because the library's
own NumPy functions know no 8-bit floats and hold all of a file in memory.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from tieredckpt._batches import batches
from tieredckpt.config.formats import Files
from tieredckpt.engine.exporting.content import StepContent
from tieredckpt.engine.inventory import ArrayInfo
from tieredckpt.errors import Corrupt, Invalid, NotFound
from tieredckpt.format.casts import CASTS
from tieredckpt.interchange.base import Content, Format, content, is_name, plain
from tieredckpt.tree.leaf import ArraySpec

__all__ = ["SAFETENSORS"]

_INDEX = "model.safetensors.index.json"
_LARGEST_HEADER = 100 << 20
"""Bytes; the library refuses larger ones too."""
_SHARD = 5_000_000_000
"""Most bytes of a file, unless one tensor is larger; the hub's tools use the same limit."""
_DIMENSIONS = 64
"""The most that NumPy has."""
_DTYPES: dict[str, np.dtype[Any]] = {
    "BOOL": np.dtype(np.bool_),
    **{f"I{bits}": np.dtype(f"int{bits}") for bits in (8, 16, 32, 64)},
    **{f"U{bits}": np.dtype(f"uint{bits}") for bits in (8, 16, 32, 64)},
    **{f"F{bits}": np.dtype(f"float{bits}") for bits in (16, 32, 64)},
    "C64": np.dtype(np.complex64),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_CAST_FROM = [_DTYPES[name] for name in ("F64", "F32", "F16", "BF16")]


@dataclass(frozen=True, slots=True)
class _Tensor:
    name: str
    info: ArrayInfo
    dtype: np.dtype[Any]
    """In the file."""

    @property
    def nbytes(self) -> int:
        return math.prod(self.info.shape) * self.dtype.itemsize


# -- reading ----------------------------------------------------------------------------------------------


def _read(path: Path) -> dict[str, npt.NDArray[Any]]:
    """The tensors, by name and mapped from the files, of a file or of a folder as transformers writes it."""
    if path.is_dir():
        indexes = sorted(path.glob("*.safetensors.index.json"))
        files = sorted(path.glob("*.safetensors"))
        if len(indexes) == 1:
            path = indexes[0]
        elif not indexes and len(files) == 1:
            path = files[0]
        else:
            found = ", ".join(file.name for file in (*indexes, *files)[:5]) or "nothing"
            raise NotFound(f"{path} has neither one .safetensors.index.json nor one .safetensors (but {found})")
    if path.name.endswith(".index.json"):
        return _read_shards(path)
    return dict(_tensors(path))


def _read_shards(index: Path) -> dict[str, npt.NDArray[Any]]:
    try:
        files = _json(index, plain(index).read_bytes()).get("weight_map")
    except FileNotFoundError as error:
        raise NotFound(f"{index} is not there") from error
    if not isinstance(files, dict) or not files or not all(isinstance(name, str) for name in files.values()):
        raise Corrupt(f"{index} has no weight_map of names to files")
    for name in set(files.values()):
        # Links are not resolved: Hugging Face's cache links to files elsewhere.
        if not is_name(name):
            raise Invalid(f"{index} names {name!r}, which is not in its folder")
    shards = {name: dict(_tensors(index.parent / name)) for name in sorted(set(files.values()))}
    for key, name in files.items():
        if key not in shards[name]:
            raise Corrupt(f"{index} says that {key!r} is in {name}, which does not have it")
    return {key: shards[name][key] for key, name in files.items()}


def _tensors(path: Path) -> Iterator[tuple[str, npt.NDArray[Any]]]:
    """Each tensor of a file with its name, mapped from the file."""
    try:
        size = plain(path).stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(size - 8, _LARGEST_HEADER):
                raise Corrupt(f"{path} is no file of safetensors, or cut off: {size} bytes, a header of {length}")
            header = _json(path, file.read(length))
    except FileNotFoundError as error:
        raise NotFound(f"{path} is not there") from error
    header.pop("__metadata__", None)
    memory = np.memmap(path, np.uint8, mode="r").view(np.ndarray)[8 + length :]
    end = 0
    checked = ((name, _checked(path, name, entry)) for name, entry in header.items())
    for name, (dtype, shape, start, stop) in sorted(checked, key=lambda each: each[1][2:]):
        if start != end:
            raise Corrupt(f"{path}: {name!r} begins at {start}, and the tensor before it ends at {end}")
        if stop > memory.size:
            raise Corrupt(f"{path} ends within {name!r}: it is cut off")
        end = stop
        yield name, memory[start:stop].view(dtype).reshape(shape)
    if end != memory.size:
        raise Corrupt(f"{path} has {memory.size - end} bytes of no tensor")


def _checked(path: Path, name: str, entry: Any) -> tuple[np.dtype[Any], tuple[int, ...], int, int]:
    """Dtype, shape, and the range of bytes of a tensor."""
    try:
        label, shape, (start, stop) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
    except (TypeError, KeyError, ValueError) as error:
        raise Corrupt(f"{path}: the header's entry of {name!r} is malformed") from error
    if not isinstance(label, str) or label not in _DTYPES:
        raise Invalid(f"{path}: {name!r} has the dtype {label!r}, which no step can have")
    dtype = _DTYPES[label]
    if not all(type(number) is int and number >= 0 for number in (*shape, start, stop)):
        raise Corrupt(f"{path}: {name!r} has a shape or range with negative or no integers")
    # The limits of NumPy: dimensions, and bytes, not counting axes of length 0.
    if len(shape) > _DIMENSIONS or math.prod(filter(None, shape)) * dtype.itemsize > sys.maxsize:
        raise Corrupt(f"{path}: {name!r} has a shape that no array can have")
    if stop - start != math.prod(shape) * dtype.itemsize:
        raise Corrupt(f"{path}: {name!r} is {label} of shape {list(shape)}, which are not {stop - start} bytes")
    return dtype, shape, start, stop


def _json(path: Path, data: bytes) -> dict[str, Any]:
    try:
        found = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise Corrupt(f"{path}: the header is no JSON: {error}") from error
    if not isinstance(found, dict):
        raise Corrupt(f"{path}: the header is no JSON object")
    return found


# -- writing ----------------------------------------------------------------------------------------------


def _stream(
    step: StepContent,
    files: Files,
    *,
    cast: str | None = None,
    shard_size: int | None = None,
    rename: Mapping[str, str] | None = None,
) -> dict[str, bytes]:
    """One file, or a folder as transformers has it; the last file of a folder of several is the index."""
    if files.single and shard_size is not None:
        raise Invalid("shard_size: the export is one file; give the path of a folder, or leave the size out")
    tensors = _named(step, *_options(cast, rename))
    largest = _SHARD if shard_size is None else shard_size
    shards = [tensors] if files.single else [*batches(tensors, lambda tensor: tensor.nbytes, largest)]
    if len(shards) == 1:
        return _write_file(step, files, "model.safetensors", tensors)
    written: dict[str, bytes] = {}
    names: dict[str, str] = {}
    for at, shard in enumerate(shards, 1):
        name = f"model-{at:05}-of-{len(shards):05}.safetensors"
        written |= _write_file(step, files, name, shard)
        names |= {tensor.name: name for tensor in shard}
    index = {"metadata": {"total_size": sum(tensor.nbytes for tensor in tensors)}, "weight_map": names}
    with files.open(_INDEX) as file:
        file.write(json.dumps(index, indent=2).encode() + b"\n")
    return written


def _options(
    cast: str | None = None, rename: Mapping[str, str] | None = None, shard_size: int | None = None
) -> tuple[np.dtype[Any] | None, Names]:
    """The dtype for floats, and the names of leaves. Raises `Invalid`."""
    if cast is not None and cast not in CASTS:
        raise Invalid(f"cast={cast!r}: should be one of {', '.join(CASTS)}")
    return None if cast is None else CASTS[cast], Names(rename or {})


def _named(step: StepContent, cast: np.dtype[Any] | None, names: Names) -> list[_Tensor]:
    """The arrays with their new names and dtypes."""
    infos = {info.key: info for info in step.arrays}
    specs: dict[str, ArraySpec] = {}
    for path, leaf in step.leaves():
        if isinstance(leaf, ArraySpec) and specs.setdefault(name := names(path), leaf) is not leaf:
            raise Invalid(f"{specs[name].key!r} and {leaf.key!r} would both be called {name!r}")
    names.check()
    left_out = infos.keys() - {spec.key for spec in specs.values()}
    if left_out or not infos:
        what = f"{min(left_out)!r} lies in a container without names" if left_out else "there are no arrays"
        raise Invalid(f"step {step.info.step}: {what}; export another part of it")
    if "__metadata__" in specs:
        raise Invalid(
            f"{specs['__metadata__'].key!r}: safetensors has '__metadata__' for itself; leave it out with keys"
        )
    found = []
    for name, spec in specs.items():
        dtype = spec.dtype.newbyteorder("=")
        if cast is not None and dtype in _CAST_FROM:
            dtype = cast
        if dtype not in _NAMES:
            raise Invalid(f"array {spec.key!r}: safetensors has no dtype {dtype}; leave it out with a part or keys")
        found.append(_Tensor(name, infos[spec.key], dtype))
    return found


def _write_file(step: StepContent, files: Files, name: str, tensors: Sequence[_Tensor]) -> dict[str, bytes]:
    # Wide ones first, so that each is aligned for its dtype.
    tensors = sorted(tensors, key=lambda tensor: -tensor.dtype.itemsize)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # transformers demanded it once
    end = 0
    for tensor in tensors:
        start, end = end, end + tensor.nbytes
        entry = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.info.shape), "data_offsets": [start, end]}
        header[tensor.name] = entry
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > _LARGEST_HEADER:
        raise Invalid(f"{len(tensors)} tensors do not fit one file of safetensors; give a smaller shard size")
    written = {tensor.info.key: Content() for tensor in tensors}
    dtypes = {tensor.info.key: tensor.dtype for tensor in tensors}
    with files.open(name, nbytes=8 + len(text) + end) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        step.write_to(file, [tensor.info for tensor in tensors], dtypes, lambda info, data: written[info.key].add(data))
    return {tensor.name: written[tensor.info.key].value() for tensor in tensors}


def _read_back(path: Path) -> Iterator[tuple[str, bytes]]:
    for name, array in _read(path).items():
        yield name, content(array)


_WILDCARDS = re.compile(r"\*\*|\*")


class Names:
    """Names of exported leaves: their keys with full stops, or renamed by patterns.

    Args:
        renamed: patterns over whole keys, ``**`` for anything and ``*`` for anything but slashes, and the name of each,
            in which the same signs in the same order stand for what they matched: ``params/*/**`` to ``model.*.**``.
            The first pattern that matches a key counts.

    Raises `Invalid` for a name whose signs are not those of its pattern.
    """

    def __init__(self, renamed: Mapping[str, str]) -> None:
        self._renamed = [(pattern, _compiled(pattern), name) for pattern, name in renamed.items()]
        self._used: set[str] = set()
        for pattern, name in renamed.items():
            if _WILDCARDS.findall(pattern) != _WILDCARDS.findall(name):
                raise Invalid(
                    f"rename: {name!r} should have the signs * and ** of {pattern!r}, in the same order, as in "
                    f"'params/**' to 'model.**'"
                )

    def __call__(self, path: Sequence[str]) -> str:
        """The name of the leaf at a path."""
        key = "/".join(path)
        for pattern, compiled, name in self._renamed:
            if (found := compiled.fullmatch(key)) is not None:
                self._used.add(pattern)
                return _filled(name, [part.replace("/", ".") for part in found.groups()])
        return ".".join(path)

    def check(self) -> None:
        """Raise `Invalid` if a pattern has matched no leaf."""
        if unused := [pattern for pattern, _, _ in self._renamed if pattern not in self._used]:
            raise Invalid(f"rename: {unused[0]!r} matches no array, or only those that a pattern before it matches")


def _compiled(pattern: str) -> re.Pattern[str]:
    text = "".join(
        {"**": "(.*)", "*": "([^/]*)"}.get(part, re.escape(part)) for part in re.split(r"(\*\*|\*)", pattern)
    )
    return re.compile(text, re.DOTALL)


def _filled(name: str, parts: Sequence[str]) -> str:
    between = _WILDCARDS.split(name)
    return "".join(text for pair in zip_longest(between, parts, fillvalue="") for text in pair)


SAFETENSORS = Format(
    read=_read,
    stream=_stream,
    read_back=_read_back,
    parts=("model", "state_dict"),
    options=frozenset({"cast", "rename", "shard_size"}),
    check=_options,
    suffix=".safetensors",
)
