"""The chunks in a tier's packs: those found at opening as columns, what changed since as a dict beside them."""

from __future__ import annotations

import struct
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterable, Iterator, MutableMapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tieredckpt.format.digest import SIZE
from tieredckpt.format.ocdbt import Extent
from tieredckpt.format.pack import RECORD

__all__ = ["ChunkIndex"]

_HALVES = struct.Struct(">QQ")
_SPARES = 8
"""Copies of one chunk that are remembered; packs may list any number."""


class _Rows(NamedTuple):
    """Chunks as columns, in ascending order of their digests.

    Memoryviews have plain numbers as items, and cheaper ones to get one by one than arrays.
    """

    paths: list[str]
    """Of the packs."""
    gone: bytearray
    """A byte for each chunk: whether it is forgotten, or elsewhere."""
    high: memoryview
    low: memoryview
    offset: memoryview
    length: memoryview
    path: memoryview

    def find(self, digest: bytes) -> int | None:
        """Row of a chunk, if it is not gone."""
        if len(digest) != SIZE:
            return None
        high, low = _HALVES.unpack(digest)
        first = bisect_left(self.high, high)
        last = bisect_right(self.high, high, first)
        row = bisect_left(self.low, low, first, last)
        return row if row < last and self.low[row] == low and not self.gone[row] else None

    def digest(self, row: int) -> bytes:
        return _HALVES.pack(self.high[row], self.low[row])


class ChunkIndex(MutableMapping[bytes, Extent]):
    """Index of the places of chunks, by digest.

    A million chunks take 36 MB and as many milliseconds to fill in; as objects in a dict they would take ten times
    as much of both. Readers may be on any thread; changes are made on one.
    """

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self.fill((), np.empty(0, np.int64), np.empty(0, RECORD))

    def fill(self, paths: Sequence[str], counts: NDArray[Any], table: NDArray[Any]) -> dict[bytes, list[Extent]]:
        """Replace the content by the entries of packs.

        Args:
            paths: of the packs.
            counts: how many chunks each lists.
            table: of dtype `RECORD`, the chunks of all packs one after the other.

        Returns:
            Further places of chunks, by digest; up to 8 of each.
        """
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
        columns = (memoryview(column[first]) for column in (high, low, offset, length, path))
        # At once, and before the dict is emptied, so that a reader finds what was or what is.
        self._rows = _Rows(list(paths), bytearray(int(first.sum())), *columns)
        self._left = len(self._rows.gone)
        self._since: dict[bytes, Extent] = {}
        """Chunks added since; no digest is both here and, not gone, in the rows."""
        duplicates: dict[bytes, list[Extent]] = {}
        for row in np.flatnonzero(again).tolist():
            digest = _HALVES.pack(high[row], low[row])
            extent = Extent(paths[path[row]], int(offset[row]), int(length[row]))
            known = duplicates.setdefault(digest, [])
            if extent not in known and extent != self[digest] and len(known) < _SPARES:
                known.append(extent)
        return {digest: extents for digest, extents in duplicates.items() if extents}

    def __getitem__(self, digest: bytes) -> Extent:
        if (found := self._since.get(digest)) is not None:
            return found
        rows = self._rows
        if (row := rows.find(digest)) is not None:
            return Extent(rows.paths[rows.path[row]], rows.offset[row], rows.length[row])
        return self._since[digest]  # where it may have come to from the rows meanwhile

    def __contains__(self, digest: object) -> bool:
        found = digest in self._since or (isinstance(digest, bytes) and self._rows.find(digest) is not None)
        return found or digest in self._since

    def __setitem__(self, digest: bytes, extent: Extent) -> None:
        known = digest in self._since
        self._since[digest] = extent  # before it goes from the rows: a reader finds either
        if not known:
            self._mark_gone(digest)

    def __delitem__(self, digest: bytes) -> None:
        if digest in self._since:
            del self._since[digest]
        elif not self._mark_gone(digest):
            raise KeyError(digest)

    def _mark_gone(self, digest: bytes) -> bool:
        row = self._rows.find(digest)
        if row is None:
            return False
        self._rows.gone[row] = 1
        self._left -= 1
        return True

    def __iter__(self) -> Iterator[bytes]:
        rows = self._rows
        for row, gone in enumerate(rows.gone):
            if not gone:
                yield rows.digest(row)
        yield from self._since

    def __len__(self) -> int:
        return self._left + len(self._since)

    def was_found(self, digest: bytes) -> bool:
        """Whether the chunk is where `fill` found it."""
        return digest not in self._since and self._rows.find(digest) is not None

    def in_packs(self, paths: Collection[str]) -> list[bytes]:
        """The digests of the chunks that lie in these packs."""
        wanted, rows = frozenset(paths), self._rows
        found = np.flatnonzero(_lie_in(rows, wanted)).tolist()
        return [*map(rows.digest, found), *(digest for digest, at in tuple(self._since.items()) if at.path in wanted)]

    def listed(
        self, paths: Sequence[str], besides: Iterable[tuple[bytes, Extent]] = ()
    ) -> tuple[NDArray[np.int64], NDArray[Any]]:
        """How many chunks lie in each of these packs, and all of them, as `fill` takes them; with those ``besides``."""
        place = {path: number for number, path in enumerate(paths)}
        columns = self._rows
        rows = np.flatnonzero(_lie_in(columns, frozenset(paths)))
        since = [(digest, at) for digest, at in [*tuple(self._since.items()), *besides] if at.path in place]
        table = np.empty(len(rows) + len(since), RECORD)
        halves = np.empty((len(rows), 2), ">u8")
        halves[:, 0], halves[:, 1] = np.asarray(columns.high)[rows], np.asarray(columns.low)[rows]
        table["digest"][: len(rows)] = halves.view("V16").reshape(-1)
        table["offset"][: len(rows)] = np.asarray(columns.offset)[rows]
        table["length"][: len(rows)] = np.asarray(columns.length)[rows]
        number = np.empty(len(table), np.int64)
        places = np.array([place.get(path, -1) for path in columns.paths] or [-1], np.int64)
        number[: len(rows)] = places[np.asarray(columns.path)[rows]]
        for row, (digest, at) in enumerate(since, len(rows)):
            table[row] = (digest, at.offset, at.length)
            number[row] = place[at.path]
        order = np.argsort(number, kind="stable")
        return np.bincount(number, minlength=len(paths)), table[order]


def _lie_in(rows: _Rows, paths: frozenset[str]) -> NDArray[np.bool_]:
    """Which rows are present and lie in one of the packs."""
    wanted = np.fromiter(map(paths.__contains__, rows.paths), bool, len(rows.paths))
    there: NDArray[np.bool_] = np.frombuffer(rows.gone, np.uint8) == 0
    if rows.paths:
        there &= wanted[np.asarray(rows.path)]
    return there
