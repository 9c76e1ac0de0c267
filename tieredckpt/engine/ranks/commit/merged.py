"""Merged steps, kept from the vote to the last commit: the tree and all digests, without the places of chunks.

Rank 0 merges the parts of a step once, at the vote. For each tier it then adds the places of the chunks there, which is
far less work than to merge the parts again. A chunk takes 16 bytes, its digest.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from tieredckpt.errors import Conflict, Corrupt
from tieredckpt.format.digest import SIZE
from tieredckpt.format.encoding import Encoding
from tieredckpt.format.grid import Grid
from tieredckpt.format.manifest import ArrayIndex, Chunk, StepIndex, StepRecord
from tieredckpt.format.ocdbt import Extent

__all__ = ["MergedStep", "cell_sizes", "placed", "without_places"]

_NOTHING: Mapping[int, bytes] = {}
"""One object for all arrays without inline chunks: blocks that cannot be joined make very many of them."""


@dataclass(frozen=True, slots=True)
class _Array:
    grid: Grid
    dtype: np.dtype[Any]
    digests: bytes
    """Of all chunks, in row-major order of the grid."""
    inline: Mapping[int, bytes]
    """The bytes of those that go into the index itself, by their place in that order."""


@dataclass(frozen=True, slots=True)
class MergedStep:
    """A step of all its ranks, without the places of its chunks."""

    record: StepRecord
    arrays: Mapping[str, _Array]


def without_places(index: StepIndex) -> MergedStep:
    """The content of a merged step that is the same on every tier."""
    return MergedStep(
        index.record,
        {
            key: _Array(
                array.grid,
                array.dtype,
                b"".join([chunk.digest for chunk in array.chunks]),
                {at: chunk.where for at, chunk in enumerate(array.chunks) if isinstance(chunk.where, bytes)}
                or _NOTHING,
            )
            for key, array in index.arrays.items()
        },
    )


def cell_sizes(whole: MergedStep, digests: Collection[bytes]) -> dict[bytes, int]:
    """Bytes of the cells of some chunks of a step, whatever their stored size is."""
    found: dict[bytes, int] = {}
    for array in whole.arrays.values():
        of_array = np.frombuffer(array.digests, f"V{SIZE}").tolist()
        found.update((digest, array.grid.cell_nbytes) for digest in of_array if digest in digests)
    return found


def placed(
    whole: MergedStep, written: Mapping[bytes, Extent], there: Mapping[bytes, Extent], encoding: Encoding
) -> StepIndex:
    """The step on a tier, to which the ranks have ``written`` some of its chunks, and which had others ``there``.

    Raises:
        Conflict: a chunk is nowhere on the tier.
        Corrupt: a chunk lies in an extent that is too short or too long for it.
    """
    arrays: dict[str, ArrayIndex] = {}
    for key, array in whole.arrays.items():
        digests: list[bytes] = np.frombuffer(array.digests, f"V{SIZE}").tolist()
        chunks: list[Chunk] = []
        nbytes = array.grid.cell_nbytes
        for at, digest in enumerate(digests):
            extent = there.get(digest)
            if extent is None or not encoding.fits(extent.length, nbytes):  # before the tier's `codec` was changed
                extent = written.get(digest, extent)
            if array.inline and at in array.inline:
                chunks.append(Chunk(digest, array.inline[at]))
            elif extent is None:
                raise Conflict(f"{whole.record.id}: chunk {at} of {key!r} is nowhere on the tier; save again")
            elif not encoding.fits(extent.length, nbytes):
                raise Corrupt(f"{whole.record.id}: chunk {at} of {key!r} is said to have {extent.length} bytes")
            else:
                chunks.append(Chunk(digest, extent))
        arrays[key] = ArrayIndex(array.grid, array.dtype, chunks)
    return StepIndex(whole.record, arrays)
