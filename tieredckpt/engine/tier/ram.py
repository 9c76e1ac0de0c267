"""RAM as a tier that is connected: its slab, and the chunks in it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from tieredckpt.blobs.locks import let_go
from tieredckpt.blobs.ram.slab import Slab
from tieredckpt.blobs.ram.store import RamStore
from tieredckpt.concurrency import in_thread
from tieredckpt.engine.tier.slab_index import SlabIndex
from tieredckpt.format.encoding import PLAIN, Encoding
from tieredckpt.format.ocdbt import Extent

__all__ = ["Ram"]

Bytes = npt.NDArray[np.uint8]


@dataclass
class Ram:
    """The one pack of a RAM tier, which is a slab."""

    encoding: ClassVar[Encoding] = PLAIN
    """RAM does not pay for a checksum."""
    store: RamStore
    slab: Slab = field(init=False)
    index: SlabIndex = field(init=False)
    """Empty where another process writes the slab."""
    retracted: list[tuple[Callable[[], bool], list[bytes]]] = field(default_factory=list)
    """Steps that left and may still be read: a function that tells whether no reader is left, and the chunks."""

    def __post_init__(self) -> None:
        self.slab = self.store.slab
        self.index = SlabIndex(self.slab)

    @property
    def used(self) -> int:
        """Bytes that the chunks take."""
        return self.slab.used

    def memory(self, extent: Extent) -> Bytes:
        """The bytes of a chunk where they lie, not verified. Raises as `Slab.bytes_at`."""
        return self.slab.bytes_at(extent.offset, extent.length)

    def locate(self, digest: bytes) -> Iterator[Extent]:
        """Place of a chunk, whatever step refers to it."""
        if (found := self.index.find(digest)) is not None:
            yield Extent(self.store.slab_key, *found)

    def distrust(self, digest: bytes, extent: Extent) -> None:
        """Keep later saves from using a damaged chunk."""
        self.index.distrust(digest, extent.offset)

    async def reclaim(self) -> None:
        """Free the chunks of steps that left, once nobody reads these any more. Cancelled, it would lose them."""
        looked_at, self.retracted[:] = tuple(self.retracted), ()  # so that no other task frees them twice
        unread = await in_thread(lambda: [gone() for gone, _ in looked_at])
        for each, gone in zip(looked_at, unread, strict=True):
            if gone:
                self.index.drop(each[1])
            else:
                self.retracted.append(each)

    @contextmanager
    def kept(self, manifest: str) -> Iterator[None]:
        """Keep the chunks of the step of that manifest while it is read. Raises `NotFound`, `TierUnavailable`."""
        fd = self.store.share(manifest)
        try:
            yield
        finally:
            let_go(fd)
