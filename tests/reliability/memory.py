"""A blob store in memory: an object store, or a file system of servers without rename, that keeps a journal.

With ``pieces`` it does what a store over CHFS does: a put makes an empty object in the place of the old one and
fills it piece by piece, so that a reader, and a crash, may meet a part of it. Without, an object is there at once.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field

from reliability.journal import FolderSynced, Journal, Made, Put, Removed, Synced, Written
from tieredckpt.blobs.base import ALIGNMENT, BlobInfo, Buffer, Survives, Traits, check_key, check_prefix
from tieredckpt.errors import Closed, Conflict, Corrupt, Invalid, NotFound, ShortRead

__all__ = ["MemoryBlobs", "Objects"]


@dataclass(slots=True)
class Objects:
    """What is stored, by key; it outlives the stores over it."""

    data: dict[str, bytearray] = field(default_factory=dict)
    modified: dict[str, float] = field(default_factory=dict)
    """Seconds since the epoch."""
    files: dict[str, int] = field(default_factory=dict)
    """The number of each in the journal."""

    @classmethod
    def of(cls, data: Mapping[str, bytes], modified: float) -> Objects:
        """Objects that were all changed at the same time."""
        return cls({key: bytearray(value) for key, value in data.items()}, dict.fromkeys(data, modified))


class MemoryBlobs:
    """A store over `Objects`.

    Args:
        objects: what is stored; nothing by default. A test may look at it, and damage it.
        pieces: bytes of a piece of a put that is not atomic; None for one that is.
        survives: the trait.
        journal: is told every change.
        tier: under which name.
    """

    def __init__(
        self,
        objects: Objects | None = None,
        *,
        pieces: int | None = None,
        survives: Survives = Survives.SITE,
        journal: Journal | None = None,
        tier: str = "memory",
    ) -> None:
        self.objects = Objects() if objects is None else objects
        self._pieces = pieces
        self._journal = journal or Journal()
        self._tier = tier
        self._closed = False
        self._traits = Traits(
            survives=survives,
            durable=pieces is None,
            atomic_put=pieces is None,
            create_only=True,
            ranged_get=True,
            direct_io=False,
            object_size=64 << 20,
        )

    @property
    def traits(self) -> Traits:
        return self._traits

    @property
    def location(self) -> str:
        return f"memory of {self._tier}"

    async def get(self, key: str, *, limit: int) -> bytes:
        await asyncio.sleep(0)
        data = self._object(key)
        if len(data) > limit:
            raise Corrupt(f"{key} has {len(data)} bytes, and at most {limit} are acceptable")
        return bytes(data)

    async def get_into(self, key: str, offset: int, into: memoryview) -> None:
        if offset < 0 or into.readonly:
            raise Invalid(f"{key} cannot be read from offset {offset} on, or into read-only memory")
        data = self._object(key)
        if offset + len(into) > len(data):
            raise ShortRead(f"{key} has {len(data)} bytes, and {len(into)} from offset {offset} were wanted")
        into[:] = data[offset : offset + len(into)]

    async def put(self, key: str, parts: Sequence[Buffer], *, create_only: bool = False) -> None:
        self._check(key)
        data = b"".join(parts)
        # What is small is replaced by one request, if it does not leave the end of what was longer.
        in_place = 0 < len(self.objects.data.get(key, b"")) <= len(data) < ALIGNMENT
        await asyncio.sleep(0)  # a store is never that fast: others have their turn
        if create_only and key in self.objects.data:
            raise Conflict(f"{key} exists already")
        if self._pieces is None or create_only or in_place:
            self._put_whole(key, data)
        else:
            await self._put_in_pieces(key, data, self._pieces)

    def _put_whole(self, key: str, data: bytes) -> None:
        self.objects.data[key] = bytearray(data)
        self.objects.modified[key] = time.time()
        self.objects.files[key] = self._journal.new_file()
        self._journal.add(Put(self._tier, key, self.objects.files[key], data))

    async def _put_in_pieces(self, key: str, data: bytes, size: int) -> None:
        growing = self.objects.data[key] = bytearray()
        self.objects.modified[key] = time.time()
        file = self.objects.files[key] = self._journal.new_file()
        self._journal.add(Made(self._tier, key, file))
        try:
            for start in range(0, len(data), size):
                await asyncio.sleep(0)
                piece = data[start : start + size]
                growing += piece
                self._journal.add(Written(self._tier, file, start, piece, len(growing)))
        except asyncio.CancelledError:
            if self.objects.data.get(key) is growing:
                self._remove(key)
            raise
        self._journal.add(Synced(self._tier, file))
        self._journal.add(FolderSynced(self._tier, key.rpartition("/")[0]))

    async def stat(self, key: str) -> BlobInfo:
        return self._info(key, len(self._object(key)))

    async def list(self, prefix: str) -> AsyncIterator[BlobInfo]:
        self._check_open()
        check_prefix(prefix)
        for key, data in list(self.objects.data.items()):
            if key.startswith(prefix):
                self._check_open()
                yield self._info(key, len(data))

    async def delete(self, key: str) -> None:
        self._check(key)
        if key in self.objects.data:
            self._remove(key)

    async def close(self) -> None:
        """Refuse further verbs; what is stored stays."""
        self._closed = True

    def _remove(self, key: str) -> None:
        del self.objects.data[key]
        self._journal.add(Removed(self._tier, key, self.objects.files.get(key, 0)))
        self._journal.add(FolderSynced(self._tier, key.rpartition("/")[0]))

    def _info(self, key: str, size: int) -> BlobInfo:
        return BlobInfo(key, size, self.objects.modified[key])

    def _object(self, key: str) -> bytearray:
        self._check(key)
        try:
            return self.objects.data[key]
        except KeyError:
            raise NotFound(f"{key} does not exist in the {self.location}") from None

    def _check(self, key: str) -> None:
        self._check_open()
        check_key(key)

    def _check_open(self) -> None:
        if self._closed:
            raise Closed(f"the {self.location} was closed")
