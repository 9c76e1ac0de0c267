"""A blob store over an object store: one request for each verb, packs from the caller's memory and into it.

If a range comes short, a second request finds out why.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tieredckpt.blobs.base import (
    BlobInfo,
    Buffer,
    Stretch,
    Survives,
    Traits,
    check_key,
    check_prefix,
    check_stretches,
    is_key,
)
from tieredckpt.blobs.landing import Landing
from tieredckpt.blobs.object.client import LISTED_AT_ONCE, Client, Range
from tieredckpt.blobs.object.refusals import OddName
from tieredckpt.blobs.object.throttle import SlowDown, Throttle
from tieredckpt.concurrency import in_thread, outlast, until_done
from tieredckpt.errors import Closed, Corrupt, Invalid, NotFound, ShortRead, TierUnavailable

__all__ = ["ObjectStore"]

_PIECE = 16 << 20
"""Bytes that each read receives at a time; smaller pieces cost more turns of the loop.

A read of at most this size is in memory as a whole until it is complete: 12 such reads, 192 MiB, in a restore.
"""

_COPIERS = 4
"""Threads that copy arriving bytes to their memory."""

_ENDS_BY_ITSELF = 1 << 20
"""A put up to this size, in bytes, is on its way as a whole before it could be called off."""
_ENDS_WITHIN = 2.0
"""Seconds for such a put to end by itself when it is cancelled."""

_BETWEEN_CHECKS = 0.001
"""Seconds between two checks whether obstore has released memory."""


class ObjectStore:
    """Blobs as the objects below a prefix.

    Args:
        client: makes the requests.
        create_only: whether the endpoint honours conditions; see `tieredckpt.blobs.object.probe`.
        survives: what the service outlives.
        object_size: the trait, in bytes.
        concurrency: how many large puts are best under way at a time, and half of the reads.
    """

    def __init__(
        self, client: Client, *, create_only: bool, survives: Survives, object_size: int, concurrency: int
    ) -> None:
        self._client = client
        self._throttle = Throttle()
        self._copiers = ThreadPoolExecutor(_COPIERS, thread_name_prefix="tieredckpt-object")
        self._traits = Traits(
            survives=survives,
            durable=True,
            atomic_put=True,
            create_only=create_only,
            ranged_get=True,
            direct_io=False,
            object_size=object_size,
            digested_reads=2 * concurrency,
            remote=True,
            parallel_puts=concurrency,
        )
        self._reads = 0
        self._closed = False

    @property
    def traits(self) -> Traits:
        return self._traits

    @property
    def location(self) -> str:
        return self._client.location

    def facts(self) -> Mapping[str, str]:
        """See `tieredckpt.blobs.checkup.Facts`."""
        told = "the service keeps them: what is deleted is paid for until a lifecycle rule deletes noncurrent versions"
        return {"old versions": told} if self._client.keeps_versions else {}

    async def get(self, key: str, *, limit: int) -> bytes:
        self._check(key)
        with self._copying():
            arriving, size = await self._throttle(lambda: self._client.get(key, piece=_PIECE))
            if size > limit:
                raise Corrupt(f"{self._at(key)} has {size} bytes, and at most {limit} are acceptable")
            into = bytearray(size)
            await self._land(key, arriving, Landing(0, [Stretch(0, size, memoryview(into))], digested=False))
        return bytes(into)

    async def get_into(self, key: str, offset: int, into: memoryview) -> None:
        self._check(key)
        if offset < 0 or into.readonly:
            raise Invalid(f"{key} cannot be read from offset {offset} on, or into read-only memory")
        with self._copying():
            if not into.nbytes:  # there is no request for nothing
                size = (await self._throttle(lambda: self._client.stat(key))).size
                if offset > size:
                    raise ShortRead(f"{self._at(key)} has {size} bytes, and {offset} is behind them")
                return
            stretch = Stretch(offset, into.nbytes, into)
            await self._land_range(key, [stretch], Landing(offset, [stretch], digested=False))

    async def get_digested(self, key: str, stretches: Sequence[Stretch]) -> Sequence[bytes]:
        self._check(key)
        check_stretches(key, stretches)
        landing = Landing(stretches[0].offset, stretches, digested=True)
        with self._copying():
            await self._land_range(key, stretches, landing)
        return landing.digests

    async def put(self, key: str, parts: Sequence[Buffer], *, create_only: bool = False) -> None:
        self._check(key)
        if create_only and not self._traits.create_only:
            raise Invalid(f"{self._at(key)} was to be written by an exclusive put, which its server does not honour")
        # Views of its own: they can be released when nobody else uses the memory any more.
        views = [memoryview(part) for part in parts if memoryview(part).nbytes]
        small = sum(view.nbytes for view in views) <= _ENDS_BY_ITSELF
        try:
            await self._throttle(lambda: _ended(self._client.put(key, views, create_only=create_only), small))
        finally:
            await outlast(asyncio.ensure_future(_released(views)))

    async def put_stream(self, key: str, pieces: AsyncIterator[Buffer], *, nbytes: int | None = None) -> None:
        self._check(key)
        await self._client.put_stream(key, pieces, nbytes=nbytes)  # not to be repeated: the pieces come once

    async def stat(self, key: str) -> BlobInfo:
        self._check(key)
        try:
            return await self._throttle(lambda: self._client.stat(key))
        except NotFound:
            with contextlib.suppress(ShortRead):
                # The answer to a HEAD has no body to tell by whether it came from the store.
                await self._throttle(lambda: self._client.get_range(key, 0, 1))
            return await self._throttle(lambda: self._client.stat(key))  # it came meanwhile

    async def list(self, prefix: str) -> AsyncIterator[BlobInfo]:
        self._check_open()
        check_prefix(prefix)
        async with contextlib.aclosing(_Pages(self._client, prefix)) as pages:
            while page := await self._throttle(pages.following):
                for info in page:
                    if is_key(info.key):
                        yield info

    async def list_at_once(self, prefix: str) -> Sequence[BlobInfo] | None:
        self._check_open()
        check_prefix(prefix)
        async with contextlib.aclosing(_Pages(self._client, prefix)) as pages:
            try:
                page = await self._throttle(pages.following)
            except OddName:
                return None  # the folder in question may have none
        return None if len(page) >= LISTED_AT_ONCE else [info for info in page if is_key(info.key)]

    async def delete(self, key: str) -> None:
        self._check(key)
        await self._throttle(lambda: _ended(self._client.delete(key), True))

    async def close(self) -> None:
        """Refuse further verbs; those under way end as they would have."""
        self._closed = True
        self._end_threads()

    def _check_open(self) -> None:
        if self._closed:
            raise Closed(f"the store at {self.location} was closed")

    def _check(self, key: str) -> None:
        self._check_open()
        check_key(key)

    def _at(self, key: str) -> str:
        return f"{key} at {self.location}"

    @contextlib.contextmanager
    def _copying(self) -> Iterator[None]:
        """Keep the threads that copy arriving bytes, whether the store is closed meanwhile or not."""
        self._reads += 1
        try:
            yield
        finally:
            self._reads -= 1
            self._end_threads()

    def _end_threads(self) -> None:
        if self._closed and not self._reads:
            self._copiers.shutdown(wait=False)

    async def _land_range(self, key: str, stretches: Sequence[Stretch], landing: Landing) -> None:
        start, end = stretches[0].offset, stretches[-1].offset + stretches[-1].nbytes
        # A server silently cuts a range that ends behind the object.
        if end - start <= _PIECE:
            data = await self._throttle(lambda: self._client.get_range(key, start, end))
            if len(data) != end - start:
                info = await self._throttle(lambda: self._client.stat(key))
                raise self._short(key, start, end, len(data), info.size)
            await in_thread(landing.take, data, pool=self._copiers)
            return
        arriving, size = await self._throttle(lambda: self._client.get(key, start, end, piece=_PIECE))
        if arriving.end < end or arriving.start != start:
            raise self._short(key, start, end, arriving.end - arriving.start, size)
        await self._land(key, arriving, landing)

    def _short(self, key: str, start: int, end: int, came: int, size: int) -> ShortRead | TierUnavailable:
        """The error for a range that came short: the object ends earlier, or its server sent less than it announced."""
        if size >= end:
            return TierUnavailable(f"{self._at(key)}: {came} bytes came of the {end - start} from {start} on")
        return ShortRead(f"{self._at(key)} has {size} bytes, and those from {start} to {end} were wanted")

    async def _land(self, key: str, arriving: Range, landing: Landing) -> None:
        """Copy arriving bytes to their memory on a thread, while more arrive."""
        landed = arriving.start
        async with contextlib.aclosing(arriving.pieces) as pieces:
            coming = asyncio.ensure_future(anext(pieces, None))
            try:
                while (piece := await coming) is not None:
                    coming = asyncio.ensure_future(anext(pieces, None))
                    landed += len(piece)
                    if landed > arriving.end:
                        break
                    await in_thread(landing.take, piece, pool=self._copiers)
            finally:
                coming.cancel()
                await outlast(coming)
        if landed != arriving.end:
            raise TierUnavailable(f"{self._at(key)}: {landed - arriving.start} bytes came of those announced")


class _Pages:
    """A listing, page by page. After `SlowDown` it continues behind the pages that came.

    obstore takes an answer that is no listing for an empty one: an error that a server tells with status 200, the page
    of a proxy. So a listing that ends with an empty page, where it usually has a shorter one, is continued once more.
    """

    def __init__(self, client: Client, prefix: str) -> None:
        self._client, self._prefix = client, prefix
        self._pages = client.list(prefix)
        self._last = ""
        """The greatest key so far, if they come in order."""
        self._ordered = True
        self._ended = False
        """Whether it ended, or will with a page that is short."""

    async def following(self) -> Sequence[BlobInfo]:
        """The next page, empty at the end. Raises `SlowDown`, and may be called again then."""
        try:
            page: Sequence[BlobInfo] = await anext(self._pages, [])
            if not page and not self._ended and self._ordered:
                self._ended = True
                self._pages = self._client.list(self._prefix, after=self._last)
                page = await anext(self._pages, [])
        except SlowDown as error:
            if not self._ordered:
                raise TierUnavailable(f"{error}; its listings are in no order, and cannot go on") from error
            self._pages = self._client.list(self._prefix, after=self._last)
            raise
        keys = [self._last, *(info.key for info in page)]
        self._ended = self._ended or 0 < len(page) < LISTED_AT_ONCE
        self._ordered = self._ordered and keys == sorted(keys)
        self._last = keys[-1]
        return page

    async def aclose(self) -> None:
        await self._pages.aclose()


async def _ended(request: Coroutine[Any, Any, None], small: bool) -> None:
    """Await a put or a deletion; a small one that is cancelled is given time to end.

    The server may have all of it already, and it would undo the next operation.
    """
    if not small:
        await request
        return
    running, later = asyncio.ensure_future(request), asyncio.get_running_loop().call_later
    await until_done(running, lambda: later(_ENDS_WITHIN, running.cancel))


async def _released(views: Sequence[memoryview]) -> None:
    """Wait until nobody uses the memory any more: a cancelled request uses it for some tenths of a second."""
    for view in views:
        while True:
            try:
                view.release()
            except BufferError:
                await asyncio.sleep(_BETWEEN_CHECKS)
            else:
                break
