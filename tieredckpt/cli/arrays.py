"""Brings the arrays of a step back a part at a time, so that a step larger than the memory can be looked at."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from tieredckpt.engine.inventory import ArrayInfo
from tieredckpt.sync import SyncStore
from tieredckpt.tree.flatten import flatten

__all__ = ["Arrays", "restored"]

Arrays = Iterator[tuple[ArrayInfo, npt.NDArray[Any]]]
"""Each array with what is known of it; it is free to go once the next one is asked for."""

_PART = 256 << 20
"""Bytes that are brought back together; a larger array comes alone."""


def restored(
    store: SyncStore,
    step: int,
    arrays: Sequence[ArrayInfo],
    sources: Counter[str],
    progress: Callable[[int], None],
) -> Arrays:
    """The arrays of a step, in their order, verified; ``sources`` is told the bytes that come from each tier.

    The training goes on from where it would have: nothing is resumed.
    """
    for part in _parts(arrays):
        found = store.restore(step, keys=[array.key for array in part], resume=False)
        assert found is not None
        sources.update(found.sources)
        values = {leaf.key: np.asarray(leaf.source) for leaf in flatten(found.tree).arrays}
        for array in part:
            yield array, values.pop(array.key)
            progress(array.nbytes)


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
