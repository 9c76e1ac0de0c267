"""The ``.metadata`` of a folder of torch.distributed.checkpoint, read without running the code that it names."""

from __future__ import annotations

import io
import pickle
import pickletools
from pathlib import Path
from typing import Any

import torch

from tieredckpt.errors import Corrupt, Invalid

__all__ = ["DTYPES", "get", "kind", "load"]

DTYPES: dict[str, torch.dtype] = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *(torch.bool, torch.uint8, torch.uint16, torch.uint32, torch.uint64),
        *(torch.int8, torch.int16, torch.int32, torch.int64),
        *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128),
        *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu),
    )
}
"""By the names under which a pickle has them; nothing else of torch is looked up."""


def load(pickled: bytes, metadata: Path) -> Any:
    """Load the file ``metadata`` from its bytes as records without methods; raises `Invalid` and `Corrupt`."""
    try:
        for opcode, at, _ in pickletools.genops(pickled):
            # The unpickler makes a table that is as long as the largest number says.
            if "PUT" in opcode.name and isinstance(at, int) and at > len(pickled):
                raise ValueError(f"{opcode.name} {at} in {len(pickled)} bytes")
        return _Unpickler(pickled, metadata).load()
    except Invalid:
        raise
    except Exception as error:  # forged bytes may raise anything
        raise Corrupt(f"{metadata} is malformed: {type(error).__name__}: {error}") from error


class _Unpickler(pickle.Unpickler):
    """Loads a ``.metadata`` as records without methods.

    A pickle may set attributes of the classes that it names, so the classes are made for each file.
    """

    def __init__(self, pickled: bytes, metadata: Path) -> None:
        super().__init__(io.BytesIO(pickled))
        self._metadata = metadata
        self._named: dict[tuple[str, str], Any] = {
            **{("torch.distributed.checkpoint.metadata", name): type(name, (_Record,), {}) for name in _RECORDS},
            ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): type("_StorageInfo", (_Record,), {}),
            ("torch", "Size"): tuple,
            # Not used: how tensors lay in memory, and the folder to which they were written.
            ("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING"): lambda *_: None,
            ("torch.serialization", "_get_layout"): lambda *_: None,
            **{(module, name): lambda *_: None for module in ("pathlib", "pathlib._local") for name in _PATHS},
            # Where older versions of PyTorch have them.
            (_OLDER, "TensorProperties"): type("TensorProperties", (_Record,), {}),
            (_OLDER, "MEM_FORMAT_ENCODING"): lambda *_: None,
        }

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and name in DTYPES:
            return DTYPES[name]
        try:
            return self._named[module, name]
        except KeyError:
            raise Invalid(
                f"{self._metadata} names {module}.{name}, of which no checkpoint of DCP consists; nothing was run. Do "
                f"not load it with PyTorch either unless you trust its source"
            ) from None


class _Record:
    """The attributes of an object of DCP; any other state of it under ``state``."""

    def __setstate__(self, state: Any) -> None:
        object.__setattr__(self, "__dict__", state if isinstance(state, dict) else {"state": state})


_OLDER = "torch.distributed._shard.sharded_tensor.metadata"
_PATHS = ("PosixPath", "PurePosixPath", "WindowsPath")
_RECORDS = (
    "BytesStorageMetadata",
    "ChunkStorageMetadata",
    "Metadata",
    "MetadataIndex",
    "StorageMeta",
    "TensorProperties",
    "TensorStorageMetadata",
)


def get(record: Any, name: str) -> Any:
    return object.__getattribute__(record, "__dict__").get(name) if isinstance(record, _Record) else None


def kind(record: Any) -> str:
    return type(record).__name__ if isinstance(record, _Record) else ""
