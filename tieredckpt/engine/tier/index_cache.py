"""Cache of the step indexes that were read or written last, and what they refer to."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from tieredckpt.format.manifest import ArrayIndex, StepId, StepIndex
from tieredckpt.format.ocdbt import Extent

__all__ = ["RecentIndexes", "packs_of", "unique_extents"]

_KEPT = 8


class RecentIndexes(OrderedDict[StepId, StepIndex]):
    """Indexes by step, the one used last at the end, and not many of them."""

    def remember(self, step: StepId, index: StepIndex) -> None:
        """Keep an index; the one that was not used for longest may go."""
        self[step] = index
        self.move_to_end(step)
        while len(self) > _KEPT:
            self.popitem(last=False)

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
    return frozenset(extent.path for extent in unique_extents(arrays).values())
