"""Files of `torch.save`, read as weights only: a pickle that names anything else is refused and not run."""

from __future__ import annotations

import pickle
import re
import zipfile
from pathlib import Path
from typing import Any

import torch

from tieredckpt.errors import Corrupt, Invalid, NotFound
from tieredckpt.interchange.base import Format, plain

__all__ = ["TORCH", "check_size", "load_weights", "refused"]

_NAMED = re.compile(r"[^.\n]*(?:unsupported (?:global|class)|unrecognized function|can only build).*", re.IGNORECASE)
"""Errors of the weights reader for a pickle that names anything else."""


def _read(path: Path) -> Any:
    """Read a file of `torch.save`: tensors on the CPU, mapped from the file where its format permits it."""
    if path.is_dir():
        raise Invalid(f"{path} is a folder, and torch.save writes a file; is it dcp:{path} or safetensors:{path}?")
    plain(path)
    try:
        found = load_weights(path, mmap=zipfile.is_zipfile(path))
    except FileNotFoundError as error:
        raise NotFound(f"{path} is not there") from error
    except Exception as error:
        raise refused(str(path), error) from error
    check_size(str(path), found, path.stat().st_size)
    return found


def load_weights(file: Any, *, mmap: bool = False) -> Any:
    return torch.load(file, map_location="cpu", weights_only=True, mmap=mmap)


def check_size(where: str, tree: Any, nbytes: int) -> None:
    """Refuse a tree that is much larger than its ``nbytes`` in the file.

    Tensors may repeat their elements, or containers hold each other many times.
    """
    visited, waiting = 1, [tree]
    while waiting:
        node = waiting.pop()
        if isinstance(node, torch.Tensor):
            logical = node.numel() * node.element_size()
            if node.layout is torch.strided and logical > node.untyped_storage().nbytes():
                raise Invalid(
                    f"{where} has a tensor of shape {list(node.shape)} in {node.untyped_storage().nbytes()} bytes, as "
                    f"expand makes them; load it with PyTorch and save a clone of the tensor"
                )
        elif isinstance(node, dict | list | tuple | set):
            visited += len(node)
            if visited > nbytes:
                raise Invalid(f"{where} has more values than bytes: containers in it have each other many times")
            waiting.extend(node.values() if isinstance(node, dict) else node)


def refused(where: str, error: Exception) -> Invalid | Corrupt:
    """The error for a pickle that `torch.load` refuses to read as weights only."""
    # The reader fails in any way for a damaged file; for a file of more than weights, it says so.
    if isinstance(error, pickle.UnpicklingError) and (found := _NAMED.search(str(error))):
        why = found[0].partition(" Please use ")[0].strip()[:200].rstrip(".")  # without torch.load's own advice
        return Invalid(
            f"{where} is more than tensors and plain values; nothing was run: {why}. If you trust its source, load it "
            f"with PyTorch and save its tensors alone"
        )
    reason = next(iter(str(error).splitlines()), "")
    return Corrupt(f"{where} is damaged, or was not written by torch.save: {type(error).__name__}: {reason[:200]}")


TORCH = Format(read=_read)
