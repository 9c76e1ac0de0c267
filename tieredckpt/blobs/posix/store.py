"""A blob store over a directory: whole objects by temporary file and rename, large ones by direct I/O.

Small durable objects are written through aiofiles, large ones by `transfer`; all on threads of the store's own, so that
a file system that hangs starves no other tier. A cancelled put waits for its thread, which uses the caller's memory and
checks for a cancellation before every block; so does a `get_into` on a local file system. Other read verbs return at
once when they are cancelled: their threads read into memory of their own, and end when the device answers.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

import aiofiles
import aiofiles.os
import numpy as np

from tieredckpt.blobs.base import BlobInfo, Buffer, Stretch, Survives, Traits, check_key, check_prefix, check_stretches
from tieredckpt.blobs.posix import transfer
from tieredckpt.blobs.posix.calls import Calls, Followed
from tieredckpt.blobs.posix.files import probe
from tieredckpt.blobs.posix.paths import Folders, Scanned
from tieredckpt.blobs.posix.target import Target
from tieredckpt.blobs.posix.threads import Threads
from tieredckpt.blobs.space import check_room, free_bytes, reserve
from tieredckpt.concurrency import together
from tieredckpt.errors import Closed, Corrupt, Invalid, NotFound, ShortRead, TieredCkptError, TierUnavailable

__all__ = ["PosixStore"]

T = TypeVar("T")

_BUSY = 0.9
"""Share of its time for which the threads of a listing, together, may keep one processor busy."""


class PosixStore:
    """Blobs as files below ``root``.

    The constructor makes ``root`` and finds out what its file system can do; it blocks, so on an event loop
    call it through a thread. Raises `TierUnavailable`; `Invalid` for ``direct=True`` where it is refused.

    Args:
        root: the folder; made with ``folder_mode`` if missing, otherwise left as it is.
        survives: what the medium outlives; a shared file system is ``Survives.SITE``.
        fsync: sync files and folders, so that a put is durable. Turn it off only where nothing can be durable.
        direct: use direct I/O for transfers of at least 1 MiB; None: where the file system takes it.
        follow_symlinks: read objects that are symbolic links; refused as `Corrupt` otherwise.
        threads: how many calls block at a time. Twice as many more threads read chunks, and as many again list folders.
        folder_mode, file_mode: permissions of what is made, narrowed by the umask.
        folders: makes the `Folders` of the root, for a file system that needs others.
        facts: more entries of `facts`.
        tries: find out by trying what the file system can do. False for a reader, which makes nothing: a missing
            ``root`` is `NotFound`, and a refused direct read falls back by itself.
    """

    def __init__(
        self,
        root: Path | str,
        *,
        survives: Survives = Survives.NODE,
        fsync: bool = True,
        direct: bool | None = None,
        follow_symlinks: bool = False,
        threads: int = 4,
        folder_mode: int = 0o700,
        file_mode: int = 0o600,
        folders: Callable[..., Folders] = Folders,
        facts: Mapping[str, str] | None = None,
        tries: bool = True,
    ) -> None:
        self._root = Path(os.path.abspath(root))
        self._folders = folders(self._root, folder_mode, follow_symlinks, fsync, file_mode, makes=tries)
        if fsync and tries:
            with contextlib.suppress(OSError):  # the first put raises it again
                self._folders.sync_names(self._root)
        takes_direct = probe(self._root, tries=tries)
        if direct and not takes_direct:
            raise Invalid(f"the file system of {self._root} refuses direct I/O; leave `direct` unset")
        self._direct = takes_direct if direct is None else direct
        self._fsync, self._facts = fsync, {**(facts or {}), **self._folders.facts}
        readers = 2 * threads  # half of them copy while half of them read
        self._traits = Traits(
            survives=survives,
            durable=fsync,
            atomic_put=True,
            create_only=False,
            ranged_get=True,
            direct_io=self._direct,
            object_size=256 << 20,
            digested_reads=readers + readers // 2,  # for whichever thread is done, the next is there
        )
        self._most_scanners = 2 * threads
        self._calls = Calls(threads, readers, self._most_scanners, self.location)
        self._closed = False

    @property
    def traits(self) -> Traits:
        return self._traits

    @property
    def location(self) -> str:
        return str(self._root)

    def facts(self) -> Mapping[str, str]:
        """Facts for people about the file system."""
        return self._facts

    @property
    def hanging(self) -> int:
        """How many threads are in calls that no caller waits for any more."""
        return self._calls.hanging

    async def get(self, key: str, *, limit: int) -> bytes:
        path = self._path(key)

        stop = transfer.Stop()
        read = partial(self._read_whole, path, limit, stop)
        return await self._reopening(lambda: self._calls.read(read, stop, self._calls.pool))

    async def get_into(self, key: str, offset: int, into: memoryview) -> None:
        path = self._path(key)
        if offset < 0 or into.readonly:
            raise Invalid(f"{key} cannot be read from offset {offset} on, or into read-only memory")
        if self._folders.over_network:
            await self._read(path, Target([Stretch(offset, into.nbytes, into)], digested=False), self._calls.pool)
        else:
            await self._calls.run(partial(self._fill, path, offset, into))

    async def get_digested(self, key: str, stretches: Sequence[Stretch]) -> Sequence[bytes]:
        path = self._path(key)
        check_stretches(key, stretches)
        target = Target(stretches, digested=True)
        await self._read(path, target, self._calls.readers)
        return target.digests

    async def put(self, key: str, parts: Sequence[Buffer], *, create_only: bool = False) -> None:
        path = self._path(key)
        if create_only:
            raise Invalid(f"a folder has no exclusive put, which {key} was to be written by")
        nbytes = sum(memoryview(part).nbytes for part in parts)
        if nbytes >= transfer.DIRECT_FROM or not self._fsync:
            # A write that does not wait for a device takes less time than handing it from one thread's turn to the
            # next.
            await self._calls.run(partial(self._write_in_one_turn, path, parts, nbytes))
            return
        stop, pool = transfer.Stop(), Followed(self._calls.pool)
        write = self._write_and_sync(path, b"".join(parts), stop, pool)

        def give_up() -> None:
            stop.set()
            pool.leave()

        await self._calls.until_done(asyncio.ensure_future(write), give_up)

    async def stat(self, key: str) -> BlobInfo:
        path = self._path(key)

        def look() -> BlobInfo:
            with self._errors(path, "looked at"):
                return self._folders.info(path)

        return await self._reopening(lambda: self._calls.read(look, transfer.Stop(), self._calls.pool))

    async def list(self, prefix: str) -> AsyncIterator[BlobInfo]:
        check_prefix(prefix)
        pending = [prefix]
        found: list[Scanned] = []
        stop = transfer.Stop()

        def scan() -> Scanned:
            with self._errors(self._root / prefix, "listed"):
                return self._folders.scan(pending, stop.is_set)

        async def scan_some() -> None:
            self._check_open()
            found.append(await self._calls.read(scan, stop, self._calls.scanners))

        threads = 1
        while pending:
            threads = min(threads, len(pending))
            await together([scan_some() for _ in range(threads)])
            # If a server is asked for each name, several threads wait side by side; else they would wait for each
            # other.
            took, worked = max(each.took for each in found), sum(each.worked for each in found)
            enough = threads * _BUSY * took / worked if worked else self._most_scanners
            threads = max(1, min(int(enough), self._most_scanners))
            for each in found:
                for info in each.infos:
                    yield info
            found.clear()

    async def delete(self, key: str) -> None:
        path = self._path(key)

        def remove(_: transfer.Stop) -> None:
            with self._errors(path, "deleted"):
                self._folders.remove(path)

        await self._calls.run(remove)

    async def free(self) -> int | None:
        """Free bytes of the file system for this user, whatever the quota is. Raises `TierUnavailable`."""
        self._check_open()

        def look() -> int | None:
            with self._errors(self._root, "looked at"):
                return free_bytes(os.statvfs(self._root))

        return await self._calls.read(look, transfer.Stop(), self._calls.pool)

    async def sweep(self, age: float) -> int:
        """Remove remains of puts of dead writers: temporary files unchanged for ``age`` seconds.

        Returns how many. An age shorter than a live put takes would end that put with an error. Raises
        `TierUnavailable`, `Closed`.
        """
        self._check_open()

        def sweep(_: transfer.Stop) -> int:
            with self._errors(self._root, "swept"):
                return self._folders.sweep(age)

        return await self._calls.run(sweep)

    async def close(self) -> None:
        """Refuse further verbs; those under way end as they would have, but for listings, which end as `Closed`."""
        self._closed = True
        self._calls.end()

    def _check_open(self) -> None:
        if self._closed:
            raise Closed(f"the store at {self._root} was closed")

    def _path(self, key: str) -> Path:
        self._check_open()
        return self._root / check_key(key)

    async def _reopening(self, read: Callable[[], Awaitable[T]]) -> T:
        """Call ``read``, and once more if its file is not the one any more that was opened by its name."""
        try:
            return await read()
        except TierUnavailable as error:
            if not self._folders.is_stale(error):
                raise
        self._check_open()
        return await read()

    @contextlib.contextmanager
    def _errors(self, path: Path, doing: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise self._folders.error(error, path, doing) from error

    def _read_whole(self, path: Path, limit: int, stop: transfer.Stop) -> bytes:
        with self._errors(path, "read"), open(self._folders.open(path, os.O_RDONLY), "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size > limit:
                raise Corrupt(f"{path} has {size} bytes, and at most {limit} are acceptable")
            transfer.check(stop)
            data = file.read(size)
        if len(data) < size:
            raise ShortRead(f"{path} ended after {len(data)} of {size} bytes")
        return data

    def _fill(self, path: Path, offset: int, into: memoryview, stop: transfer.Stop) -> None:
        array = np.frombuffer(into, dtype=np.uint8)
        with self._reading(path, offset, len(array)) as (fd, direct):
            transfer.fill(fd, offset, array, stop, direct=direct)

    async def _read(self, path: Path, target: Target, pool: Threads) -> None:
        def fill() -> None:
            target.restart()
            with self._reading(path, target.begin, target.end - target.begin) as (fd, direct):
                transfer.read(fd, target, direct=direct)

        try:
            await self._reopening(lambda: self._calls.read(fill, target.stop, pool))
        except asyncio.CancelledError:
            await target.take_back()
            raise
        except GeneratorExit:  # nothing may be awaited
            target.let_go()
            raise

    @contextlib.contextmanager
    def _reading(self, path: Path, offset: int, nbytes: int) -> Iterator[tuple[int, bool]]:
        """A descriptor to read the range with, and whether it uses direct I/O."""
        with self._errors(path, "read"):
            fd, direct = self._open_to_read(path, self._direct and nbytes >= transfer.DIRECT_FROM)
            try:
                size = os.fstat(fd).st_size
                if offset + nbytes > size:
                    raise ShortRead(f"{path} has {size} bytes, and {nbytes} from offset {offset} were wanted")
                yield fd, direct
            except transfer.EndOfFile as end:
                raise ShortRead(f"{path} ended {end.got} bytes after offset {offset}") from None
            finally:
                os.close(fd)

    def _open_to_read(self, path: Path, direct: bool) -> tuple[int, bool]:
        if direct:
            try:
                flags = os.O_RDONLY | transfer.O_DIRECT
                return self._folders.open(path, flags), True
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
        return self._folders.open(path, os.O_RDONLY), False

    async def _write_and_sync(self, path: Path, data: bytes, stop: transfer.Stop, pool: Followed) -> None:
        folders = self._folders
        try:
            create = aiofiles.os.wrap(folders.create)
            temporary, fd = await create(path, 0, executor=pool)
            try:
                file = await aiofiles.open(fd, "wb", executor=pool)
                try:
                    await file.write(data)
                    await file.flush()
                    await aiofiles.os.wrap(os.fsync)(fd, executor=pool)
                finally:
                    await file.close()
                await aiofiles.os.wrap(self._publish)(temporary, path, stop, executor=pool)
            except BaseException:
                with contextlib.suppress(OSError):
                    await aiofiles.os.unlink(temporary, executor=pool)
                raise
        except OSError as error:
            # On a thread, since it may have to look whether the root is still there.
            mapped = await aiofiles.os.wrap(folders.error)(error, path, "written", executor=pool)
            raise _of_put(mapped, path) from error

    def _write_in_one_turn(self, path: Path, parts: Sequence[Buffer], nbytes: int, stop: transfer.Stop) -> None:
        folders = self._folders
        direct = self._direct and nbytes >= transfer.DIRECT_FROM
        flags = transfer.O_DIRECT if direct else 0
        try:
            temporary, fd = folders.create(path, flags)
            try:
                try:
                    if not folders.over_network:
                        check_room(fd, nbytes)
                    reserve(fd, nbytes)
                    transfer.write(fd, transfer.as_arrays(parts), stop, direct=direct, block=folders.block)
                    if self._fsync:
                        os.fsync(fd)
                finally:
                    os.close(fd)
                self._publish(temporary, path, stop)
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(temporary)
                raise
        except OSError as error:
            raise _of_put(folders.error(error, path, "written"), path) from error

    def _publish(self, temporary: Path, path: Path, stop: transfer.Stop) -> None:
        """Publish unless the put was cancelled: it may have waited long for this thread."""
        transfer.check(stop)
        self._folders.publish(temporary, path)


def _of_put(error: TieredCkptError, path: Path) -> TieredCkptError:
    """Map `NotFound` of a put: its folder was removed, or a file stands where its folder belongs."""
    if isinstance(error, NotFound):
        return TierUnavailable(f"{path} was not written: its folder was removed, or a file stands there")
    return error
