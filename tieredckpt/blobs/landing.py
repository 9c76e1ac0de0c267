"""Copies the bytes of a range, as they arrive in pieces, to their memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from tieredckpt.blobs.base import Stretch
from tieredckpt.format.digest import CopyDigester

__all__ = ["Landing"]


class Landing:
    """Fills the memory of stretches, in order and without overlap; on one thread at a time.

    Args:
        at: offset of the first byte that arrives.
        stretches: the memory.
        digested: whether each stretch is digested as it arrives.
    """

    def __init__(self, at: int, stretches: Sequence[Stretch], *, digested: bool) -> None:
        self.at = at
        """Offset of the next byte that arrives."""
        self.digests: list[bytes] = []
        """Of the stretches that have arrived; without meaning unless ``digested``."""
        self._waiting = deque(stretches)
        self._copier: type[_Copier | CopyDigester] = CopyDigester if digested else _Copier
        self._copying: _Copier | CopyDigester | None = None

    def take(self, piece: Any) -> None:
        """Place the next bytes, any contiguous buffer."""
        data = np.frombuffer(piece, np.uint8)
        begin, self.at = self.at, self.at + data.size
        while self._waiting and self._waiting[0].offset < self.at:
            offset, nbytes, into = self._waiting[0]
            first, end = max(offset, begin), min(offset + nbytes, self.at)
            if self._copying is None:
                self._copying = self._copier(nbytes)
            memory = np.frombuffer(into, np.uint8)
            self._copying.copy(data[first - begin : end - begin], memory[first - offset : end - offset])
            if end < offset + nbytes:
                return
            self.digests.append(self._copying.digest())
            self._copying = None
            self._waiting.popleft()


class _Copier:
    """As `CopyDigester`, without the digest."""

    def __init__(self, nbytes: int) -> None:
        pass

    def copy(self, src: npt.NDArray[np.uint8], dst: npt.NDArray[np.uint8]) -> None:
        np.copyto(dst, src[: dst.size])

    def digest(self) -> bytes:
        return b""
