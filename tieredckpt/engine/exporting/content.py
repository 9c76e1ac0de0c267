"""A step as a format is given it: its tree without the arrays, and the arrays a part at a time, so that a step larger
than the memory can be written.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from argparse import Namespace
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt

from tieredckpt.config.formats import Output
from tieredckpt.engine.inventory import ArrayInfo, Scalar, StepDetails, StepInfo
from tieredckpt.errors import NotFound
from tieredckpt.format.casts import cast

__all__ = ["Arrays", "Dtypes", "StepContent", "Took"]

Arrays = Iterator[tuple[ArrayInfo, npt.NDArray[Any]]]
"""Each array, or piece of one, with its description; its memory may be reused once the next one is asked for."""

Dtypes = Mapping[str, np.dtype[Any]]
"""The dtype that arrays are wanted in, by their keys."""

Took = Callable[[ArrayInfo, npt.NDArray[np.uint8]], object]
"""Called with bytes of an array that were written."""

_PIECE = 16 << 20
"""Bytes of a piece at most."""


class StepContent(ABC):
    """A step, or a part of it.

    Args:
        details: of the step, with the leaves that are exported.
        part: the path of a container, such as ``model``, which is taken for the whole; names begin below it.

    Raises `NotFound` where the part is no container.
    """

    compared = True
    """Whether what a format writes is read back and compared; else it may leave out digests."""

    def __init__(self, details: StepDetails, part: str | None) -> None:
        below = (*(array.key for array in details.arrays), *details.scalars)
        if part is not None and not all(key.startswith(f"{part}/") for key in below):
            raise NotFound(f"{part!r} is no container of step {details.info.step}")
        self.part = part
        self.info: StepInfo = details.info
        self.arrays: tuple[ArrayInfo, ...] = details.arrays
        """In the order of the tree."""
        self.scalars: Mapping[str, Scalar] = details.scalars
        """The leaves that are no arrays, by key."""
        self.sources: Counter[str] = Counter()
        """Bytes that came from each tier so far."""

    @abstractmethod
    def _tree(self) -> Any:
        """The chosen leaves of the whole tree, with an `ArraySpec` in the place of each array."""

    @abstractmethod
    def read(self, arrays: Sequence[ArrayInfo] | None = None) -> Arrays:
        """Arrays of the step, all without ``arrays``, whole, in the order given, verified."""

    def pieces(self, arrays: Sequence[ArrayInfo] | None = None, dtypes: Dtypes = MappingProxyType({})) -> Arrays:
        """As `read`, but each array in one-dimensional pieces that follow each other, an empty one as one piece.

        An array whose key is in ``dtypes`` comes in that dtype: see `tieredckpt.format.casts.cast`.
        """
        memory = np.empty(_PIECE, np.uint8)
        for info, array in self.read(arrays):
            flat = np.ascontiguousarray(array).reshape(-1)
            dtype = dtypes.get(info.key, flat.dtype)
            items = max(1, _PIECE // max(flat.itemsize, dtype.itemsize))
            for start in range(0, max(1, flat.size), items):
                piece = flat[start : start + items]
                if dtype != flat.dtype:
                    into = memory[: piece.size * dtype.itemsize].view(dtype)
                    cast(info.key, piece, into)
                    piece = into
                yield info, piece

    def write_to(self, file: Output, arrays: Sequence[ArrayInfo], dtypes: Dtypes, took: Took) -> None:
        """Append arrays to a file, as little-endian bytes, one after the other; in the dtypes, wide ones first.

        Where the step is `compared`, ``took`` is called with every piece.
        """
        for info, piece in self.pieces(arrays, dtypes):
            data = (piece if sys.byteorder == "little" else piece.byteswap()).view(np.uint8)
            if self.compared:
                took(info, data)
            file.write(data)

    def folders(self) -> Iterator[tuple[Path, str]]:
        """Where local files hold the step, for exports that link them; nothing if that is not known."""
        yield from ()

    def tree(self) -> Any:
        """The tree, with an `ArraySpec` in the place of each array."""
        tree = self._tree()
        return tree if self.part is None else _at(tree, self.part)

    def leaves(self) -> Iterator[tuple[tuple[str, ...], Any]]:
        """The path of each leaf of the tree, and an `ArraySpec`, or a value."""
        yield from _leaves(self.tree(), ())

    def name(self, array: ArrayInfo) -> str:
        """The key of an array, below the part."""
        return array.key if self.part is None else array.key.removeprefix(f"{self.part}/")


def _at(tree: Any, part: str) -> Any:
    for name in part.split("/"):
        children = {str(key): value for key, value in tree.items()} if isinstance(tree, dict) else {}
        if name not in children:
            raise NotFound(f"{part!r} is no container of the step")
        tree = children[name]
    return tree


def _leaves(tree: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield from _leaves(value, (*path, str(key)))
    elif isinstance(tree, list | tuple | deque):
        for at, value in enumerate(tree):
            yield from _leaves(value, (*path, str(at)))
    elif isinstance(tree, Namespace | SimpleNamespace):
        yield from _leaves(vars(tree), path)
    else:
        yield path, tree
