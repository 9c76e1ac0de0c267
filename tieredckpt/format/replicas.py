"""Compare replicas on several ranks by the digests of their chunks, and name the ranks that differ."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import zip_longest

import msgspec

from tieredckpt.errors import Conflict
from tieredckpt.format.layout import array_key

__all__ = ["Difference", "ReplicasDisagree", "differences", "show_difference", "show_ranks"]


class Difference(msgspec.Struct, frozen=True):
    """Arrays in which some ranks have other bytes than the rest."""

    key: str
    """Key of the first such array by name."""
    ranks: tuple[int, ...]
    """Ranks in the minority; all ranks with the array where no value has a majority."""
    holders: int
    """How many ranks have the array."""
    more: int = 0
    """Further arrays in which the same ranks differ."""


class ReplicasDisagree(Conflict):
    """Ranks have different bytes for arrays that each of them stores."""

    def __init__(self, message: str, found: Sequence[Difference]) -> None:
        super().__init__(message)
        self.found = tuple(found)


def differences(arrays: Mapping[str, Mapping[int, Sequence[bytes]]]) -> list[Difference]:
    """Differences between replicas: one entry for each set of ranks.

    Args:
        arrays: the digests of its chunks by rank, by storage key of an array or a block; empty for a rank that lacks
            it.
    """
    keys: dict[tuple[int, ...], dict[str, int]] = {}
    for name in sorted(arrays, key=array_key):
        digests = arrays[name]
        if ranks := _in_minority(digests):
            keys.setdefault(ranks, {}).setdefault(array_key(name), len(digests))
    return [
        Difference(next(iter(found)), ranks, next(iter(found.values())), len(found) - 1)
        for ranks, found in keys.items()
    ]


def _in_minority(digests: Mapping[int, Sequence[bytes]]) -> tuple[int, ...]:
    wrong: set[int] = set()
    for values in zip_longest(*digests.values()):
        if len(set(values)) == 1:
            continue
        value, count = Counter(values).most_common(1)[0]
        if 2 * count <= len(values):
            return tuple(sorted(digests))
        wrong.update(rank for rank, own in zip(digests, values, strict=True) if own != value)
    return tuple(sorted(wrong))


def show_difference(found: Difference) -> str:
    """Format a difference for a message."""
    more = f" (and {found.more} more)" if found.more else ""
    what = f"array {found.key!r}{more} is not the same on {show_ranks(found.ranks)}"
    if len(found.ranks) == found.holders:
        return what
    return f"{what} as on most of the {found.holders} ranks that have it"


def show_ranks(ranks: Iterable[int], count: int | None = None) -> str:
    """Format ranks for a message: ``rank 3``, ``ranks 1, 2, 5``, the first ten of many.

    ``count`` is how many there are if ``ranks`` are the first of them.
    """
    found = sorted(ranks)
    more = (count or len(found)) - len(found[:10])
    shown = ", ".join(map(str, found[:10])) + (f" and {more} more" if more else "")
    return f"rank {shown}" if len(found) == 1 else f"ranks {shown}"
