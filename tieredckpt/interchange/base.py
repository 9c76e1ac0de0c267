"""What a format offers: to read a checkpoint, to write a step, to read back what was written."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from tieredckpt.format.digest import SIZE, digest

__all__ = ["Digests", "Format", "content", "is_name"]

Digests: TypeAlias = Mapping[str, bytes]
"""Of each thing that a file or folder has, by its name there: what `content` gives."""


@dataclass(frozen=True, slots=True)
class Format:
    """A format of another library."""

    read: Callable[[Path], Any] | None = None
    """The tree at a path, its arrays whole. Runs nothing of what it reads; raises `NotFound`, `Invalid` and `Corrupt`,
    naming file and key."""
    write: Callable[..., Digests] | None = None
    """``write(step, to, **options)`` writes all arrays of a `StoredStep` to ``to``, a path at which nothing is, and
    tells what was written. Raises `Invalid`, naming the key, for what the format cannot have, before it reads any."""
    read_back: Callable[[Path], Iterator[tuple[str, bytes]]] | None = None
    """The digests of what lies at a path, read anew; raises `Corrupt`."""
    parts: tuple[str, ...] = ()
    """Parts of a tree of which the first that a step has is exported, unless another one is named."""
    options: frozenset[str] = frozenset()
    """Keyword arguments of ``write``."""


def content(array: npt.NDArray[Any]) -> bytes:
    """What is compared after writing: the bytes of an array, and their number, but not its dtype, since bytes of the
    same array come back under several.
    """
    flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    found = digest(flat) if flat.size else bytes(SIZE)
    return found + flat.size.to_bytes(8, "big")


def is_name(name: str) -> bool:
    """Whether it names something in a folder itself, and no path that leads elsewhere."""
    return Path(name).name == name and name not in ("", ".", "..") and "\0" not in name
