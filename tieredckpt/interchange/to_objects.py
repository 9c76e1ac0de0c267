"""Writes an export below a URL of an object store, and reads it back; the format's last file commits the others."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import numpy as np

from tieredckpt.blobs.base import BlobStore, GetDigested, Stretch
from tieredckpt.config.exports import place_of
from tieredckpt.config.formats import Digests, Files, Output
from tieredckpt.engine.exporting.objects import ObjectFiles, open_place
from tieredckpt.errors import Conflict, Corrupt, TieredCkptError
from tieredckpt.format.digest import Digester
from tieredckpt.sync import SyncStore

__all__ = ["write_to_objects"]

T = TypeVar("T")

_CLAIM = ".tieredckpt-"
"""Prefix of an export's object, which claims the place while the export writes."""
_BLOCK = 16 << 20
"""Bytes that are compared at a time."""


class _Digested:
    """A file whose blocks are digested while it is written."""

    def __init__(self, file: Output) -> None:
        self._file = file
        self._digester, self._used = Digester(), 0
        self.blocks: list[tuple[int, bytes]] = []
        """Bytes and digest of each."""

    def write(self, data: Any, /) -> int:
        array = np.frombuffer(data, np.uint8)
        at = 0
        while at < array.size:
            part = array[at : at + _BLOCK - self._used]
            self._digester.update(part)
            self._used += part.size
            at += part.size
            if self._used == _BLOCK:
                self.end()
        return self._file.write(array)

    def flush(self) -> None:
        """See `Output`."""

    def end(self) -> None:
        """End the last block."""
        if self._used:
            self.blocks.append((self._used, self._digester.digest()))
            self._digester, self._used = Digester(), 0


class _DigestedFiles:
    """Files, and the digests of the blocks that were written to each."""

    single = False

    def __init__(self, files: ObjectFiles) -> None:
        self._files = files
        self.blocks: dict[str, list[tuple[int, bytes]]] = {}

    @contextmanager
    def open(self, name: str, /, *, nbytes: int | None = None) -> Iterator[_Digested]:
        """See `Files.open`."""
        with self._files.open(name, nbytes=nbytes) as file:
            digested = _Digested(file)
            yield digested
            digested.end()
        self.blocks[name] = digested.blocks


def write_to_objects(store: SyncStore, url: str, write: Callable[[Files], Digests]) -> Digests:
    """Call ``write`` to stream files to objects below ``url``, where none exist yet, and compare them afterwards.

    The requests are made on the loop of ``store``. After a failed export, the written objects are deleted, until a
    deletion fails too.

    Raises:
        Conflict: an object exists there.
        Corrupt: the written bytes did not come back.
        Invalid, TierUnavailable: the place cannot be written.
    """
    streams, objects = store._run(open_place(place_of(url, "export")))
    assert isinstance(objects, GetDigested)
    claim = f"{_CLAIM}{secrets.token_hex(8)}"
    files = ObjectFiles(streams, "", store._life.loop.thread.loop)
    try:
        store._run(_refuse_taken(objects, url))
        try:
            # An export that lists after both have put their claims sees both: of two exports at once, at most one
            # writes.
            store._run(objects.put(claim, [b""]))
            store._run(_refuse_taken(objects, url, but=claim))
            digested = _DigestedFiles(files)
            written = write(digested)
            for name, blocks in digested.blocks.items():
                store._run(_compare(objects, url, name, blocks))
        except BaseException:
            files.give_up()
            with suppress(TieredCkptError):  # do not ask a silent server for each of them
                for name in (*reversed(files.begun), claim):
                    store._run(objects.delete(name))
            raise
        with suppress(TieredCkptError):
            store._run(objects.delete(claim))
        return written
    finally:
        store._run(objects.close())


async def _refuse_taken(objects: BlobStore, url: str, but: str = "") -> None:
    async for blob in objects.list(""):
        if blob.key.startswith(_CLAIM) and blob.key != but:
            raise Conflict(f"{url} is being exported to; if that was killed, delete {blob.key} there")
        if blob.key != but:
            raise Conflict(f"{url} has objects already; choose another place, nothing is replaced")


async def _compare(objects: GetDigested, url: str, name: str, blocks: list[tuple[int, bytes]]) -> None:
    at = 0
    for nbytes, digest in blocks:
        memory = memoryview(bytearray(nbytes))
        (found,) = await objects.get_digested(name, [Stretch(at, nbytes, memory)])
        if found != digest:
            raise Corrupt(f"{url}/{name} did not come back as written, nothing was exported; try again")
        at += nbytes
