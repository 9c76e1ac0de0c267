"""What modules of formats have in common: `Format`, and the digests of what was written, to compare when it is read."""

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
    """`content` of an array that comes in pieces."""

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
        """What is compared after writing."""
        found = self._digester.digest() if self._nbytes else bytes(SIZE)
        return found + self._nbytes.to_bytes(8, "big")


def content(array: npt.NDArray[Any]) -> bytes:
    """What is compared after writing: the bytes of an array, and their number, but not its dtype, since bytes of the
    same array come back under several.
    """
    found = Content()
    found.add(np.ascontiguousarray(array))
    return found.value()


def is_name(name: str) -> bool:
    """Whether it names something in a folder itself, and no path that leads elsewhere."""
    try:
        os.fsencode(name)
    except UnicodeEncodeError:
        return False
    return Path(name).name == name and name not in ("", ".", "..") and "\0" not in name


def plain(path: Path) -> Path:
    """The path of a file to read, which need not be there. Raises `Corrupt` for anything else: a named pipe would be
    waited for, and a device may have no end.
    """
    if not path.is_file() and path.exists():
        raise Corrupt(f"{path} is no plain file")
    return path
