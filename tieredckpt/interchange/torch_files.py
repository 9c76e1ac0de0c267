"""Files of `torch.save`, read as weights only: a pickle that names anything else is refused and not run."""

from __future__ import annotations

import pickle
import re
import zipfile
from pathlib import Path
from typing import Any

import torch

from tieredckpt.errors import Corrupt, Invalid, NotFound
from tieredckpt.interchange.base import Format

__all__ = ["TORCH", "load_weights", "refused"]

_NAMED = re.compile(r"[^.\n]*(?:unsupported (?:global|class)|unrecognized function|can only build).*", re.IGNORECASE)
"""What the reader of weights says of a pickle that names something else."""


def _read(path: Path) -> Any:
    """What was saved to the file ``path``: tensors on the CPU, mapped from the file where its format permits it."""
    if path.is_dir():
        raise Invalid(f"{path} is a folder, and torch.save writes a file; is it dcp:{path} or safetensors:{path}?")
    try:
        return load_weights(path, mmap=zipfile.is_zipfile(path))
    except FileNotFoundError as error:
        raise NotFound(f"{path} is not there") from error
    except Exception as error:
        raise refused(str(path), error) from error


def load_weights(file: Any, *, mmap: bool = False) -> Any:
    return torch.load(file, map_location="cpu", weights_only=True, mmap=mmap)


def refused(where: str, error: Exception) -> Invalid | Corrupt:
    """What is wrong with a pickle that `torch.load` refuses to read as weights only."""
    # The reader of a damaged file fails in whatever way; of one that names more than weights, it says so.
    if isinstance(error, pickle.UnpicklingError) and (found := _NAMED.search(str(error))):
        return Invalid(
            f"{where} is more than tensors and plain values; nothing was run: {found[0].strip()[:200]} If you trust "
            f"where it is from, load it with PyTorch and save its tensors alone"
        )
    reason = next(iter(str(error).splitlines()), "")
    return Corrupt(f"{where} is damaged, or was not written by torch.save: {type(error).__name__}: {reason[:200]}")


TORCH = Format(read=_read)
