"""Index of the chunks in the slab: digest to extent, with a count of the steps and saves that use each."""

from __future__ import annotations

import threading
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from tieredckpt.blobs.ram.slab import PAGE, Slab
from tieredckpt.errors import TierUnavailable
from tieredckpt.format.encoding import CRC32C

__all__ = ["SlabIndex", "slab_size"]


def slab_size(nbytes: int) -> int:
    """Bytes of a slab that a chunk takes: with room for the checksum that promotion writes behind it."""
    return -(-(nbytes + CRC32C.overhead) // PAGE) * PAGE  # `page_aligned`, without a call for every chunk


class SlabIndex:
    """The RAM tier's dedupe index, and its `tieredckpt.engine.saving.snapshot.Room`; safe to use from copy threads.

    Every *use* is one reference. The extent of a chunk that nobody uses any more goes back to the slab. An
    extent has room for a checksum behind its chunk, which promotion fills in so that the device can be given
    the slab's own memory.

    A chunk that turned out damaged is *distrusted*: steps that use it keep its extent, and later saves copy the chunk
    to another one.
    """

    def __init__(self, slab: Slab) -> None:
        self._slab = slab
        self._chunks: dict[bytes, tuple[int, int]] = {}  # digest -> (offset, bytes)
        self._distrusted: dict[bytes, list[tuple[int, int]]] = {}
        """Extents that steps refer to and nobody else may, until all uses of their chunk have ended."""
        self._uses: dict[bytes, int] = {}
        self._guards_uses = threading.Lock()

    def allocate(self, nbytes: int) -> tuple[int, npt.NDArray[np.uint8]] | None:
        """Offset and memory of a new extent for a chunk of ``nbytes``; None when the slab is full.

        Raises `TierUnavailable` if it was closed meanwhile.
        """
        if (mapped := self._slab.mapped) is None:
            raise TierUnavailable("RAM went away while chunks were copied there")
        offset = self._slab.allocate(slab_size(nbytes))
        return None if offset is None else (offset, mapped[offset : offset + nbytes])

    def release(self, offset: int, nbytes: int) -> None:
        """Give an extent back that never became a chunk."""
        self._slab.release(offset, slab_size(nbytes))

    def holds(self, digest: bytes) -> bool:
        """Whether a chunk is there now."""
        return digest in self._chunks

    def take(self, digest: bytes) -> int | None:
        """Use a chunk that is there: its offset, or None when it is not."""
        with self._guards_uses:
            found = self._chunks.get(digest)
            if found is None:
                return None
            self._uses[digest] += 1
            return found[0]

    def find(self, digest: bytes) -> tuple[int, int] | None:
        """Offset and bytes of a chunk that is there, without using it: it may go at any time."""
        return self._chunks.get(digest)

    def distrust(self, digest: bytes, offset: int) -> None:
        """Stop new uses of the chunk at ``offset``: its bytes are damaged."""
        with self._guards_uses:
            if (found := self._chunks.get(digest)) is not None and found[0] == offset:
                self._distrusted.setdefault(digest, []).append(self._chunks.pop(digest))

    def trust(self, digest: bytes, offset: int) -> None:
        """The bytes at ``offset`` were repaired: they may be used again, unless there is another copy by now."""
        with self._guards_uses:
            known = self._distrusted.get(digest, [])
            repaired = next((extent for extent in known if extent[0] == offset), None)
            if repaired is not None and digest not in self._chunks:
                known.remove(repaired)
                self._chunks[digest] = repaired

    def add(self, digest: bytes, offset: int, nbytes: int) -> int:
        """Use a chunk that was just copied to ``offset``; if it is there already, that extent is given back.

        Returns the offset where the chunk lies.
        """
        with self._guards_uses:
            found = self._chunks.setdefault(digest, (offset, nbytes))
            self._uses[digest] = self._uses.get(digest, 0) + 1
        if found[0] != offset:
            self.release(offset, nbytes)
        return found[0]

    def adopt(self, digest: bytes, offset: int, nbytes: int) -> bool:
        """Use a chunk of a step found at start; False if its extent cannot be as the step says.

        Where steps found before have the chunk elsewhere, this extent was distrusted, and is so again.
        """
        with self._guards_uses:
            found, others = self._chunks.get(digest), self._distrusted.get(digest, [])
            if (offset, nbytes) not in (found, *others):
                if found is not None and found[1] != nbytes:
                    return False
                if not self._slab.claim(offset, slab_size(nbytes)):
                    return False
                if found is None:
                    self._chunks[digest] = (offset, nbytes)
                else:
                    self._distrusted.setdefault(digest, []).append((offset, nbytes))
            self._uses[digest] = self._uses.get(digest, 0) + 1
            return True

    def drop(self, digests: Iterable[bytes]) -> None:
        """End one use of each; chunks without a use leave the slab."""
        with self._guards_uses:
            for digest in digests:
                self._uses[digest] -= 1
                if not self._uses[digest]:
                    del self._uses[digest]
                    unused = self._distrusted.pop(digest, [])
                    if digest in self._chunks:
                        unused.append(self._chunks.pop(digest))
                    for extent in unused:
                        self.release(*extent)
