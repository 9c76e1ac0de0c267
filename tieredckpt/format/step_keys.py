"""The keys of a step's index: of arrays and chunks, and of the record and the digests, which may span several keys."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from itertools import accumulate, count
from operator import itemgetter
from typing import Any, TypeVar

import numpy as np

from tieredckpt.errors import Corrupt
from tieredckpt.format import layout, ocdbt, zarr
from tieredckpt.format.digest import SIZE
from tieredckpt.format.encoding import Encoding
from tieredckpt.format.grid import Grid, cell_key, cells
from tieredckpt.format.ocdbt import Extent

__all__ = ["Entries", "entries_of", "in_parts", "join_parts"]

_INLINE_VALUE_MAX = 1 << 20

_KEPT_BYTES = 256 << 20
"""Bytes of all entries kept for the next saves: those of 600,000 small arrays."""
_KEPT_TREES = 8
_OVERHEAD = 160
"""Bytes of a key besides its text: its object, its place in two orders, and its encoded form."""

T = TypeVar("T")


class Entries:
    """The keys of a step's index, and the order of their values; equal for all steps of trees of one form.

    Args:
        names: storage keys of the arrays.
        grids: of the arrays.
        record_parts: into how many `in_parts` divides the record.
    """

    def __init__(self, names: tuple[str, ...], grids: tuple[Grid, ...], record_parts: int) -> None:
        self.names, self.grids, self.record_parts = names, grids, record_parts
        self._metadata: dict[str, tuple[list[np.dtype[Any]], list[bytes]]] = {}
        self.counts = [grid.size for grid in grids]
        """Chunks of each array."""
        prefixes = [name.encode() + b"/" for name in names]
        keys = [prefix + b"zarr.json" for prefix in prefixes]
        for prefix, grid in zip(prefixes, grids, strict=True):
            keys += [prefix + cell_key(cell.index) for cell in cells(grid)]
        keys += [_part_key(layout.STEP_RECORD, part) for part in range(record_parts)]
        digest_parts = -(-sum(self.counts) * SIZE // _INLINE_VALUE_MAX)
        keys += [_part_key(layout.CHUNK_DIGESTS, part) for part in range(digest_parts or 1)]
        self.nbytes = 2 * sum(map(len, keys)) + _OVERHEAD * len(keys)
        """Bytes of memory, about."""
        order = sorted(range(len(keys)), key=keys.__getitem__)
        self.keys = ocdbt.Keys([keys[i] for i in order])
        self._order = _picker(order)
        starts = list(accumulate(self.counts, initial=0))
        by_name = sorted(range(len(names)), key=names.__getitem__)  # by code points, the order of their UTF-8
        self._chunks = _picker([chunk for i in by_name for chunk in range(starts[i], starts[i + 1])])

    def metadata(self, dtypes: list[np.dtype[Any]], encoding: Encoding) -> list[bytes]:
        """The ``zarr.json`` of each array, for these dtypes."""
        kept = self._metadata.get(encoding.name)
        if kept is None or kept[0] != dtypes:
            forms = zip(self.grids, dtypes, strict=True)
            made = [zarr.array_metadata(grid.shape, dtype, grid.cell, encoding) for grid, dtype in forms]
            kept = self._metadata[encoding.name] = dtypes, made
        return kept[1]

    def in_key_order(self, values: Sequence[T]) -> Sequence[T]:
        """Sort values (the arrays' metadata, all chunks, the record and the digests) into the order of the keys."""
        return self._order(values)

    def chunks_in_name_order(self, values: Sequence[T]) -> Sequence[T]:
        """One value for each chunk, the arrays in ascending order of their names."""
        return self._chunks(values)


def _picker(places: Sequence[int]) -> Callable[[Sequence[Any]], Sequence[Any]]:
    if len(places) > 1:
        return itemgetter(*places)
    return lambda values: [values[place] for place in places]


_kept: list[Entries] = []
"""Entries of the trees that are saved now, the last used at the end; RAM and slower tiers have the same entries."""
_guards_kept = threading.Lock()


def entries_of(names: tuple[str, ...], grids: tuple[Grid, ...], record_parts: int) -> Entries:
    """The entries of a step, kept for the next saves of the same tree while there is room."""
    with _guards_kept:
        for i, entries in enumerate(_kept):
            if (entries.record_parts, entries.names, entries.grids) == (record_parts, names, grids):
                _kept.append(_kept.pop(i))
                return entries
    made = Entries(names, grids, record_parts)
    if made.nbytes > _KEPT_BYTES:  # it would displace all others, and then itself
        return made
    with _guards_kept:
        _kept.append(made)
        while len(_kept) > _KEPT_TREES or sum(entries.nbytes for entries in _kept) > _KEPT_BYTES:
            del _kept[0]
    return made


def in_parts(value: bytes) -> list[bytes]:
    """A value in pieces that an index takes inline; one for an empty value."""
    return [value[i : i + _INLINE_VALUE_MAX] for i in range(0, len(value), _INLINE_VALUE_MAX)] or [b""]


def _part_key(name: str, part: int) -> bytes:
    return f"{name}.{part}".encode() if part else name.encode()


def join_parts(name: str, get: Callable[[bytes], bytes | Extent | None], where: str) -> bytes:
    """The value that `in_parts` divided; ``get`` finds the piece under each key. Raises `Corrupt`."""
    pieces = []
    for part in count():
        piece = get(_part_key(name, part))
        if piece is None:
            break
        if not isinstance(piece, bytes):
            raise Corrupt(f"{where}: {name} lies outside the index")
        pieces.append(piece)
    if not pieces:
        raise Corrupt(f"{where}: the index has no {name}")
    return b"".join(pieces)
