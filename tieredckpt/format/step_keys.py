"""The keys of a step's index: of its arrays and chunks, and of the record and the digests, which may be in parts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import count
from operator import itemgetter

from tieredckpt.errors import Corrupt
from tieredckpt.format import layout, ocdbt
from tieredckpt.format.grid import Grid, cell_key, cells
from tieredckpt.format.ocdbt import Extent

__all__ = ["entry_keys", "in_parts", "join_parts"]

_INLINE_VALUE_MAX = 1 << 20


_KEPT_AT_MOST = 100_000
"""Arrays of a tree whose keys are kept for the next save: 25 MB."""


def entry_keys(
    names: tuple[str, ...], grids: tuple[Grid, ...], record_parts: int, digest_parts: int
) -> tuple[ocdbt.Keys, Callable[[list[bytes | Extent]], Sequence[bytes | Extent]]]:
    """The keys of a step's index, and what puts the values of its arrays, record and digests in their order.

    They are kept for the next save of such a tree.
    """
    find = _entry_keys if len(names) <= _KEPT_AT_MOST else _entry_keys.__wrapped__
    return find(names, grids, record_parts, digest_parts)


@lru_cache(maxsize=2)  # of the trees that are saved now; RAM and slower tiers have the same keys
def _entry_keys(
    names: tuple[str, ...], grids: tuple[Grid, ...], record_parts: int, digest_parts: int
) -> tuple[ocdbt.Keys, Callable[[list[bytes | Extent]], Sequence[bytes | Extent]]]:
    keys: list[bytes] = []
    for name, grid in zip(names, grids, strict=True):
        prefix = name.encode() + b"/"
        keys.append(prefix + b"zarr.json")
        keys += [prefix + cell_key(cell.index) for cell in cells(grid)]
    keys += [_part_key(layout.STEP_RECORD, part) for part in range(record_parts)]
    keys += [_part_key(layout.CHUNK_DIGESTS, part) for part in range(digest_parts)]
    order = sorted(range(len(keys)), key=keys.__getitem__)
    return ocdbt.Keys([keys[i] for i in order]), itemgetter(*order)  # there are two keys at least


def in_parts(value: bytes) -> list[bytes]:
    """A value in pieces that an index takes inline; one for an empty value."""
    return [value[i : i + _INLINE_VALUE_MAX] for i in range(0, len(value), _INLINE_VALUE_MAX)] or [b""]


def _part_key(name: str, part: int) -> bytes:
    return f"{name}.{part}".encode() if part else name.encode()


def join_parts(name: str, get: Callable[[bytes], bytes | Extent | None], where: str) -> bytes:
    """The value that `in_parts` divided, by what ``get`` finds under each key. Raises `Corrupt`."""
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
