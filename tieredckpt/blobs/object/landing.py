"""Copies the bytes of a range, as they arrive in pieces, to their memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tieredckpt.blobs.base import Stretch
from tieredckpt.format.digest import CopyDigester

__all__ = ["Landing"]


class Landing:
    """Fills the memory of stretches with the bytes from ``offset`` on; on one thread at a time.

    Args:
        offset: of the first byte that arrives.
        stretches: each behind those before it.
        digested: whether each stretch is digested as it arrives.
    """

    def __init__(self, offset: int, stretches: Sequence[Stretch], *, digested: bool) -> None:
        self._at = offset
        self._stretches = stretches
        self._into = [np.frombuffer(each.into, np.uint8) for each in stretches]
        self._digesters = [CopyDigester(each.nbytes) for each in stretches] if digested else None
        self._next = 0

    def take(self, piece: Any) -> None:
        """Place the next bytes, any contiguous buffer."""
        data = np.frombuffer(piece, np.uint8)
        first, self._at = self._at, self._at + data.size
        while self._next < len(self._stretches):
            offset, nbytes, _ = self._stretches[self._next]
            begin, end = max(offset, first), min(offset + nbytes, self._at)
            if begin < end:
                self._copy(data[begin - first : end - first], begin - offset)
            if end < offset + nbytes:
                return
            self._next += 1

    def digests(self) -> Sequence[bytes]:
        """Of all stretches, once everything has arrived."""
        assert self._digesters is not None
        return [digester.digest() for digester in self._digesters]

    def _copy(self, data: NDArray[np.uint8], start: int) -> None:
        target = self._into[self._next][start : start + data.size]
        if self._digesters is None:
            np.copyto(target, data[: target.size])
        else:
            self._digesters[self._next].copy(data, target)
