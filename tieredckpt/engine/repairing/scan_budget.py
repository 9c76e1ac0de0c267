"""How much a verification reads: each extent once, however many steps refer to it, and no faster than asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from tieredckpt._batches import batches
from tieredckpt.blobs.wrap import Pace

__all__ = ["Place", "Scan"]

T = TypeVar("T")

Place = tuple[str, int, bytes]
"""Place of a chunk: pack, offset and digest."""

_BATCH = 64 << 20
_BATCH_SECONDS = 0.25
"""At a bounded rate so much is read at a time, so that others wait no longer."""


class Scan:
    """Progress of one verification of many steps on one tier.

    ``pace`` bounds the bytes read a second.
    """

    def __init__(self, pace: Pace | None = None) -> None:
        self._pace = pace or Pace(None)
        self.intact: dict[Place, bool] = {}
        """Whether the chunk at each place was intact."""

    def batches(self, items: Iterable[T], size: Callable[[T], int]) -> Iterator[list[T]]:
        """``items`` of so many bytes each, cut into what is read in one go; an item alone may be more."""
        limit = _BATCH if self._pace.rate is None else min(_BATCH, self._pace.rate * _BATCH_SECONDS)
        return batches(items, size, limit)

    async def turn(self, nbytes: int) -> None:
        """Wait until so many bytes may be read."""
        await self._pace.take(nbytes)
