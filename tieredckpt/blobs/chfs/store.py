"""A blob store in CHFS, by a worker process that hosts libchfs. See docs/decisions/0008-chfs.md.

An object is a CHFS file at its key's path below the root.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

from tieredckpt.blobs.base import ALIGNMENT, BlobInfo, Buffer, Survives, Traits, check_key, check_prefix, is_key
from tieredckpt.blobs.chfs import frames
from tieredckpt.blobs.chfs.connection import Connection
from tieredckpt.blobs.chfs.link import Link
from tieredckpt.blobs.chfs.transfer import Transfer
from tieredckpt.concurrency import together, whole
from tieredckpt.errors import Closed, Conflict, Corrupt, Invalid, NotFound, ShortRead, TieredCkptError, TierUnavailable

__all__ = ["ChfsStore"]

_ARENA = 32 << 20
_FOLDERS_AT_A_TIME = 8
_STATS_AT_A_TIME = 16
_SPARE_THREADS = 4  # so that a small call need not wait for a transfer
_NAMED = 16  # addresses that are shown
_CLOSING = 10.0  # seconds for what is under way


@dataclass(frozen=True, slots=True)
class _Found:
    """An object."""

    size: int
    modified: float
    chunk_size: int


@dataclass(frozen=True, slots=True)
class _Entry:
    """An entry of a folder."""

    key: str
    kind: str
    first_chunk: int
    """Bytes of an object's first CHFS chunk."""
    modified: float


class ChfsStore:
    """Blobs below ``root`` in CHFS. Used on the event loop on which it was made.

    Args:
        root: absolute path in CHFS.
        server: address of one server; empty for ``CHFS_SERVER``.
        library: path of libchfs; empty for ``TIEREDCKPT_LIBCHFS``, then the loader's.
        chunk_size: bytes of a CHFS chunk of large objects.
        threads: how many pieces are on their way at a time.
        servers: how many there must be, whatever is recorded; None for as many as are recorded.
        stable_for: seconds without a change of the servers before their number is recorded; without ``servers``.
        writes: whether the store may continue with more servers than are recorded.
        rpc_timeout: seconds.
        survives: what the servers outlive.
        grace: seconds that a cancelled call may go on before its worker is killed.
        arena: bytes of memory for bytes that cannot be sent in place.
    """

    def __init__(
        self,
        root: str,
        *,
        server: str = "",
        library: str = "",
        chunk_size: int = 4 << 20,
        threads: int = 8,
        servers: int | None = None,
        rpc_timeout: float = 30.0,
        stable_for: float = 0.0,
        writes: bool = True,
        survives: Survives = Survives.PROCESS,
        grace: float = 1.0,
        arena: int = _ARENA,
    ) -> None:
        self._connection = Connection(
            root.rstrip("/"),
            frames.Connect(library, server, round(rpc_timeout * 1000)),
            threads=threads + _SPARE_THREADS,
            servers=servers,
            stable_for=stable_for,
            writes=writes,
            grace=grace,
        )
        self._chunk_size = chunk_size
        self._transfer = Transfer(chunk_size, threads, arena, grace)
        self._traits = Traits(
            survives=survives,
            durable=False,
            atomic_put=False,
            create_only=False,
            ranged_get=True,
            direct_io=False,
            object_size=128 << 20,
        )
        self._objects: set[str] = set()
        """Paths that had an object when they were last looked at."""
        self._active = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._closed = False

    @property
    def traits(self) -> Traits:
        return self._traits

    @property
    def location(self) -> str:
        return self._connection.location

    @property
    def copied(self) -> int:
        """Bytes that were copied because the worker cannot reach their memory."""
        return self._transfer.copied

    @property
    def link(self) -> Link | None:
        """The link to the current worker, for reports."""
        return self._connection.link

    @property
    def responsive(self) -> bool:
        """Whether no call has waited for so long that a server may be lost."""
        return self._connection.responsive

    def facts(self) -> Mapping[str, str]:
        """See `tieredckpt.blobs.checkup.Facts`."""
        link = self.link
        if link is None:
            return {}
        return {
            "worker": f"process {link.process.number}",
            "libchfs": f"{link.version}, {link.library}",
            "servers": str(link.servers),
            "addresses": ", ".join(link.addresses[:_NAMED]) or "libchfs does not tell",
        } | self._connection.advice()

    async def connect(self) -> None:
        """Start the worker, as every verb does. Raises `TierUnavailable`, `Invalid`."""
        async with self._verb():
            pass

    async def get(self, key: str, *, limit: int) -> bytes:
        async with self._verb(key) as link:
            found = await self._object(link, key)
            await self._believe_size(link, found)
            if found.size > limit:
                raise Corrupt(f"{self._at(key)} has {found.size} bytes, and at most {limit} are acceptable")
            data = bytearray(found.size)
            path = self._path(key)
            self._transfer.forget(path)  # another process may have replaced what is open, with other chunks
            await self._transfer.read(link, path, 0, memoryview(data))
            return bytes(data)

    async def get_into(self, key: str, offset: int, into: memoryview) -> None:
        if offset < 0 or into.readonly:
            raise Invalid(f"{key} cannot be read from offset {offset} on, or into read-only memory")
        async with self._verb(key) as link:
            path = self._path(key)
            if len(into) and path in self._objects:
                # A restore reads many ranges of few packs; looking at each of them first would take longer.
                try:
                    await self._transfer.read(link, path, offset, into)
                    return
                except TieredCkptError as error:
                    # It may have been replaced, even by a link of somebody, from which a read crashes the worker.
                    self._objects.discard(path)
                    if not isinstance(error, NotFound | ShortRead):
                        raise
            found = await self._object(link, key)
            if offset + len(into) > found.size:
                await link.ask(frames.CheckRing())  # what a dead server held is missing from the size
                raise ShortRead(
                    f"{self._at(key)} has {found.size} bytes, and {len(into)} from offset {offset} were wanted"
                )
            await self._transfer.read(link, path, offset, into)

    async def put(self, key: str, parts: Sequence[Buffer], *, create_only: bool = False) -> None:
        if create_only:
            raise Invalid(f"CHFS has no exclusive put, which {key} was to be written by")
        async with self._verb(key) as link:
            await self._connection.ensure_recorded(link)
            path = self._path(key)
            nbytes = sum(memoryview(part).nbytes for part in parts)
            if await self._fits_in_place(link, key, nbytes):
                await self._transfer.overwrite(link, path, b"".join(parts))
            else:
                await self._transfer.write(link, path, parts)
                self._objects.add(path)
            # When a server is lost, objects are placed on the smaller ring. An object of as many chunks as there are
            # servers has met each of them; after any other put all servers are asked. That covers the commit of a
            # step, which is small and comes after all of its packs.
            if nbytes < ALIGNMENT:
                await self._connection.ensure_kept(link)  # a step must not refer to packs that are lost
            if nbytes < self._chunk_size * link.servers:
                await link.ask(frames.CheckRing())

    async def _fits_in_place(self, link: Link, key: str, nbytes: int) -> bool:
        """Whether one request replaces all of a small object, so that no reader sees half of a new commit or lease."""
        if self._path(key) not in self._objects or nbytes >= ALIGNMENT:
            return False
        with suppress(NotFound):
            found = await self._object(link, key)
            return 0 < found.size <= nbytes < found.chunk_size
        return False

    async def stat(self, key: str) -> BlobInfo:
        async with self._verb(key) as link:
            found = await self._object(link, key)
            await self._believe_size(link, found)
            return BlobInfo(key, found.size, found.modified)

    async def list(self, prefix: str) -> AsyncIterator[BlobInfo]:
        check_prefix(prefix)
        folders = [prefix]
        while folders:
            batch, folders = folders[-_FOLDERS_AT_A_TIME:], folders[:-_FOLDERS_AT_A_TIME]
            async with self._verb() as link:
                entries = await self._entries(link, batch)
                infos = await self._infos(link, [entry for entry in entries if entry.kind == "object"])
                folders += [f"{entry.key}/" for entry in entries if entry.kind == "folder"]
                if not folders:
                    await link.ask(frames.CheckRing())  # a lost server would make the list shorter
            for info in infos:
                yield info

    async def delete(self, key: str) -> None:
        async with self._verb(key) as link:
            path = self._path(key)
            self._forget(path)
            with suppress(NotFound):
                kind, *_ = await link.ask(frames.Stat(path))
                if kind == "folder":
                    return
                await link.ask(frames.Remove(path))
            self._forget(path)  # also what a verb learnt of it meanwhile

    async def sweep(self, age: float) -> int:
        """Remove empty folders, unchanged for ``age`` seconds; returns 0, since puts that broke off leave nothing."""
        folders = [""]
        while folders:
            async with self._verb() as link:
                folder = folders.pop() or self._connection.folder
                folders += await _clean(link, folder, age, root=folder == self._connection.folder)
        return 0

    async def close(self) -> None:
        """Refuse further verbs, let those under way end, and end the worker. Idempotent."""
        self._closed = self._connection.closed = True
        await whole(self._close())

    async def _close(self) -> None:
        await self._until_idle()
        if await self._connection.end():
            await self._until_idle()  # calls under way have failed with the worker, and give back the arena
        await self._transfer.close()

    async def _until_idle(self) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(_CLOSING):
                await self._idle.wait()

    # -- the worker ---------------------------------------------------------------------------------------

    @asynccontextmanager
    async def _verb(self, key: str | None = None) -> AsyncIterator[Link]:
        """The link for a verb, which `close` waits for."""
        if self._closed:
            raise Closed(f"the store at {self.location} was closed")
        if key is not None:
            check_key(key)
        self._active += 1
        self._idle.clear()
        try:
            yield await self._connection.linked()
        finally:
            self._active -= 1
            if not self._active:
                self._idle.set()

    # -- objects ------------------------------------------------------------------------------------------

    def _path(self, key: str) -> str:
        return f"{self._connection.folder}/{key}"

    def _forget(self, path: str) -> None:
        self._objects.discard(path)
        self._transfer.forget(path)

    def _at(self, key: str) -> str:
        return f"{self.location}/{key}"

    async def _object(self, link: Link, key: str) -> _Found:
        path = self._path(key)
        kind, size, mtime, chunk_size = await link.ask(frames.Stat(path))
        if kind != "object":
            raise NotFound(f"{self._at(key)} is a {kind}")
        self._objects.add(path)
        return _Found(size, mtime / 1e9, chunk_size)

    async def _believe_size(self, link: Link, found: _Found) -> None:
        """Check all servers if the object ends with a full chunk: its next chunk may be on a lost server."""
        if found.size % max(1, found.chunk_size) == 0:
            await link.ask(frames.CheckRing())

    async def _entries(self, link: Link, folders: Sequence[str]) -> Sequence[_Entry]:
        async def look(folder: str) -> None:
            path = self._path(folder).rstrip("/") or "/"
            with suppress(Invalid):  # an object, and no folder of any
                for name, kind, size, mtime in await link.ask(frames.ListFolder(path)):
                    if is_key(name):
                        found.append(_Entry(folder + name, kind, size, mtime / 1e9))

        found: list[_Entry] = []
        await together(map(look, folders))
        return found

    async def _infos(self, link: Link, entries: Sequence[_Entry]) -> Sequence[BlobInfo]:
        async def look(key: str) -> None:
            with suppress(NotFound):  # deleted meanwhile
                found = await self._object(link, key)
                infos.append(BlobInfo(key, found.size, found.modified))

        # A first chunk that is not full is the whole object, and a chunk of a tier is a multiple of 4 KiB.
        whole = [entry for entry in entries if entry.first_chunk % ALIGNMENT]
        infos = [BlobInfo(entry.key, entry.first_chunk, entry.modified) for entry in whole]
        self._objects |= {self._path(entry.key) for entry in whole}
        await together((look(entry.key) for entry in entries if not entry.first_chunk % ALIGNMENT), _STATS_AT_A_TIME)
        return infos


async def _clean(link: Link, folder: str, age: float, *, root: bool) -> list[str]:
    """Remove a folder if it is empty; returns its subfolders, which the caller sweeps.

    Args:
        link: to the worker.
        folder: its path, without a slash at the end.
        age: seconds since the last change of what is removed.
        root: whether the folder is the store's own, which stays.
    """
    entries = await link.ask(frames.ListFolder(folder or "/"))
    if not entries and not root:
        await _remove(link, folder, age)
    return [f"{folder}/{name}" for name, kind, *_ in entries if kind == "folder" and is_key(name)]


async def _remove(link: Link, folder: str, age: float) -> None:
    with suppress(Conflict, NotFound):  # something was put there meanwhile, or another one has swept it
        mtime_ns: int = (await link.ask(frames.Stat(folder)))[2]
        if time.time() - mtime_ns / 1e9 >= age:
            # CHFS reports every failure alike; a folder that stays is removed by the next sweep.
            with suppress(TierUnavailable):
                await link.ask(frames.RemoveFolder(folder))
