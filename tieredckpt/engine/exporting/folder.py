"""Exports in a folder: written under another name, flushed to the device, and renamed."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import TypeVar

from tieredckpt.blobs.posix.files import is_full, sync_folder
from tieredckpt.blobs.posix.stream import Blocks, StreamedFile, new_file
from tieredckpt.blobs.posix.transfer import Stopped
from tieredckpt.concurrency import being_cancelled, on_own_thread_within
from tieredckpt.engine import limits
from tieredckpt.engine.exporting import places
from tieredckpt.engine.exporting.places import LARGEST_RECORD, RECORD, Record
from tieredckpt.errors import Closed, Corrupt, Invalid, NoSpace, TieredCkptError, TierUnavailable

__all__ = ["Folder", "FolderFiles", "flush_tree"]

T = TypeVar("T")

_PREFIX = ".tieredckpt-"
_ANSWERS_WITHIN = 150.0
"""Seconds for a file system to list, rename or delete; Lustre recovers within two minutes."""


class FolderFiles:
    """The files of one folder, or one file; each flushed when it is complete."""

    def __init__(self, path: Path, *, single: bool = False, blocks: Blocks | None = None) -> None:
        self.single = single
        self._blocks = blocks or Blocks()
        self.written: list[str] = []
        self.stop = threading.Event()
        self.path = path

    @contextmanager
    def open(self, name: str, /, *, nbytes: int | None = None) -> Iterator[StreamedFile]:
        """See `Files.open`."""
        if not self.single:
            self.path.mkdir(exist_ok=True)
        with new_file(self.path if self.single else self.path / name, self.stop, self._blocks) as file:
            yield file
        self.written.append(name)


class _Writing:
    """See `Writing`."""

    def __init__(self, folder: Folder, path: Path, to: Path, before: Record | None, blocks: Blocks) -> None:
        self.path = path
        self.files = FolderFiles(path, blocks=blocks)
        self._folder, self._to, self._before = folder, to, before

    @property
    def written(self) -> list[str]:
        return self.files.written

    def give_up(self) -> None:
        self.files.stop.set()

    async def commit(self, record: Record) -> int:
        # A format's library leaves it to this to flush what it wrote.
        more = 0.0 if self.files.written else record.nbytes / limits.in_force.export_flush_rate
        return await self._folder.run("an export", self._commit, record, within=_ANSWERS_WITHIN + more)

    def _commit(self, record: Record) -> int:
        self.path.mkdir(exist_ok=True)  # of a step without arrays
        nbytes = sum(path.stat().st_size for path in self.path.rglob("*") if path.is_file())
        (self.path / RECORD).write_bytes(places.encode(record))
        if self.files.written:
            flush_tree(self.path, only=RECORD)
        else:
            flush_tree(self.path)
        if self.files.stop.is_set():  # this thread was left behind meanwhile, and another one may write the same step
            raise Closed("the export was given up")
        before = self.path.with_name("before")
        if self._before is not None and _is_of(self._before, self._to):
            self._to.rename(before)
        elif os.path.lexists(self._to):
            raise places.other_than(str(self._to))
        try:
            self.path.rename(self._to)
        except OSError:
            with suppress(OSError):  # there was none, or it cannot come back either
                before.rename(self._to)
            raise
        sync_folder(self._to.parent)
        return nbytes


class Folder:
    """See `Place`.

    Args:
        path: of the folder; made when it is needed.
        owner: gives the name by which a store knows its own unfinished exports in a folder of several stores. It is
            called when needed, for a new store has no identity before its first save.
    """

    def __init__(self, path: Path, owner: Callable[[], str]) -> None:
        self._path, self._owner = path, owner
        self._turn = threading.Lock()
        """Held by the thread that works here: no thread may delete what one that was left behind still renames."""

    @property
    def _prefix(self) -> str:
        return f"{_PREFIX}{self._owner()}-"

    async def run(
        self, what: str, function: Callable[..., T], *arguments: object, within: float = _ANSWERS_WITHIN
    ) -> T:
        """Run ``function(*arguments)`` on a thread, which is left behind if the file system hangs."""
        left = threading.Event()
        try:
            return await on_own_thread_within(within, str(self._path), what, self._in_turn, left, function, *arguments)
        finally:
            left.set()

    def _in_turn(self, left: threading.Event, function: Callable[..., T], *arguments: object) -> T:
        with self._turn:
            if left.is_set():  # before its turn came, and others have worked here since
                raise Closed("nobody waits for it any more")
            return _mapped(self._path, function, *arguments)

    async def exported(self) -> Mapping[int, Record]:
        return await self.run("a list of exports", self._exported)

    def _exported(self) -> dict[int, Record]:
        found: dict[int, Record] = {}
        try:
            entries = list(self._path.iterdir())
        except FileNotFoundError:
            return found
        unfinished = self._prefix
        for entry in entries:
            if entry.name.startswith(unfinished):
                shutil.rmtree(entry, ignore_errors=True)
            elif (step := places.number_of(entry.name)) is not None:
                record = _record_in(entry)
                if record is not None and record.step == step:
                    found[step] = record
        return found

    @asynccontextmanager
    async def writing(self, record: Record, before: Record | None, blocks: Blocks) -> AsyncIterator[_Writing]:
        to = self._path / places.folder_name(record.step)
        beside = await self.run("an export", self._begin, to, before)
        writing = _Writing(self, beside / to.name, to, before, blocks)
        try:
            yield writing
        finally:
            writing.give_up()
            within = limits.in_force.export_gives_up if being_cancelled() else _ANSWERS_WITHIN
            await self.run("the end of an export", shutil.rmtree, beside, True, within=within)

    def _begin(self, to: Path, before: Record | None) -> Path:
        self._path.mkdir(parents=True, exist_ok=True)
        if os.path.lexists(to) and (before is None or not _is_of(before, to)):
            raise places.other_than(str(to))
        return Path(tempfile.mkdtemp(prefix=self._prefix, dir=self._path))

    async def delete(self, record: Record) -> None:
        await self.run("the deletion of an export", self._delete, record)

    def _delete(self, record: Record) -> None:
        if not _is_of(record, self._path / places.folder_name(record.step)):
            return  # somebody has moved it away
        beside = Path(tempfile.mkdtemp(prefix=self._prefix, dir=self._path))
        try:
            with suppress(FileNotFoundError):
                (self._path / places.folder_name(record.step)).rename(beside / "gone")
            sync_folder(self._path)
        finally:
            shutil.rmtree(beside, ignore_errors=True)

    async def close(self) -> None:
        pass


def _record_in(folder: Path) -> Record | None:
    """The record of an export; None for a folder that is no export."""
    with suppress(FileNotFoundError, NotADirectoryError, Corrupt), (folder / RECORD).open("rb") as file:
        return places.decode(file.read(LARGEST_RECORD), str(folder / RECORD))
    return None


def _is_of(record: Record, folder: Path) -> bool:
    """Whether a folder still is an export of the store that made this one."""
    found = _record_in(folder)
    return found is not None and found.store == record.store


def _mapped(where: Path, function: Callable[..., T], *arguments: object) -> T:
    try:
        return function(*arguments)
    except TieredCkptError:
        raise
    except Exception as error:
        raise mapped(error, str(where)) from error


def mapped(error: Exception, where: str) -> TieredCkptError:
    """Map an error of a file system, or of a format's library, to one of this library."""
    if isinstance(error, TieredCkptError):
        return error
    if isinstance(error, Stopped):
        return Closed("the export was given up")
    if isinstance(error, MemoryError):
        return NoSpace(f"{where}: there is no memory for what the format reads at a time: {error}")
    if isinstance(error, OSError):
        text = f"{where} cannot be written: {error.strerror or error}"
        if is_full(error):
            return NoSpace(text)
        if error.errno in (errno.EEXIST, errno.ENOTEMPTY):
            return places.other_than(where)
        return TierUnavailable(text)
    return Invalid(f"{where}: the format cannot write the step: {type(error).__name__}: {error}")


def flush_tree(path: Path, only: str | None = None, *, forget: bool = False) -> None:
    """Flush a file, or the files of a folder (or ``only`` one of them), to the device, and the folders too.

    ``forget``: drop them from the page cache, so that what is read back comes from the device.
    """
    files = sorted(path.rglob("*")) if path.is_dir() else [path]
    for file in files:
        if file.is_file() and only in (None, file.name):
            descriptor = os.open(file, os.O_RDONLY)
            try:
                os.fsync(descriptor)
                if forget and hasattr(os, "posix_fadvise") and os.fstat(descriptor).st_nlink == 1:
                    # of several names, one may be a store's, and in use
                    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(descriptor)
    for folder in [path, *files]:
        if folder.is_dir():
            sync_folder(folder)
