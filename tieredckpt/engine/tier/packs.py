"""The packs of a tier, and the chunks that lie in them."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Collection, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

from tieredckpt.blobs.codecs import encoding_of
from tieredckpt.engine.tier.chunk_index import ChunkIndex
from tieredckpt.engine.tier.sizes import Sizes
from tieredckpt.format.encoding import CRC32C, Encoding
from tieredckpt.format.manifest import ArrayIndex
from tieredckpt.format.ocdbt import Extent

__all__ = ["Packs", "WrittenPacks"]


@dataclass
class Packs:
    """Packs of a durable tier."""

    encoding: Encoding = CRC32C
    """How new packs store chunks; packs from before a change of the tier's `codec` store them otherwise."""
    compressed: bool = False
    """Whether a footer was read that lists compressed chunks."""
    sizes: Sizes[str] = field(default_factory=Sizes)
    """Bytes of every pack, by key."""
    index: ChunkIndex = field(default_factory=ChunkIndex)
    """The dedupe index: every chunk in the packs."""
    duplicates: dict[bytes, list[Extent]] = field(default_factory=dict)
    """Further copies of chunks in packs, as after a repair: one of them may be damaged."""
    verified: set[bytes] = field(default_factory=set)
    """Chunks of earlier processes that are intact where ``index`` has them, as a step vouches."""
    doubted: set[bytes] = field(default_factory=set)
    """Chunks that are perhaps damaged where ``index`` has them: a step that may refer to that place lacks them."""
    losses: int = 0
    """How often chunks were forgotten or doubted; who had counted on some looks again if it has changed."""
    unlisted: set[str] = field(default_factory=set)
    """Packs with unknown content."""
    orphans: dict[str, float] = field(default_factory=dict)
    """When packs that no step was known to use were last changed, by the tier's clock (epoch seconds)."""
    streamed_to: set[str] = field(default_factory=set)
    """Packs that a save which streams here may refer to: they stay, though with several ranks it holds no lock."""
    proving: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while copies of chunks are read, to refer to intact ones: until then ``index`` lacks these chunks."""
    guard: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while packs are written and committed, and while dead ones are collected."""

    @property
    def used(self) -> int:
        """Bytes that the chunks take."""
        return self.sizes.total

    def exchange(self, read: Packs) -> None:
        """Replace what is known of all packs by what was ``read``, and not used afterwards; doubts stay."""
        self.compressed = read.compressed
        self.sizes, self.unlisted, self.orphans = read.sizes, read.unlisted, read.orphans
        self.index, self.duplicates, self.verified = read.index, read.duplicates, read.verified
        self.doubted = {digest for digest in self.doubted if digest in self.index}
        self.losses += 1

    def has(self, digest: bytes, nbytes: int, encoding: Encoding | None = None) -> bool:
        """Whether a pack has a chunk of so many bytes, in that encoding or that of the tier.

        One that lists it with another length has it in another encoding, or has something else.
        """
        extent = self.index.get(digest)
        return extent is not None and (encoding or self.encoding).fits(extent.length, nbytes)

    def has_of_part(self, digest: bytes, length: int) -> bool:
        """Whether a chunk is here that a rank's part describes by ``length``: in RAM, or as it was streamed here."""
        extent = self.index.get(digest)
        return extent is not None and (extent.length == length or self.encoding.fits(extent.length, length))

    def encoding_of_array(self, array: ArrayIndex) -> Encoding:
        """Encoding of the chunks of an array; if it was committed before a change of `codec`, that of then."""
        nbytes, here = array.grid.cell_nbytes, self.encoding
        lengths = {chunk.where.length for chunk in array.chunks if isinstance(chunk.where, Extent)}
        if all(here.fits(length, nbytes) for length in lengths):
            return here
        # Lost chunks of an array that was committed anew may be of either: what is compressed needs to be told.
        found = {encoding_of(length, nbytes) for length in lengths}
        return next((encoding for encoding in found if not encoding.raw), CRC32C)

    def locate(self, digest: bytes) -> Iterator[Extent]:
        """Place of a chunk, whatever step refers to it."""
        for extent in (self.index.get(digest), *self.duplicates.get(digest, ())):
            if extent is not None and extent.path in self.sizes:
                yield extent

    def distrust(self, digest: bytes, extent: Extent) -> None:
        """Do nothing about a damaged chunk: it is forgotten when it is repaired."""

    def kept(self, manifest: str) -> AbstractContextManager[None]:
        """Keep the chunks of the step of that manifest while it is read; nothing to do, for the step stays."""
        return nullcontext()

    def add(self, written: WrittenPacks) -> None:
        """Add packs that were just written; called by the process that manages the tier, under ``guard``."""
        for key, nbytes in written.sizes.items():
            self.sizes[key] = nbytes
            self.unlisted.discard(key)
            self.orphans[key] = math.inf  # until a commit refers to it, or a listing tells when it was written
        self.index.update(written.extents)

    def mark_used(self, keys: Iterable[str]) -> None:
        """Note that packs are or were known to be used: they get no grace once no step uses them."""
        for key in self.orphans.keys() & keys:
            del self.orphans[key]

    def doubt(self, digests: Iterable[bytes]) -> None:
        """Note that chunks may be damaged here: a commit that is to refer to one reads it first."""
        self.doubted.update(digest for digest in digests if digest in self.index)
        self.losses += 1

    def forget(self, digest: bytes) -> None:
        """Do not refer to a chunk's bytes here any more: they are lost or damaged. Under ``guard``."""
        self.index.pop(digest, None)
        self.verified.discard(digest)
        self.doubted.discard(digest)
        self.losses += 1

    def forget_chunks(self, keys: Collection[str]) -> None:
        """`forget` the chunks of packs that are lost, damaged, or about to be deleted."""
        for digest in self.index.in_packs(keys):
            self.forget(digest)

    def drop(self, key: str) -> int:
        """Forget a pack that is gone; returns its bytes."""
        self.orphans.pop(key, None)
        self.unlisted.discard(key)
        return self.sizes.pop(key, 0)


@dataclass(frozen=True, slots=True)
class WrittenPacks:
    """Packs that are stored and to which no commit refers yet."""

    extents: dict[bytes, Extent] = field(default_factory=dict)
    """Place of each chunk, by digest."""
    sizes: dict[str, int] = field(default_factory=dict)
    """Bytes of each pack, by key."""

    def add(self, more: WrittenPacks) -> None:
        """Count these packs in, too."""
        self.extents.update(more.extents)
        self.sizes.update(more.sizes)

    @property
    def nbytes(self) -> int:
        """Bytes of all packs."""
        return sum(self.sizes.values())
