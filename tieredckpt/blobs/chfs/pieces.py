"""How the bytes of an object are cut for the worker: into pieces that are multiples of a CHFS chunk."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tieredckpt.blobs.base import ALIGNMENT, Buffer

__all__ = ["chunk_size_for", "cut", "piece_size", "ranges"]

_PIECE = 4 << 20
"""Bytes whose transfer makes the cost of a command small."""


def piece_size(chunk_size: int) -> int:
    """The least multiple of the CHFS chunk that is worth a command of its own."""
    return -(-_PIECE // chunk_size) * chunk_size


def chunk_size_for(nbytes: int, chunk_size: int) -> int:
    """The CHFS chunk of an object: a small object is one chunk, a little larger than the object.

    An object that ends with a full chunk may have another one, so each look at it has to ask every server.
    """
    return min(chunk_size, (nbytes // ALIGNMENT + 1) * ALIGNMENT)


def cut(parts: Sequence[Buffer], size: int) -> Iterator[tuple[int, list[memoryview]]]:
    """The concatenation of ``parts`` as pieces of ``size`` bytes: the offset of each, and its memory."""
    piece: list[memoryview] = []
    start = filled = 0
    for part in parts:
        view, at = memoryview(part).cast("B"), 0
        while at < len(view):
            take = min(len(view) - at, size - filled)
            piece.append(view[at : at + take])
            at, filled = at + take, filled + take
            if filled == size:
                yield start, piece
                piece, start, filled = [], start + size, 0
    if piece:
        yield start, piece


def ranges(offset: int, nbytes: int, size: int) -> Iterator[tuple[int, int]]:
    """The bytes from ``offset`` on as ``(start, stop)``, cut at multiples of ``size``."""
    end = offset + nbytes
    while offset < end:
        stop = min(end, offset - offset % size + size)
        yield offset, stop
        offset = stop
