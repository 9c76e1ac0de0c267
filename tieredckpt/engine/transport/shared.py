"""Communicator through a blob store, for ranks that share nothing else: messages are small objects of a slower tier.

Needs nothing else, and is the slowest: every message is an object that is put, listed, read and deleted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection
from contextlib import suppress

from tieredckpt.blobs.base import BlobInfo, BlobStore
from tieredckpt.concurrency import together
from tieredckpt.engine.ranks.communicator import COORDINATOR
from tieredckpt.engine.transport.mailbox import Mailbox
from tieredckpt.errors import Closed, NotFound, RanksUnavailable, TieredCkptError
from tieredckpt.format import layout
from tieredckpt.format.crc import crc32c

__all__ = ["SharedStore"]

_MESSAGE_MAX = 64 << 20
_STALE = 3600.0
"""Seconds after which a message that was not received belongs to a job that died."""
_READS_AT_ONCE = 16


class SharedStore(Mailbox):
    """A communicator over a blob store that all ranks see.

    Args:
        open_store: opens this rank's own store; it is closed with the communicator.
        rank, size: this process among all.
        name: the ranks that use the same one meet; of letters, digits, ``-``, ``_`` and ``.``.
        node: see `Communicator`.
    """

    def __init__(
        self,
        open_store: Callable[[], Awaitable[BlobStore]],
        *,
        rank: int,
        size: int,
        name: str = "tieredckpt",
        node: str | None = None,
    ) -> None:
        carrier = _Objects(open_store, f"{layout.RANKS}{name}/")
        super().__init__(carrier, rank=rank, size=size, node=node, fastest=0.01, slowest=1.0)
        self._objects = carrier

    async def open(self, *, timeout: float) -> None:
        """Meet all other ranks, and remove what jobs that died long ago have left."""
        loop = asyncio.get_running_loop()
        begin = loop.time()
        try:
            async with asyncio.timeout(timeout):
                await self._objects.open()
        except TimeoutError:
            what = f"the store that carries messages between the ranks could not be opened within {timeout:.1f} s"
            raise RanksUnavailable(what) from None
        await super().open(timeout=max(0.0, timeout - (loop.time() - begin)))
        if self.rank == COORDINATOR:
            with suppress(TieredCkptError):  # the next job tries again
                await self._objects.sweep(spare=self.mailboxes)


class _Objects:
    """A carrier whose mailboxes are folders of a blob store."""

    def __init__(self, open_store: Callable[[], Awaitable[BlobStore]], folder: str) -> None:
        self._open_store = open_store
        self._folder = folder
        self._opened: BlobStore | None = None
        self._kept: dict[str, list[bytes]] = {}
        """By mailbox, what was taken by a call that failed or was cancelled with the rest."""
        self._taken: set[str] = set()
        """Keys of messages that were taken and may be there still."""

    async def open(self) -> None:
        self._opened = await self._open_store()

    @property
    def _store(self) -> BlobStore:
        if self._opened is None:
            raise Closed("the communicator of the ranks is not open")
        return self._opened

    async def put(self, mailbox: str, name: str, message: bytes) -> None:
        """A message carries a checksum: not every store puts an object at once."""
        await self._store.put(f"{self._folder}{mailbox}/{name}", [crc32c(message).to_bytes(4, "little"), message])

    async def take(self, mailbox: str) -> list[bytes]:
        keys = [info.key async for info in self._store.list(f"{self._folder}{mailbox}/")]
        kept = self._kept.setdefault(mailbox, [])
        await together((self._take_one(key, kept) for key in keys), _READS_AT_ONCE)
        messages = kept.copy()
        kept.clear()
        return messages

    async def _take_one(self, key: str, kept: list[bytes]) -> None:
        if key not in self._taken:
            try:
                whole = await self._store.get(key, limit=_MESSAGE_MAX)
            except NotFound:
                return
            message = whole[4:]
            if len(whole) < 4 or crc32c(message) != int.from_bytes(whole[:4], "little"):
                return  # it is being put
            kept.append(message)
            self._taken.add(key)
        await self._store.delete(key)
        self._taken.discard(key)

    async def drop(self, mailbox: str) -> None:
        await self._delete([info async for info in self._store.list(f"{self._folder}{mailbox}/")])

    async def sweep(self, *, spare: Collection[str]) -> None:
        """Remove old messages, by the clock of the store, which may be that of their writers."""
        infos = [info async for info in self._store.list(self._folder)]
        newest = max((info.modified for info in infos), default=0.0)
        old = [info for info in infos if newest - info.modified > _STALE]
        await self._delete([info for info in old if info.key.removeprefix(self._folder).split("/")[0] not in spare])

    async def _delete(self, infos: list[BlobInfo]) -> None:
        await together(self._store.delete(info.key) for info in infos)

    async def close(self) -> None:
        if self._opened is not None:
            await self._opened.close()
