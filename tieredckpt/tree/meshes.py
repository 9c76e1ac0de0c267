"""Which items of an axis a process of a mesh has, as PyTorch cuts tensors over device meshes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import product
from math import gcd
from typing import NamedTuple

__all__ = ["Cut", "Span", "common_step", "spans"]

_MOST_BOUNDARIES = 1 << 16
"""With more boundaries than this, `common_step` gives up and returns 1."""


class Cut(NamedTuple):
    """The cut of an axis by one axis of a mesh."""

    parts: int
    """Length of the mesh's axis."""
    stride: int = 1
    """Parts into which later axes of the mesh have cut it before (``split_factor`` of FSDP over TP)."""


class Span(NamedTuple):
    """Items of an axis that lie side by side."""

    start: int
    size: int


def spans(length: int, cuts: Sequence[Cut], coordinates: Sequence[int]) -> list[Span]:
    """The items of an axis of ``length`` that the process at ``coordinates`` has, in its order; [] for none.

    Each cut divides what those before left, as ``torch.chunk`` does: into parts of equal length, the last ones
    shorter or empty. With a stride, each of so many chunks is divided, and a process has a part of every one.
    """
    mine = [Span(0, length)]
    for cut, i in zip(cuts, coordinates, strict=True):
        total = sum(span.size for span in mine)
        taken = []
        for j in range(cut.stride):
            chunk = _chunk(total, cut.stride, j)
            part = _chunk(chunk.size, cut.parts, i)
            taken += _slice(mine, chunk.start + part.start, part.size)
        mine = _joined(taken)
    return [span for span in mine if span.size]


@lru_cache(maxsize=4096)
def common_step(length: int, cuts: tuple[Cut, ...]) -> int:
    """The largest number that every boundary between two processes on the axis is a multiple of."""
    if len(cuts) == 1 and cuts[0].stride == 1:
        return max(1, -(-length // cuts[0].parts))
    counts = [cut.parts for cut in cuts]
    step = 0
    boundaries = 0
    for coordinates in product(*map(range, counts)):
        for span in spans(length, cuts, coordinates):
            step = gcd(step, span.start, span.start + span.size if span.start + span.size < length else 0)
            boundaries += 1
        if step == 1 or boundaries > _MOST_BOUNDARIES:
            return 1
    return step or max(1, length)


def _chunk(length: int, parts: int, i: int) -> Span:
    size = -(-length // parts)
    start = min(i * size, length)
    return Span(start, min(size, length - start))


def _slice(pieces: Sequence[Span], start: int, size: int) -> list[Span]:
    """``size`` items from the ``start``-th on of those that ``pieces`` have one after the other."""
    found = []
    for piece in pieces:
        first, last = max(start, 0), min(start + size, piece.size)
        if first < last:
            found.append(Span(piece.start + first, last - first))
        start -= piece.size
    return found


def _joined(pieces: Sequence[Span]) -> list[Span]:
    found: list[Span] = []
    for piece in pieces:
        if found and found[-1].start + found[-1].size == piece.start:
            found[-1] = Span(found[-1].start, found[-1].size + piece.size)
        else:
            found.append(piece)
    return found
