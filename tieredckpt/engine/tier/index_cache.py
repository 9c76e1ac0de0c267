"""Cache of the step indexes that were read or written last, and what they refer to."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from operator import attrgetter

from tieredckpt.engine.tier.sizes import Sizes
from tieredckpt.format.manifest import ArrayIndex, StepId, StepIndex
from tieredckpt.format.ocdbt import Extent

__all__ = ["RecentIndexes", "packs_of", "unique_extents"]

_KEPT, _KEPT_AT_MOST = 8, 64
_KEPT_BYTES = 4 << 20
"""Of index files; more indexes than `_KEPT`, at most `_KEPT_AT_MOST`, are kept while all take no more than that
together. Decoded they take several times as much.

A save evicts steps from RAM, oldest first, while the training waits: to read an index again takes milliseconds.
"""


class RecentIndexes(OrderedDict[StepId, StepIndex]):
    """Indexes by step, the one used last at the end, and not many of them."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes: Sizes[StepId] = Sizes()
        """Bytes of the index files of every step, remembered or not."""
        self.packs: dict[StepId, frozenset[str]] = {}
        """The packs of every step that was read or written."""

    def forget(self, step: StepId) -> frozenset[str] | None:
        """Forget a step's index; returns its packs where they were known."""
        self.pop(step, None)
        return self.packs.pop(step, None)

    def remember(self, step: StepId, index: StepIndex) -> None:
        """Keep an index; those that were not used for longest may go."""
        self[step] = index
        self.move_to_end(step)
        while len(self) > _KEPT and (len(self) > _KEPT_AT_MOST or self._kept_bytes() > _KEPT_BYTES):
            self.popitem(last=False)

    def _kept_bytes(self) -> int:
        return sum(self.nbytes.get(each, _KEPT_BYTES) for each in self)

    @contextmanager
    def rereading(self, step: StepId) -> Iterator[StepIndex | None]:
        """Read the index of a step anew in the block, though it may be cached; yields the cached one.

        It is remembered again afterwards where what was read is no better.
        """
        remembered = self.pop(step, None)
        try:
            yield remembered
        finally:
            if remembered is not None and step not in self:
                self.remember(step, remembered)


def unique_extents(arrays: Mapping[str, ArrayIndex]) -> dict[bytes, Extent]:
    """The extents of a step by digest; inline chunks have none."""
    return {
        chunk.digest: chunk.where
        for array in arrays.values()
        for chunk in array.chunks
        if isinstance(chunk.where, Extent)
    }


def packs_of(arrays: Mapping[str, ArrayIndex]) -> frozenset[str]:
    """The packs that a step refers to."""
    chunks = chain.from_iterable(map(attrgetter("chunks"), arrays.values()))
    return frozenset([where.path for where in map(attrgetter("where"), chunks) if isinstance(where, Extent)])
