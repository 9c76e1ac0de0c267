"""Checkpoints that torch.distributed.checkpoint wrote to a folder, read without running what a forged one would run.

DCP reads its ``.metadata`` with `pickle.load`, which runs whatever the file says. Here only the classes that such a
file consists of may be named, and items are read as `torch.load` reads weights only.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import metadata as dcp_metadata
from torch.distributed.checkpoint._nested_dict import unflatten_state_dict
from torch.distributed.checkpoint.filesystem import _StorageInfo

from tieredckpt import Corrupt, Invalid, NotFound, SyncCheckpoint, SyncStore

__all__ = ["import_dcp", "read_dcp"]

_ALLOWED: dict[tuple[str, str], Any] = {
    **{
        ("torch.distributed.checkpoint.metadata", name): getattr(dcp_metadata, name)
        for name in (
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "Metadata",
            "MetadataIndex",
            "StorageMeta",
            "TensorProperties",
            "TensorStorageMetadata",
            "_MEM_FORMAT_ENCODING",
        )
    },
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): _StorageInfo,
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): {str(torch.strided): torch.strided}.__getitem__,
    # Of the folder from which it came, as text: it is not used.
    **{("pathlib", name): lambda *parts: "/".join(map(str, parts)) for name in ("PosixPath", "PurePosixPath")},
}


def import_dcp(path: str | Path, store: SyncStore, step: int, **options: Any) -> SyncCheckpoint:
    """Save what DCP wrote to the folder ``path`` as a step of ``store``, by one process, which has room for it.

    Args:
        path: with a file ``.metadata``.
        store: open, of this process alone.
        step: the number that it gets.
        options: ``metrics`` and ``overwrite`` of `SyncStore.save`.

    Raises as `read_dcp` and `SyncStore.save`. It is loaded by `TieredReader`, or by `restore` as a nested tree.
    """
    return store.save(step, read_dcp(path), **options)


def read_dcp(path: str | Path) -> dict[str, Any]:
    """The state dict that DCP wrote to the folder ``path``: tensors whole, on the CPU.

    Raises:
        NotFound: there is no ``.metadata``, or a file that it names is not there.
        Invalid: it names something that no checkpoint of DCP consists of, or an item is a pickle of more than tensors
            and plain values; nothing was run.
        Corrupt: it contradicts itself.
    """
    folder = Path(path)
    try:
        with open(folder / ".metadata", "rb") as file:
            found = _Unpickler(file).load()
    except FileNotFoundError as error:
        raise NotFound(f"{folder} has no .metadata: it is no folder of torch.distributed.checkpoint") from error
    except (pickle.UnpicklingError, EOFError, TypeError, ValueError, KeyError, AttributeError, IndexError) as error:
        if isinstance(error, Invalid):
            raise
        raise Corrupt(f"{folder}/.metadata is malformed: {error}") from error
    if not isinstance(found, dcp_metadata.Metadata) or not isinstance(found.storage_data, dict):
        raise Corrupt(f"{folder}/.metadata has no metadata of DCP")
    flat: dict[str, Any] = {}
    for name, entry in found.state_dict_metadata.items():
        if isinstance(entry, dcp_metadata.TensorStorageMetadata):
            flat[name] = torch.empty(entry.size, dtype=entry.properties.dtype)
    filled = dict.fromkeys(flat, 0)
    for index, item in _items(folder, found.storage_data):
        entry = found.state_dict_metadata.get(index.fqn)
        if not isinstance(entry, dcp_metadata.TensorStorageMetadata):
            flat[index.fqn] = item
            continue
        whole, offset = flat[index.fqn], tuple(index.offset or (0,) * len(entry.size))
        part = tuple(slice(start, start + size) for start, size in zip(offset, item.shape, strict=True))
        if whole[part].shape != item.shape:
            raise Corrupt(f"{folder}: a part of {index.fqn!r} does not lie in its tensor")
        whole[part].copy_(item)
        filled[index.fqn] += item.numel()
    missing = [name for name, count in filled.items() if count != flat[name].numel()]
    missing += found.state_dict_metadata.keys() - flat.keys()
    if missing:
        raise Corrupt(f"{folder} does not have all of {', '.join(map(repr, missing[:5]))}")
    paths = found.planner_data or {name: (name,) for name in flat}
    tree: dict[str, Any] = unflatten_state_dict(flat, paths)
    return tree


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        try:
            return _ALLOWED[module, name]
        except KeyError:
            raise Invalid(
                f"the .metadata names {module}.{name}, of which no checkpoint of DCP consists; nothing was run. Do not "
                f"load it with PyTorch either unless you trust where it is from"
            ) from None


def _items(folder: Path, storage: dict[Any, Any]) -> Iterator[tuple[Any, Any]]:
    """Every item with its index, file by file."""
    for index, info in sorted(storage.items(), key=lambda each: (each[1].relative_path, each[1].offset)):
        file = folder / info.relative_path
        if file.resolve().parent != folder.resolve():
            raise Invalid(f"{folder}/.metadata names {info.relative_path}, which is not in the folder")
        if info.transform_descriptors:
            raise Invalid(f"{file} is stored with {info.transform_descriptors}; load it with DCP and save it without")
        try:
            with open(file, "rb") as opened:
                opened.seek(info.offset)
                data = opened.read(info.length)
        except FileNotFoundError as error:
            raise NotFound(f"{file} is not there, and .metadata names it") from error
        try:
            yield index, torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
            raise Invalid(
                f"{file}: {index.fqn!r} is more than tensors and plain values, or damaged; nothing was run: "
                f"{str(error).splitlines()[0]}"
            ) from error
