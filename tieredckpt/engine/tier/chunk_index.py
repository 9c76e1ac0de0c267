"""The chunks in a tier's packs: those found at opening as columns, what changed since as a dict beside them."""

from __future__ import annotations

import struct
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterable, Iterator, MutableMapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tieredckpt.format.digest import SIZE
from tieredckpt.format.ocdbt import Extent
from tieredckpt.format.pack import RECORD

__all__ = ["ChunkIndex"]

_HALVES = struct.Struct(">QQ")
_SPARES = 8
"""Copies of one chunk that are remembered; packs may list any number."""


class ChunkIndex(MutableMapping[bytes, Extent]):
    """Index of the places of chunks, by digest.

    A million chunks take 36 MB and as many milliseconds to fill in; as objects in a dict they would take ten times
    as much of both. Readers may be on any thread; changes are made on one.
    """

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self._paths: list[str] = []
        nothing = np.empty(0, np.uint64)
        self._columns(nothing, nothing, nothing, nothing, np.empty(0, np.uint32))
        self._since: dict[bytes, Extent] = {}
        """Chunks added after `fill`; no digest is both here and, not gone, in the columns."""

    def _columns(
        self,
        high: NDArray[np.uint64],
        low: NDArray[np.uint64],
        offset: NDArray[np.uint64],
        length: NDArray[np.uint64],
        path: NDArray[np.uint32],
    ) -> None:
        # As memoryviews, whose items are plain numbers, and cheaper to get one by one than those of arrays.
        self._high, self._low = memoryview(high), memoryview(low)
        self._offset, self._length, self._path = memoryview(offset), memoryview(length), memoryview(path)
        self._gone = bytearray(len(high))
        self._left = len(high)

    def fill(self, paths: Sequence[str], counts: NDArray[Any], table: NDArray[Any]) -> dict[bytes, list[Extent]]:
        """Replace the content by the entries of packs.

        Args:
            paths: of the packs.
            counts: how many chunks each lists.
            table: of dtype `RECORD`, the chunks of all packs one after the other.

        Returns:
            Further places of chunks, by digest; up to 8 of each.
        """
        self._paths, self._since = list(paths), {}
        halves = np.ascontiguousarray(table["digest"]).view(">u8").reshape(-1, 2)
        high, low = halves[:, 0].astype(np.uint64), halves[:, 1].astype(np.uint64)
        order = np.argsort(high)
        in_order = high[order]
        if (in_order[1:] == in_order[:-1]).any():
            order = np.lexsort((low, high))
        # Column by column: to put whole records in order takes several times as long.
        high, low = in_order, low[order]  # the first column is the same after either sort
        offset, length = table["offset"].astype(np.uint64)[order], table["length"].astype(np.uint64)[order]
        path = np.repeat(np.arange(len(paths), dtype=np.uint32), counts)[order]
        again = np.zeros(len(order), bool)
        again[1:] = (high[1:] == high[:-1]) & (low[1:] == low[:-1])
        first = ~again
        self._columns(high[first], low[first], offset[first], length[first], path[first])
        duplicates: dict[bytes, list[Extent]] = {}
        for row in np.flatnonzero(again).tolist():
            digest = _HALVES.pack(high[row], low[row])
            extent = Extent(self._paths[path[row]], int(offset[row]), int(length[row]))
            known = duplicates.setdefault(digest, [])
            if extent not in known and extent != self[digest] and len(known) < _SPARES:
                known.append(extent)
        return {digest: extents for digest, extents in duplicates.items() if extents}

    def _row(self, digest: bytes) -> int | None:
        """Row of a chunk in the columns, if it is not gone."""
        if len(digest) != SIZE:
            return None
        high, low = _HALVES.unpack(digest)
        first = bisect_left(self._high, high)
        last = bisect_right(self._high, high, first)
        row = bisect_left(self._low, low, first, last)
        return row if row < last and self._low[row] == low and not self._gone[row] else None

    def __getitem__(self, digest: bytes) -> Extent:
        found = self._since.get(digest)
        if found is not None:
            return found
        if (row := self._row(digest)) is None:
            raise KeyError(digest)
        return Extent(self._paths[self._path[row]], self._offset[row], self._length[row])

    def __contains__(self, digest: object) -> bool:
        return digest in self._since or (isinstance(digest, bytes) and self._row(digest) is not None)

    def __setitem__(self, digest: bytes, extent: Extent) -> None:
        if digest not in self._since:
            self._mark_gone(digest)
        self._since[digest] = extent

    def __delitem__(self, digest: bytes) -> None:
        if digest in self._since:
            del self._since[digest]
        elif not self._mark_gone(digest):
            raise KeyError(digest)

    def _mark_gone(self, digest: bytes) -> bool:
        row = self._row(digest)
        if row is None:
            return False
        self._gone[row] = 1
        self._left -= 1
        return True

    def __iter__(self) -> Iterator[bytes]:
        for row in range(len(self._high)):
            if not self._gone[row]:
                yield self._digest(row)
        yield from self._since

    def __len__(self) -> int:
        return self._left + len(self._since)

    def _digest(self, row: int) -> bytes:
        return _HALVES.pack(self._high[row], self._low[row])

    def was_found(self, digest: bytes) -> bool:
        """Whether the chunk is where `fill` found it."""
        return digest not in self._since and self._row(digest) is not None

    def in_packs(self, paths: Collection[str]) -> list[bytes]:
        """The digests of the chunks that lie in these packs."""
        wanted = frozenset(paths)
        rows = np.flatnonzero(self._lies_in(wanted)).tolist()
        return [*map(self._digest, rows), *(digest for digest, at in tuple(self._since.items()) if at.path in wanted)]

    def _lies_in(self, paths: frozenset[str]) -> NDArray[np.bool_]:
        """Which rows are present and lie in one of the packs."""
        wanted = np.fromiter((path in paths for path in self._paths), bool, len(self._paths))
        there: NDArray[np.bool_] = np.frombuffer(self._gone, np.uint8) == 0
        if self._paths:
            there &= wanted[np.asarray(self._path)]
        return there

    def listed(
        self, paths: Sequence[str], besides: Iterable[tuple[bytes, Extent]] = ()
    ) -> tuple[NDArray[np.int64], NDArray[Any]]:
        """How many chunks lie in each of these packs, and all of them, as `fill` takes them; with those ``besides``."""
        place = {path: number for number, path in enumerate(paths)}
        rows = np.flatnonzero(self._lies_in(frozenset(paths)))
        since = [(digest, at) for digest, at in [*tuple(self._since.items()), *besides] if at.path in place]
        table = np.empty(len(rows) + len(since), RECORD)
        halves = np.empty((len(rows), 2), ">u8")
        halves[:, 0], halves[:, 1] = np.asarray(self._high)[rows], np.asarray(self._low)[rows]
        table["digest"][: len(rows)] = halves.view("V16").reshape(-1)
        table["offset"][: len(rows)] = np.asarray(self._offset)[rows]
        table["length"][: len(rows)] = np.asarray(self._length)[rows]
        number = np.empty(len(table), np.int64)
        places = np.array([place.get(path, -1) for path in self._paths] or [-1], np.int64)
        number[: len(rows)] = places[np.asarray(self._path)[rows]]
        for row, (digest, at) in enumerate(since, len(rows)):
            table[row] = (digest, at.offset, at.length)
            number[row] = place[at.path]
        order = np.argsort(number, kind="stable")
        return np.bincount(number, minlength=len(paths)), table[order]
