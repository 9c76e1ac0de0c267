"""Exports in an object store: the file without which readers of the format find nothing is written last."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from tieredckpt.blobs.base import BlobStore, PutStream
from tieredckpt.blobs.posix.stream import Blocks
from tieredckpt.blobs.wrap import Deadline, Retrying
from tieredckpt.config import TierConfig
from tieredckpt.config.kinds import kind_of
from tieredckpt.engine import limits
from tieredckpt.engine.exporting import places
from tieredckpt.engine.exporting.places import LARGEST_RECORD, RECORD, Record
from tieredckpt.errors import Closed, Corrupt, Invalid, NotFound, TierUnavailable

__all__ = ["ObjectFiles", "Objects", "open_place"]

_PIECE = 8 << 20
"""Bytes that are handed over at a time, at least."""
_WAITING = 2
"""Pieces that wait to be sent."""
_SENT_WITHIN = 150.0
"""Seconds in which the server takes a piece, or the end of a file."""


async def open_place(tier: TierConfig) -> tuple[BlobStore, BlobStore]:
    """Open a place for exports: its blob store, for streams, and the same with retries and deadlines, for other calls.

    A stream cannot be repeated. Raises `Invalid` for a store that takes no streams.
    """
    # Opening to write would try out an exclusive put, which exports do not need and which leaves a file.
    store = await kind_of(tier).open(tier, read_only=True)
    if not isinstance(store, PutStream):
        await store.close()
        raise Invalid(f"{tier.location}: objects there cannot be written as a stream, as exports are")
    return store, Retrying(Deadline(store, tier.name, base=tier.deadline), attempts=tier.retries + 1)


class _StreamedObject:
    """An object that is being written: by a thread, which may be a little ahead of what the engine's loop sends."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._pieces: asyncio.Queue[bytearray | None] = asyncio.Queue()
        self._room = threading.Semaphore(_WAITING)
        self._block = bytearray()
        self._given_up = False
        self.nbytes = 0

    def write(self, data: Any, /) -> int:
        """Append bytes of any contiguous buffer."""
        view = memoryview(np.frombuffer(data, np.uint8))
        for start in range(0, view.nbytes, _PIECE):
            self._block += view[start : start + _PIECE]
            if len(self._block) >= _PIECE:
                self._hand_over()
        self.nbytes += view.nbytes
        return view.nbytes

    def flush(self) -> None:
        """Nothing: an object is there when it is complete."""

    def end(self) -> None:
        """Hand over what is left: there is no more."""
        self._hand_over()
        self._put(None)

    def _hand_over(self) -> None:
        if self._block:
            self._put(self._block)
            self._block = bytearray()  # the other is sent from where it lies

    def _put(self, piece: bytearray | None) -> None:
        if not self._room.acquire(timeout=_SENT_WITHIN):
            raise TierUnavailable(f"the server took nothing for {_SENT_WITHIN:g} s")
        if self._given_up:
            raise Closed("the export was given up")
        self._loop.call_soon_threadsafe(self._pieces.put_nowait, piece)

    def give_up(self) -> None:
        """Make the thread, and `pieces`, raise instead of waiting for each other."""
        self._given_up = True
        self._room.release(_WAITING)
        with suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._pieces.put_nowait, None)

    async def pieces(self) -> AsyncIterator[bytearray]:
        """Yield what is to be sent, on the loop. Raises `Closed` for an incomplete file: its upload is aborted."""
        while (piece := await self._pieces.get()) is not None and not self._given_up:
            yield piece
            self._room.release()
        if self._given_up:
            raise Closed("the export was given up")


class ObjectFiles:
    """The files of one export. `open` is for a thread; the requests are made on the engine's loop."""

    single = False

    def __init__(self, store: BlobStore, folder: str, loop: asyncio.AbstractEventLoop) -> None:
        self._store, self._folder, self._loop = store, folder, loop
        self.begun: list[str] = []
        """All files that were begun, also one that failed: the server may have it all the same."""
        self.written: list[str] = []
        self.nbytes = 0
        self._now: _StreamedObject | None = None
        self._given_up = False

    @contextmanager
    def open(self, name: str, /, *, nbytes: int | None = None) -> Iterator[_StreamedObject]:
        """See `Files.open`."""
        if self._given_up:
            raise Closed("the export was given up")
        self.begun.append(name)
        file = _StreamedObject(self._loop)
        sending = asyncio.run_coroutine_threadsafe(
            self._send(f"{self._folder}/{name}" if self._folder else name, file, nbytes), self._loop
        )
        sending.add_done_callback(lambda _: file.give_up())
        self._now = file
        try:
            try:
                yield file
                file.end()
                sending.result(_SENT_WITHIN)
            except Closed:
                if sending.done() and not sending.cancelled():
                    sending.result()  # why it ended early
                raise
            except TimeoutError as error:
                raise TierUnavailable(f"the server did not complete {name} in {_SENT_WITHIN:g} s") from error
            except concurrent.futures.CancelledError as error:
                raise Closed("the export was given up") from error
        except BaseException:
            file.give_up()
            concurrent.futures.wait([sending], limits.in_force.export_gives_up)
            sending.cancel()  # then the server keeps its parts
            raise
        finally:
            self._now = None
        self.written.append(name)
        self.nbytes += file.nbytes

    async def _send(self, key: str, file: _StreamedObject, nbytes: int | None) -> None:
        assert isinstance(self._store, PutStream)
        await self._store.put_stream(key, file.pieces(), nbytes=nbytes)

    def give_up(self) -> None:
        self._given_up = True
        if self._now is not None:
            self._now.give_up()


@dataclass
class _Writing:
    """See `Writing`."""

    place: Objects
    files: ObjectFiles
    path: None = None

    @property
    def written(self) -> list[str]:
        return self.files.written

    def give_up(self) -> None:
        self.files.give_up()

    async def commit(self, record: Record) -> int:
        await self.place.put(record)
        return self.files.nbytes


class Objects:
    """See `Place`.

    Args:
        tier: the place, as a tier that lies there would be configured.
    """

    def __init__(self, tier: TierConfig) -> None:
        self._tier = tier
        self._opened: BlobStore | None = None
        self._verbs: BlobStore | None = None

    async def _open(self) -> BlobStore:
        if self._verbs is None:
            self._opened, self._verbs = await open_place(self._tier)
        return self._verbs

    async def exported(self) -> Mapping[int, Record]:
        store = await self._open()
        found: dict[int, Record] = {}
        steps: set[int] = set()
        async for blob in store.list(""):
            name, _, rest = blob.key.partition("/")
            if rest == RECORD and (step := places.number_of(name)) is not None:
                steps.add(step)
        for step in sorted(steps):
            record = await self._record(step)
            if record is not None:
                found[step] = record
        return found

    async def _record(self, step: int) -> Record | None:
        """The record of the export of a step, complete or not; None if none can be read."""
        key = f"{places.folder_name(step)}/{RECORD}"
        try:
            record = places.decode(await (await self._open()).get(key, limit=LARGEST_RECORD), key)
        except (NotFound, Corrupt):
            return None
        return record if record.step == step else None

    @asynccontextmanager
    async def writing(self, record: Record, before: Record | None, blocks: Blocks) -> AsyncIterator[_Writing]:
        folder = places.folder_name(record.step)
        there = await self._there(record.step)
        if there:
            known = await self._record(record.step)
            if known is None or known.store != record.store:
                raise places.other_than(f"{folder} at {self._tier.location}")
            # Also files that an export left unfinished, which readers do not find.
            await self._delete(known, there)
        await self.put(record)
        assert self._opened is not None
        writing = _Writing(self, ObjectFiles(self._opened, folder, asyncio.get_running_loop()))
        try:
            yield writing
        finally:
            writing.give_up()

    async def put(self, record: Record) -> None:
        """Write the record of an export."""
        await (await self._open()).put(f"{places.folder_name(record.step)}/{RECORD}", [places.encode(record)])

    async def delete(self, record: Record) -> None:
        known = await self._record(record.step)
        if known is not None and known.store == record.store:  # else somebody has replaced it
            await self._delete(record, await self._there(record.step))

    async def _there(self, step: int) -> list[str]:
        """The objects of an export, the newest first: without the one that was written last readers find nothing."""
        store = await self._open()
        found = [blob async for blob in store.list(f"{places.folder_name(step)}/")]
        # Within one second, which is all that servers tell, an index comes after model-00001-of-…: by name as well.
        return [blob.key for blob in sorted(found, key=lambda blob: (blob.modified, blob.key), reverse=True)]

    async def _delete(self, record: Record, there: list[str]) -> None:
        """Delete objects, what commits the others first and the record last."""
        folder = places.folder_name(record.step)
        if record.complete:
            await self.put(msgspec.structs.replace(record, complete=False))
        in_order = [f"{folder}/{name}" for name in reversed(record.files)]
        last = f"{folder}/{RECORD}"
        store = await self._open()
        for key in dict.fromkeys([*in_order, *there]):
            if key != last:
                await store.delete(key)
        await store.delete(last)

    async def close(self) -> None:
        if self._opened is not None:
            await self._opened.close()
            self._opened = self._verbs = None
