"""A step to be exported: its tree without the arrays, and the arrays a part at a time, so that a step larger than the
memory can be written.
"""

from __future__ import annotations

from argparse import Namespace
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt

from tieredckpt.engine.inventory import ArrayInfo, Scalar, StepInfo
from tieredckpt.errors import Conflict, NotFound
from tieredckpt.sync import SyncStore
from tieredckpt.tree.flatten import flatten

__all__ = ["Arrays", "StoredStep"]

Arrays = Iterator[tuple[ArrayInfo, npt.NDArray[Any]]]
"""Each array with what is known of it; it is free to go once the next one is asked for."""

_PART = 256 << 20
"""Bytes that are brought back together; a larger array comes alone."""


class StoredStep:
    """A step, or a part of it. The training goes on from where it would have: nothing is resumed.

    Args:
        store: open.
        step: its number; None for the newest.
        part: the path of a container, such as ``model``, which is taken for the whole; names begin below it.
        keys: only the leaves under these keys or patterns.
        progress: is told the bytes that were brought back.

    Raises `NotFound`, `Corrupt` and `TierUnavailable` as `SyncStore.describe` does.
    """

    def __init__(
        self,
        store: SyncStore,
        step: int | None = None,
        *,
        part: str | None = None,
        keys: Sequence[str] | None = None,
        progress: Callable[[int], None] = lambda nbytes: None,
    ) -> None:
        chosen = keys if part is None else [part]
        details = store.describe(step, keys=chosen)
        below = (*(array.key for array in details.arrays), *details.scalars)
        if part is not None and not all(key.startswith(f"{part}/") for key in below):
            raise NotFound(f"{part!r} is no container of step {details.info.step}")
        self._store, self._keys, self._progress = store, chosen, progress
        self.part = part
        self.info: StepInfo = details.info
        self.arrays: tuple[ArrayInfo, ...] = details.arrays
        """In the order of the tree."""
        self.scalars: Mapping[str, Scalar] = details.scalars
        """The leaves that are no arrays, by key."""
        self.sources: Counter[str] = Counter()
        """Bytes that came from each tier so far."""

    def tree(self) -> Any:
        """The tree, with an `ArraySpec` in the place of each array."""
        found = self._store.restore(self.info.step, keys=self._keys, as_="specs", resume=False)
        assert found is not None
        self._compare(found.serial)
        return found.tree if self.part is None else _at(found.tree, self.part)

    def leaves(self) -> Iterator[tuple[tuple[str, ...], Any]]:
        """The path of each leaf of the tree, and an `ArraySpec`, or a value."""
        yield from _leaves(self.tree(), ())

    def name(self, array: ArrayInfo) -> str:
        """The key of an array, below the part."""
        return array.key if self.part is None else array.key.removeprefix(f"{self.part}/")

    def read(self, arrays: Sequence[ArrayInfo] | None = None) -> Arrays:
        """Arrays of the step, all without ``arrays``, in the order given, verified."""
        for part in _parts(self.arrays if arrays is None else arrays):
            found = self._store.restore(self.info.step, keys=[array.key for array in part], resume=False)
            assert found is not None
            self._compare(found.serial)
            self.sources.update(found.sources)
            values = {leaf.key: np.asarray(leaf.source) for leaf in flatten(found.tree).arrays}
            for array in part:
                yield array, values.pop(array.key)
                self._progress(array.nbytes)

    def _compare(self, serial: int) -> None:
        if serial != self.info.serial:
            raise Conflict(f"step {self.info.step} was saved again while it was read; begin anew")


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


def _parts(arrays: Sequence[ArrayInfo]) -> Iterator[list[ArrayInfo]]:
    part: list[ArrayInfo] = []
    size = 0
    for array in arrays:
        if part and size + array.nbytes > _PART:
            yield part
            part, size = [], 0
        part.append(array)
        size += array.nbytes
    if part:
        yield part
