"""A tier of one's own: checkpoints in one SQLite database, a row for each object."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from typing import Literal, TypeVar

from tieredckpt.blobs.base import BlobInfo, Buffer, Survives, Traits, check_key, check_prefix
from tieredckpt.concurrency import in_thread
from tieredckpt.config import TierConfig, TierKind
from tieredckpt.config.tiers import AbsolutePath, Capacity
from tieredckpt.errors import Closed, Conflict, Corrupt, Invalid, NoSpace, NotFound, ShortRead, TierUnavailable

__all__ = ["SQLITE", "SqliteBlobs", "SqliteTier"]

T = TypeVar("T")

_TABLE = """
CREATE TABLE IF NOT EXISTS objects (
    id INTEGER PRIMARY KEY, key TEXT NOT NULL UNIQUE, modified REAL NOT NULL, data BLOB NOT NULL
)"""
_PUT = "INSERT INTO objects (key, modified, data) VALUES (?, ?, zeroblob(?))"
_REPLACE = f"{_PUT} ON CONFLICT (key) DO UPDATE SET modified = excluded.modified, data = excluded.data"
_FIND = "SELECT id, length(data), modified FROM objects WHERE key = ?"
_LIST = "SELECT key, length(data), modified FROM objects WHERE key >= ? AND key < ?"
_DELETE = "DELETE FROM objects WHERE key = ?"

_AT_A_TIME = 1 << 20
"""Bytes that one call of SQLite copies."""


class SqliteTier(TierConfig):
    """A SQLite database: one file for all objects."""

    kind: Literal["sqlite"] = "sqlite"
    path: AbsolutePath
    """The database, made at the first use."""
    capacity: Capacity | None = None
    """Bytes that the tier may use; None for all that the file system has."""
    survives: Literal["node", "site"] = "node"

    @property
    def location(self) -> str:
        return f"sqlite:{self.path}"


class SqliteBlobs:
    """Blobs as the rows of a table; made by `open`. One thread does all the work, since SQLite has one writer."""

    def __init__(self, tier: SqliteTier) -> None:
        self._tier = tier
        self._thread = ThreadPoolExecutor(1, "sqlite-tier")
        self._database: sqlite3.Connection | None = None
        self._closed = False

    @classmethod
    async def open(cls, tier: SqliteTier, *, read_only: bool = False) -> SqliteBlobs:
        """The store of a tier; ``read_only`` makes no file, and raises `NotFound` if there is none."""
        store = cls(tier)
        try:
            await store._run(lambda: store._connect(read_only=read_only))
        except BaseException:
            await store.close()
            raise
        return store

    @property
    def traits(self) -> Traits:
        return Traits(
            survives=_survives(self._tier),
            durable=True,
            atomic_put=True,
            create_only=True,
            ranged_get=True,
            direct_io=False,
            object_size=64 << 20,
        )

    @property
    def location(self) -> str:
        return self._tier.location

    async def get(self, key: str, *, limit: int) -> bytes:
        def read() -> bytes:
            row, size, _ = self._find(key)
            if size > limit:
                raise Corrupt(f"{self._at(key)} has {size} bytes, more than the {limit} that are acceptable")
            with self._blob(row) as blob:
                return blob.read()

        return await self._on(key, read)

    async def get_into(self, key: str, offset: int, into: memoryview) -> None:
        if offset < 0 or into.readonly:
            raise Invalid(f"{key} cannot be read from offset {offset} on, or into read-only memory")

        def read() -> None:
            row, size, _ = self._find(key)
            if offset + len(into) > size:
                raise ShortRead(f"{self._at(key)} ends at {size}, before {offset + len(into)}")
            with self._blob(row) as blob:
                blob.seek(offset)
                for start in range(0, len(into), _AT_A_TIME):
                    part = into[start : start + _AT_A_TIME]
                    part[:] = blob.read(len(part))

        await self._on(key, read)

    async def put(self, key: str, parts: Sequence[Buffer], *, create_only: bool = False) -> None:
        def write() -> None:
            with self._transaction() as database:
                sql = _PUT if create_only else _REPLACE
                try:
                    database.execute(sql, (key, time.time(), sum(map(len, parts))))
                except sqlite3.IntegrityError as error:
                    raise Conflict(f"{self._at(key)} exists already") from error
                with self._blob(self._find(key)[0], writes=True) as blob:
                    for part in filter(len, parts):
                        blob.write(part)

        await self._on(key, write)

    async def stat(self, key: str) -> BlobInfo:
        _, size, modified = await self._on(key, lambda: self._find(key))
        return BlobInfo(key, size, modified)

    async def list(self, prefix: str) -> AsyncIterator[BlobInfo]:
        check_prefix(prefix)
        span = (prefix, f"{prefix[:-1]}0") if prefix else ("", "\x7f")  # '0' follows '/'
        for key, size, modified in await self._run(lambda: self._open().execute(_LIST, span).fetchall()):
            yield BlobInfo(key, size, modified)

    async def delete(self, key: str) -> None:
        def remove() -> None:
            with self._transaction() as database:
                database.execute(_DELETE, (key,))

        await self._on(key, remove)

    async def close(self) -> None:
        """End calls under way, and refuse later ones."""
        if self._closed:
            return
        self._closed = True
        database, self._database = self._database, None
        if database is not None:
            await in_thread(database.close, pool=self._thread)  # after the calls that wait for the thread
        self._thread.shutdown(wait=False)

    # -- in the thread ------------------------------------------------------------------------------------

    def _connect(self, *, read_only: bool) -> None:
        path = self._tier.path
        if read_only and not path.is_file():
            raise NotFound(f"tier {self._tier.name!r}: there is no database {path}")
        if not read_only:
            path.parent.mkdir(parents=True, exist_ok=True)
        mode = "ro" if read_only else "rwc"
        self._database = sqlite3.connect(
            f"{path.as_uri()}?mode={mode}", uri=True, timeout=self._tier.deadline, isolation_level=None
        )
        if not read_only:
            self._database.execute(_TABLE)

    def _open(self) -> sqlite3.Connection:
        if self._database is None:
            raise Closed(f"the store at {self.location} was closed")
        return self._database

    def _find(self, key: str) -> tuple[int, int, float]:
        found: tuple[int, int, float] | None = self._open().execute(_FIND, (key,)).fetchone()
        if found is None:
            raise NotFound(f"{self._at(key)} does not exist")
        return found

    def _blob(self, row: int, *, writes: bool = False) -> closing[sqlite3.Blob]:
        return closing(self._open().blobopen("objects", "data", row, readonly=not writes))

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        database = self._open()
        database.execute("BEGIN IMMEDIATE")
        try:
            yield database
        except BaseException:
            database.execute("ROLLBACK")
            raise
        database.execute("COMMIT")  # the commit syncs the file

    # -- from the event loop ------------------------------------------------------------------------------

    def _at(self, key: str) -> str:
        return f"{self.location}:{key}"

    async def _on(self, key: str, work: Callable[[], T]) -> T:
        check_key(key)
        return await self._run(work)

    async def _run(self, work: Callable[[], T]) -> T:
        """The result of ``work()`` on the thread; a cancellation waits, since the call uses the caller's memory."""
        if self._closed:
            raise Closed(f"the store at {self.location} was closed")
        try:
            return await in_thread(work, pool=self._thread)
        except (sqlite3.Error, OSError) as error:
            kind = NoSpace if getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL else TierUnavailable
            raise kind(f"tier {self._tier.name!r} at {self.location}: {error}") from error


def _survives(tier: SqliteTier) -> Survives:
    return Survives.named(tier.survives)


SQLITE = TierKind(
    config=SqliteTier,
    open=SqliteBlobs.open,
    survives=_survives,
    exists=lambda tier: tier.path.is_file(),
)
"""Everything that the library needs of this kind. Its configuration has the `location`; TensorStore cannot read it."""
