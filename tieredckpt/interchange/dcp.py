"""Folders of torch.distributed.checkpoint: written, and read without running code of a forged one.

DCP reads its ``.metadata`` with `pickle.load`, which runs whatever the file says. Here a file may name only the classes
that such files consist of, records without methods replace these classes, and items are read as `torch.load` reads
weights only.
"""

from __future__ import annotations

import gc
import io
import warnings
from collections import Counter, deque
from collections.abc import Collection, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from math import prod
from operator import add
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import optree
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException, DefaultSavePlanner, FileSystemWriter
from torch.distributed.checkpoint._nested_dict import unflatten_state_dict
from torch.distributed.checkpoint.planner import WriteItem

from tieredckpt.engine.exporting.content import StepContent
from tieredckpt.errors import Corrupt, Invalid, NotFound, TieredCkptError
from tieredckpt.interchange.base import Content, Format, content, is_name, plain
from tieredckpt.interchange.dcp_metadata import DTYPES, get, kind, load
from tieredckpt.interchange.torch_files import check_size, load_weights, refused
from tieredckpt.tree.leaf import ArraySpec

__all__ = ["DCP"]

_METADATA = ".metadata"
_DEEPEST = 256
"""Dimensions of a tensor, and levels of a tree."""


@dataclass(frozen=True, slots=True)
class _Tensor:
    dtype: torch.dtype
    shape: tuple[int, ...]
    parts: dict[tuple[int, ...], tuple[int, ...]]
    """The shape of each part, by its offset."""


@dataclass(frozen=True, slots=True)
class _Item:
    """Location of a part of a tensor, or of a value."""

    name: str
    offset: tuple[int, ...] | None
    """In the tensor; None for all of it, and for a value."""
    file: Path
    start: int
    length: int


@dataclass(frozen=True, slots=True)
class _Contents:
    """The content of a ``.metadata``, checked except for the items themselves."""

    tensors: dict[str, _Tensor]
    items: list[_Item]
    """File by file."""
    paths: dict[str, tuple[str | int, ...]]
    """Path of each tensor or value in the tree, by name."""


# -- reading ----------------------------------------------------------------------------------------------


def _read(folder: Path) -> Any:
    """The state dict that DCP wrote to a folder, tensors whole and on the CPU."""
    contents = _contents(folder)
    flat: dict[str, Any] = {
        name: torch.empty(tensor.shape, dtype=tensor.dtype) for name, tensor in contents.tensors.items()
    }
    for item in contents.items:
        if item.name not in contents.tensors:
            flat[item.name] = _load(item)
            continue
        offset, part = _part(contents.tensors[item.name], item)
        flat[item.name][tuple(map(slice, offset, map(add, offset, part.shape)))] = part
    try:
        return unflatten_state_dict(flat, contents.paths)
    except Exception as error:  # it trusts the paths
        raise Corrupt(f"{folder / _METADATA}: the paths of the names contradict each other: {error}") from error


def _contents(folder: Path) -> _Contents:
    """Read a ``.metadata`` and compare it with the files, before memory is allocated by its numbers."""
    metadata = folder / _METADATA
    try:
        pickled = plain(metadata).read_bytes()
    except (FileNotFoundError, NotADirectoryError) as error:
        raise NotFound(f"{folder} has no .metadata: it is no folder of torch.distributed.checkpoint") from error
    found = load(pickled, metadata)
    entries, stored, paths = (get(found, each) for each in ("state_dict_metadata", "storage_data", "planner_data"))
    if not isinstance(entries, dict) or not isinstance(stored, dict):
        raise Corrupt(f"{metadata} has no metadata of DCP")
    tensors = {}
    for name, entry in entries.items():
        if not isinstance(name, str) or kind(entry) not in ("TensorStorageMetadata", "BytesStorageMetadata"):
            raise Corrupt(f"{metadata}: {str(name)[:100]!r} is neither a tensor nor a value")
        if kind(entry) == "TensorStorageMetadata":
            tensors[name] = _tensor(metadata, name, entry)
    items = sorted((_item(folder, *each) for each in stored.items()), key=lambda item: (item.file, item.start))
    _check_items(folder, entries.keys(), tensors, items)
    if paths is None:
        paths = {name: (name,) for name in entries}
    return _Contents(tensors, items, _paths(metadata, entries, paths))


def _tensor(metadata: Path, name: str, entry: Any) -> _Tensor:
    properties = get(get(entry, "properties"), "state")
    dtype = properties[0] if isinstance(properties, tuple) and properties else None
    if not isinstance(dtype, torch.dtype):
        raise Corrupt(f"{metadata}: {name!r} has no dtype")
    shape, chunks = get(entry, "size"), get(entry, "chunks")
    boxes = [(get(each, "offsets"), get(each, "sizes")) for each in chunks] if isinstance(chunks, list) else []
    if not all(_is_box(each, shape) for each in (shape, *chain(*boxes))):
        raise Corrupt(f"{metadata}: {name!r} or a part of it has no shape or place")
    parts = dict(boxes)
    if any(
        start + size > end for offset, sizes in boxes for start, size, end in zip(offset, sizes, shape, strict=True)
    ):
        raise Corrupt(f"{metadata}: a part of {name!r} does not lie in its tensor")
    if len(parts) < len(boxes) or _overlap(boxes):
        raise Corrupt(f"{metadata}: parts of {name!r} overlap, and either may be the right one")
    if sum(map(prod, parts.values())) < prod(shape):
        raise Corrupt(f"{metadata} does not have all of {name!r}")
    return _Tensor(dtype, shape, parts)


def _overlap(boxes: list[tuple[tuple[int, ...], tuple[int, ...]]]) -> bool:
    """Whether two of the boxes (offset, shape) share an element."""
    boxes = [(offset, shape) for offset, shape in boxes if prod(shape)]
    if len(boxes) < 2 or not boxes[0][0]:
        return len(boxes) > 1
    # Along the axis that is cut most, only the boxes that are begun and not ended are compared.
    axis = max(range(len(boxes[0][0])), key=lambda axis: len({offset[axis] for offset, _ in boxes}))
    begun: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
    for offset, shape in sorted(boxes, key=lambda box: box[0][axis]):
        begun = [box for box in begun if box[0][axis] + box[1][axis] > offset[axis]]
        for other, extent in begun:
            if all(a < b + d and b < a + c for a, b, c, d in zip(offset, other, shape, extent, strict=True)):
                return True
        begun.append((offset, shape))
    return False


def _item(folder: Path, index: Any, info: Any) -> _Item:
    metadata = folder / _METADATA
    name, offset = get(index, "fqn"), get(index, "offset")
    file, start, length = (get(info, each) for each in ("relative_path", "offset", "length"))
    if not isinstance(name, str) or not (offset is None or _is_box(offset, offset)):
        raise Corrupt(f"{metadata} has an item without a name or place")
    if not isinstance(file, str) or not _is_box((start, length), (0, 0)):
        raise Corrupt(f"{metadata}: no file and range for {name!r}")
    path = folder / file
    if not is_name(file):
        raise Invalid(f"{metadata} names {file!r} for {name!r}, which is not in the folder")
    if get(info, "transform_descriptors"):
        raise Invalid(f"{path}: {name!r} was stored through extensions of DCP; load it with DCP, and save it without")
    try:
        size = plain(path).stat().st_size
    except FileNotFoundError as error:
        raise NotFound(f"{path} is not there, and .metadata names it for {name!r}") from error
    if start + length > size:
        raise Corrupt(f"{path} is cut off: {name!r} ends at {start + length}, the file at {size}")
    return _Item(name, offset, path, start, length)


def _check_items(folder: Path, names: Collection[str], tensors: Mapping[str, _Tensor], items: Sequence[_Item]) -> None:
    """Check that every part and value has one item, and that no tensor is larger than its bytes in the files."""
    stored: dict[str, list[tuple[int, ...]]] = {}
    lengths: Counter[str] = Counter()
    for item in items:
        if item.name not in names:
            raise Corrupt(f"{item.file} has {item.name!r}, of which {_METADATA} says nothing")
        stored.setdefault(item.name, []).append(_offset(tensors.get(item.name), item))
        lengths[item.name] += item.length
    for name in names:
        tensor, found = tensors.get(name), stored.get(name, [])
        expected = [()] if tensor is None else list(tensor.parts)
        if sorted(found) != sorted(expected):
            raise Corrupt(f"{folder} does not have all of {name!r}, or has a part of it twice")
        if tensor is not None and prod(tensor.shape) * tensor.dtype.itemsize > lengths[name]:
            raise Corrupt(f"{folder}: {name!r} is said to be larger than what the files have of it")


def _offset(tensor: _Tensor | None, item: _Item) -> tuple[int, ...]:
    if tensor is None:
        return ()
    return (0,) * len(tensor.shape) if item.offset is None else item.offset


def _paths(metadata: Path, names: Mapping[str, Any], paths: Any) -> dict[str, tuple[str | int, ...]]:
    if not isinstance(paths, dict) or paths.keys() != names.keys():
        raise Corrupt(f"{metadata}: the paths are not those of the names")
    for name, path in paths.items():
        fits = isinstance(path, tuple) and 0 < len(path) <= _DEEPEST and isinstance(path[0], str)
        # A list is made as long as its largest index says.
        if not fits or not all(isinstance(at, str) or (type(at) is int and 0 <= at < len(paths)) for at in path):
            raise Corrupt(f"{metadata}: {name!r} has no path")
    return paths


def _part(tensor: _Tensor, item: _Item) -> tuple[tuple[int, ...], torch.Tensor]:
    """Offset of a part in its tensor, and the part, read from the file."""
    offset, found = _offset(tensor, item), _load(item)
    if not isinstance(found, torch.Tensor) or found.dtype is not tensor.dtype or found.is_sparse:
        raise Corrupt(f"{item.file}: {item.name!r} is no tensor of {tensor.dtype}, as {_METADATA} says")
    if tuple(found.shape) != tensor.parts[offset]:
        raise Corrupt(f"{item.file}: {item.name!r} has another shape than {_METADATA} says")
    return offset, found


def _load(item: _Item) -> Any:
    where = f"{item.file}: {item.name!r}"
    try:
        found = load_weights(io.BytesIO(_bytes(item)))
    except Exception as error:
        raise refused(where, error) from error
    check_size(where, found, item.length)
    return found


def _bytes(item: _Item) -> bytes:
    with item.file.open("rb") as file:
        file.seek(item.start)
        return file.read(item.length)


def _is_box(numbers: Any, like: Any) -> bool:
    """Whether ``numbers`` is a tuple of natural numbers, as long as ``like``."""
    if not isinstance(numbers, tuple) or not isinstance(like, tuple) or len(numbers) != len(like):
        return False
    return len(numbers) <= _DEEPEST and all(type(number) is int and 0 <= number < 1 << 63 for number in numbers)


# -- writing ----------------------------------------------------------------------------------------------


def _write(step: StepContent, to: Path) -> dict[str, bytes]:
    """Write a folder by DCP itself; arrays of every kind become tensors, and are read when it writes them."""
    specs: dict[int, ArraySpec] = {}

    def stand_in(leaf: Any) -> Any:
        if not isinstance(leaf, ArraySpec):
            return leaf
        dtype = DTYPES.get(leaf.dtype.name)
        if dtype is None:
            raise Invalid(f"array {leaf.key!r}: torch has no dtype {leaf.dtype}; leave it out with a part or keys")
        tensor = torch.empty(leaf.shape, dtype=dtype, device="meta")
        specs[id(tensor)] = leaf
        return tensor

    tree = optree.tree_map(stand_in, step.tree(), none_is_leaf=True)
    if not isinstance(tree, dict):
        raise Invalid(f"step {step.info.step} is no dict, as a state dict of DCP is; export a part of it")
    left_out = {info.key for info in step.arrays} - {spec.key for spec in specs.values()}
    if left_out:
        raise Invalid(f"array {min(left_out)!r} lies in a container that DCP does not have; export another part")
    planner = _Planner(step, specs)
    try:
        with warnings.catch_warnings():  # DCP warns that it is one process
            warnings.simplefilter("ignore", UserWarning)
            dcp.save(tree, storage_writer=FileSystemWriter(to, per_thread_copy_ahead=0), planner=planner, no_dist=True)
    except CheckpointException as error:
        raise _first(error) from error
    finally:
        planner.end()
    return planner.written


class _Planner(DefaultSavePlanner):
    """DCP asks for values first, then for tensors in the order of its state dict, each when the last is written."""

    coming: deque[Any] | None = None
    tensors: Generator[tuple[int, torch.Tensor], None, None]
    memory: npt.NDArray[np.uint8]

    def __init__(self, step: StepContent, specs: Mapping[int, ArraySpec]) -> None:
        """``specs`` are the arrays of ``step``, by the identity of the tensors that stand in for them."""
        super().__init__()
        self.step, self.specs = step, specs
        self.infos = {info.key: info for info in step.arrays}
        self.written: dict[str, bytes] = {}

    def resolve_data(self, write_item: WriteItem) -> Any:
        name = write_item.index.fqn
        value = self.state_dict[name]
        if id(value) in self.specs:
            found = self.tensor_of(value)
            self.written[name] = content(found.reshape(-1).view(torch.uint8).numpy())
            return found
        # A tuple may have tensors too. DCP stores it as one pickle, and its reader looks for just that where the
        # state dict to load into has a tuple, so they cannot be items of their own, as those of a list are.
        leaves = optree.tree_leaves(value, none_is_leaf=True)
        tensors = dict(self.read([leaf for leaf in leaves if id(leaf) in self.specs]))
        whole = optree.tree_map(lambda leaf: tensors.get(id(leaf), leaf), value, none_is_leaf=True)
        data = self.transform_object(write_item, whole)
        self.written[name] = content(np.frombuffer(data.getbuffer(), np.uint8))
        if tensors:
            del whole, tensors
            gc.collect(1)  # see `tensor_of`
        return data

    def tensor_of(self, stand_in: Any) -> torch.Tensor:
        """A tensor, in memory that all tensors share in turn.

        What `torch.save` wrote stays in cycles of its pickler until Python happens to look for garbage.
        """
        if self.coming is None:
            self.coming = deque(each for each in self.state_dict.values() if id(each) in self.specs)
            # At least a byte: memory of none has the stride 0, of which torch makes no view.
            self.memory = np.empty(max((each.nbytes for each in self.coming), default=0) or 1, np.uint8)
            self.tensors = self.read(tuple(self.coming))
        if self.coming and self.coming[0] is stand_in:
            self.coming.popleft()
            _, found = next(self.tensors)
        else:  # a version of DCP with another order
            ((_, found),) = self.read([stand_in])
        shared = torch.from_numpy(self.memory[: found.nbytes]).view(found.dtype).reshape(found.shape)
        return shared.copy_(found)

    def end(self) -> None:
        """Close the generator of tensors. It refers to this planner, and the cycle would keep the memory of both."""
        if self.coming is not None:
            self.tensors.close()

    def read(self, stand_ins: Sequence[Any]) -> Generator[tuple[int, torch.Tensor], None, None]:
        """The tensors of stand-ins, in their order, with the identity of each stand-in."""
        arrays = self.step.read([self.infos[self.specs[id(each)].key] for each in stand_ins])
        for stand_in, (_, array) in zip(stand_ins, arrays, strict=True):
            native = array.astype(array.dtype.newbyteorder("="), copy=False)
            flat = torch.from_numpy(np.ascontiguousarray(native).reshape(-1).view(np.uint8))
            yield id(stand_in), flat.view(stand_in.dtype).reshape(stand_in.shape)


def _first(error: CheckpointException) -> BaseException:
    """The cause of a failure, which DCP wraps."""
    cause = next(iter(error.failures.values()))[0]
    if isinstance(cause, TieredCkptError | OSError):
        return cause
    return Invalid(f"DCP cannot write the step: {cause}")


def _read_back(folder: Path) -> Iterator[tuple[str, bytes]]:
    contents = _contents(folder)
    for item in contents.items:
        if item.name not in contents.tensors:
            yield item.name, _content(item)
            continue
        _, part = _part(contents.tensors[item.name], item)  # in one part each
        yield item.name, content(part.contiguous().reshape(-1).view(torch.uint8).numpy())


def _content(item: _Item) -> bytes:
    """As `content`, of a pickle, which may be as large as all optimizer states."""
    found, left = Content(), item.length
    with item.file.open("rb") as file:
        file.seek(item.start)
        while data := file.read(min(left, 16 << 20)):
            found.add(np.frombuffer(data, np.uint8))
            left -= len(data)
    return found.value()


DCP = Format(read=_read, write=_write, read_back=_read_back, values=True)
