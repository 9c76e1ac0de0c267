"""Finds damage on a tier: reads and verifies each extent once, however many steps refer to it, no faster than asked."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import TypeVar

from tieredckpt._batches import batches
from tieredckpt.blobs.wrap import Pace
from tieredckpt.engine.restoring.deriving import open_source
from tieredckpt.engine.restoring.pieces import NOTHING, Piece
from tieredckpt.engine.restoring.reader import Place, place_of, read_pieces
from tieredckpt.engine.restoring.source import Damage, StepSource
from tieredckpt.engine.state.state import State
from tieredckpt.engine.tier.tier import Tier
from tieredckpt.errors import Corrupt
from tieredckpt.format.digest import digest
from tieredckpt.format.manifest import StepId
from tieredckpt.format.ocdbt import Extent

__all__ = ["Checked", "find_damage"]

T = TypeVar("T")

_BATCH = 64 << 20
_BATCH_SECONDS = 0.25
"""With a bounded rate, how long one batch may take at that rate: others do not wait longer for their turn."""


class Checked:
    """What one verification of many steps has read of a tier; ``pace`` bounds the bytes read a second."""

    def __init__(self, pace: Pace | None = None) -> None:
        self.pace = pace or Pace(None)
        self.intact: dict[Place, bool] = {}
        """Whether the chunk at each place was intact."""

    def batches(self, items: Iterable[T], size: Callable[[T], int]) -> Iterator[list[T]]:
        """Split items of so many bytes each into batches that are read in one go; a single item may be larger."""
        limit = _BATCH if self.pace.rate is None else min(_BATCH, self.pace.rate * _BATCH_SECONDS)
        return batches(items, size, limit)


async def find_damage(
    state: State,
    step: StepId,
    tier: Tier,
    progress: Callable[[int], None] | None = None,
    checked: Checked | None = None,
) -> list[Damage]:
    """Read and verify all of a step on one tier, except what is ``checked``, keeping nothing; returns the damage.

    Its index is read from the tier as well, though this process may know it. Raises what the index raises, and
    `TierUnavailable` when a chunk could not be read to the end.
    """
    async with open_source(state, step, tier, anew=True) as source:
        source.progress = progress
        await _check(state, source, checked or Checked())
        if source.silence is not None:
            raise source.silence
        return source.damage


async def _check(state: State, source: StepSource, checked: Checked) -> None:
    pieces = [
        Piece(key, ordinal, array.grid.cell_nbytes, chunk, NOTHING)
        for key, array in source.index.arrays.items()
        for ordinal, chunk in enumerate(array.chunks)
    ]
    stored = [piece for piece in pieces if isinstance(piece.chunk.where, Extent)]
    for piece in pieces:
        if isinstance(piece.chunk.where, bytes) and digest(piece.chunk.where) != piece.chunk.digest:
            source.note(
                source.tier,
                piece.key,
                piece.chunk,
                Corrupt(f"bytes of {piece.array!r} in the index are damaged"),
            )
    if source.progress is not None:
        source.progress(sum(piece.nbytes for piece in pieces if isinstance(piece.chunk.where, bytes)))
    # The store digests on threads of its own, and the user has said how many may do so; as many wait for the device.
    read = partial(read_pieces, state, source, source.tier, digested_reads=2 * state.config.copy_threads)
    unread = {place_of(piece): piece for piece in stored if place_of(piece) not in checked.intact}
    for batch in checked.batches((unread[place] for place in sorted(unread)), lambda piece: piece.nbytes):
        await checked.pace.take(sum(piece.nbytes for piece in batch))
        failed = {id(piece) for piece in await read(batch)}
        if source.silence is not None:
            return  # what was not read is not known to be damaged
        checked.intact.update((place_of(piece), id(piece) not in failed) for piece in batch)
    for piece in stored:
        if not checked.intact[place_of(piece)] and unread.get(place_of(piece)) is not piece:
            source.note(source.tier, piece.key, piece.chunk, Corrupt("its bytes are damaged, as a read before showed"))
