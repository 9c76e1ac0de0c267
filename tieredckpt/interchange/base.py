"""Common parts of the format modules: `Format`, and digests of written content, to compare after reading it back."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tieredckpt.config.formats import Digests, Format
from tieredckpt.errors import Corrupt
from tieredckpt.format.digest import SIZE, Digester

__all__ = ["Content", "Digests", "Format", "content", "is_name", "plain"]


class Content:
    """Computes `content` of an array that comes in pieces."""

    def __init__(self) -> None:
        self._digester = Digester()
        self._nbytes = 0

    def add(self, piece: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
        """Take in the next contiguous piece; its bytes."""
        flat = piece.reshape(-1).view(np.uint8)
        self._digester.update(flat)
        self._nbytes += flat.size
        return flat

    def value(self) -> bytes:
        """The value that is compared after writing."""
        found = self._digester.digest() if self._nbytes else bytes(SIZE)
        return found + self._nbytes.to_bytes(8, "big")


def content(array: npt.NDArray[Any]) -> bytes:
    """The value that is compared after writing: a digest of an array's bytes, and their number.

    The dtype does not count, since the same bytes come back under several dtypes.
    """
    found = Content()
    found.add(np.ascontiguousarray(array))
    return found.value()


def is_name(name: str) -> bool:
    """Whether ``name`` is the name of an entry of a folder, and not a path that leads elsewhere."""
    try:
        os.fsencode(name)
    except UnicodeEncodeError:
        return False
    return Path(name).name == name and name not in ("", ".", "..") and "\0" not in name


def plain(path: Path) -> Path:
    """Check that a path is a plain file, or missing, and return it.

    Raises `Corrupt` for anything else: a read of a named pipe would wait, and a device may have no end.
    """
    if not path.is_file() and path.exists():
        raise Corrupt(f"{path} is no plain file")
    return path
