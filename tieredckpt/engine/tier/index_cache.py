"""Cache of the step indexes that were read or written last, and what they refer to."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from itertools import chain
from operator import attrgetter

from tieredckpt.engine.tier.sizes import Sizes
from tieredckpt.format.manifest import ArrayIndex, Chunk, StepId, StepIndex
from tieredckpt.format.ocdbt import Extent
from tieredckpt.format.part import PartArray

__all__ = ["RecentIndexes", "located", "memory_of", "packs_of", "unique_extents"]

_KEPT = ((64, 16 << 20), (8, 256 << 20), (2, 1 << 62))
"""How many indexes are kept while they take no more bytes of memory than that: many small ones, or a few of any size.

A save evicts steps from RAM, oldest first, while the training waits: to read an index again takes milliseconds.
"""


_CHUNK_BYTES, _ARRAY_BYTES = 192, 576
"""Of memory that a chunk and an array of a decoded index take, as measured; their files take a half to a sixth."""


class RecentIndexes(OrderedDict[StepId, StepIndex]):
    """Cached indexes by step, the one used last at the end; a few are kept, see `_KEPT`."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes: Sizes[StepId] = Sizes()
        """Bytes of the index files of every step, remembered or not."""
        self.packs: dict[StepId, frozenset[str]] = {}
        """The packs of every step that was read or written."""
        self._memory: dict[StepId, int] = {}
        """Bytes that each remembered index takes."""

    def forget(self, step: StepId) -> frozenset[str] | None:
        """Forget a step's index; returns its packs where they were known."""
        self.pop(step, None)
        return self.packs.pop(step, None)

    def remember(self, step: StepId, index: StepIndex) -> None:
        """Keep an index; those that were not used for longest may go."""
        self[step] = index
        self.move_to_end(step)
        self._memory[step] = memory_of(index.arrays)
        while not self._fits():
            self.popitem(last=False)
        self._memory = {each: self._memory[each] for each in self}

    def _fits(self) -> bool:
        memory = sum(self._memory[each] for each in self)
        return any(len(self) <= count and memory <= nbytes for count, nbytes in _KEPT)


def memory_of(arrays: Mapping[str, ArrayIndex]) -> int:
    """About how many bytes of memory the index of a step with these arrays takes."""
    return len(arrays) * _ARRAY_BYTES + sum(len(array.chunks) for array in arrays.values()) * _CHUNK_BYTES


def unique_extents(arrays: Mapping[str, ArrayIndex]) -> dict[bytes, Extent]:
    """The extents of a step by digest; inline chunks have none."""
    return {
        chunk.digest: chunk.where
        for array in arrays.values()
        for chunk in array.chunks
        if isinstance(chunk.where, Extent)
    }


def located(arrays: Mapping[str, ArrayIndex | PartArray], extents: Mapping[bytes, Extent]) -> dict[str, ArrayIndex]:
    """The same arrays, with every chunk where ``extents`` has it; small ones stay in the index."""
    return {
        key: ArrayIndex(
            array.grid,
            array.dtype,
            [Chunk(digest, where if isinstance(where, bytes) else extents[digest]) for digest, where in array.chunks],
        )
        for key, array in arrays.items()
    }


def packs_of(arrays: Mapping[str, ArrayIndex]) -> frozenset[str]:
    """The packs that a step refers to."""
    chunks = chain.from_iterable(map(attrgetter("chunks"), arrays.values()))
    return frozenset([where.path for where in map(attrgetter("where"), chunks) if isinstance(where, Extent)])
