"""The RAM tier's blob store: a folder in shared memory whose one pack is a slab of reusable extents.

The folder outlives the process; the kernel's boot id tells a stale one from a live one. Where shared memory
is too small for the capacity asked for (containers often have 64 MiB), a memfd takes the slab's place: as
fast, but gone with the last process that holds it.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import logging
import os
import shutil
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from pathlib import Path

from msgspec.structs import replace

from tieredckpt.blobs.base import ALIGNMENT, BlobInfo, Buffer, Survives, Traits
from tieredckpt.blobs.boot import boot_id
from tieredckpt.blobs.locks import hold, let_go
from tieredckpt.blobs.memory import addresses_left, memory_limit
from tieredckpt.blobs.posix.files import foreign, open_regular
from tieredckpt.blobs.posix.paths import Folders
from tieredckpt.blobs.posix.store import PosixStore
from tieredckpt.blobs.ram.folder import LOCK, check_owner, take
from tieredckpt.blobs.ram.folder import remove as remove_folder
from tieredckpt.blobs.ram.owner import OWNER_FILES
from tieredckpt.blobs.ram.quota import MEMORY_PER_SLAB, Quota, counted, expected_elsewhere
from tieredckpt.blobs.ram.reader_locks import RETIRED, Replaced, Retired, StillRead
from tieredckpt.blobs.ram.slab import Slab, page_aligned
from tieredckpt.blobs.ram.slab_meta import GROWING, NOTE_FILES, Note, growing, read_note, undo_growth, write_note
from tieredckpt.concurrency import whole
from tieredckpt.errors import Corrupt, Invalid, NoSpace, NotFound, TierUnavailable
from tieredckpt.format.layout import new_pack_id, pack_key
from tieredckpt.units import format_size

__all__ = ["RamStore"]

_log = logging.getLogger("tieredckpt")


class RamStore:
    """A blob store over a shared-memory folder and its slab.

    Small objects are files of the folder; the pack ``slab_key`` is the slab, which is read like any object and
    listed like none, since no put made it. Made by `open`, which holds the folder's writer lock until `close`,
    or by `attach`.
    """

    def __init__(self, folder: Path, files: PosixStore, slab: Slab, slab_key: str, lock: int, notice: str) -> None:
        self.slab = slab
        self.slab_key = slab_key
        self.notice = notice
        """Disadvantages against ordinary shared memory, for people; empty if there are none."""
        self._folder = folder
        self._files = files
        self._lock = lock
        self._retired = Retired(folder)
        self._own = {LOCK, *NOTE_FILES, *OWNER_FILES, slab_key, slab_key + GROWING}

    @classmethod
    def open(cls, folder: Path, capacity: int | None, *, sharers: int = 1) -> RamStore:
        """Open or create the folder; blocking. ``capacity`` in bytes, None for an automatic one.

        The slab reserves an explicit capacity in the background. An automatic one grows as saves need it, and leaves
        room for the other ``sharers`` of the machine, for this user's other slabs, and in this process's addresses.

        Raises:
            Conflict: another process writes to the folder (named), or it belongs to another user.
            Invalid: the capacity is beyond the memory that this process may use.
            NoSpace: there is no room for the memory.
            TierUnavailable: the folder cannot be made or used.
        """
        limit, source = memory_limit()
        if capacity is not None and capacity > limit:
            raise Invalid(
                f"a RAM tier of {format_size(capacity)} cannot fit: {source} is {format_size(limit)}; "
                f"choose a capacity below that, with room for the training itself"
            )
        quota = None
        if capacity is None:
            share = page_aligned(limit // MEMORY_PER_SLAB // sharers)
            quota = Quota(folder, share)
            capacity = max(ALIGNMENT, min(share, addresses_left() // MEMORY_PER_SLAB))
        try:
            with contextlib.ExitStack() as undo:
                lock = take(folder)
                undo.callback(let_go, lock)
                Folders(folder, 0o700, follow_symlinks=True, fsync=False).sweep(0)  # no writer but us is left
                with counted(folder):
                    slab, key, notice = _open_slab(folder, page_aligned(capacity), quota)
                undo.callback(slab.close)
                store = cls(folder, _files(folder), slab, key, lock, notice)
                undo.pop_all()
        except OSError as error:
            kind = NoSpace if error.errno == errno.ENOSPC else TierUnavailable
            raise kind(f"the RAM tier at {folder} cannot be opened: {error.strerror}; choose another path") from error
        return store

    @classmethod
    def attach(cls, folder: Path) -> RamStore:
        """Open a folder that exists, to read it beside its writer; blocking.

        Raises:
            NotFound: there is no such folder, or its slab went with its process.
            Conflict: it belongs to another user.
            TierUnavailable: no file can be opened now, or this process may not map the slab.
        """
        try:
            check_owner(folder)
        except FileNotFoundError:
            raise NotFound(f"there is no RAM tier at {folder}") from None
        note = read_note(folder)
        if note is None:
            raise NotFound(f"there is no RAM tier at {folder}")
        try:
            fd = open_regular(folder / note.slab, os.O_RDONLY, follow_symlinks=True)
        except (OSError, Corrupt) as error:
            raise NotFound(f"the RAM tier at {folder} has lost its slab: {error}") from error
        found = os.fstat(fd)
        if found.st_size < note.capacity or note.memfd not in (None, found.st_ino):
            os.close(fd)
            raise NotFound(f"the RAM tier at {folder} has lost its slab: it ended with its process")
        try:
            slab = Slab(fd, note.capacity, writable=False)
        except OSError as error:
            raise TierUnavailable(
                f"the RAM tier at {folder}: a slab of {format_size(note.capacity)} cannot be mapped: {error.strerror}; "
                "raise the limit on addresses (`ulimit -v`)"
            ) from error
        try:
            return cls(folder, _files(folder, tries=False), slab, note.slab, -1, _notice(folder, note))
        except (OSError, NotFound) as error:
            slab.close()
            raise NotFound(f"the RAM tier at {folder} has just gone: {error}") from error

    def is_of(self, note: Note) -> bool:
        """Whether its slab is the one that ``note`` describes."""
        return (self.slab_key, self.slab.capacity) == (note.slab, note.capacity)

    @property
    def traits(self) -> Traits:
        return Traits(
            survives=Survives.NOTHING if self.notice else Survives.PROCESS,
            durable=False,
            atomic_put=True,
            create_only=False,
            ranged_get=True,
            direct_io=False,
            object_size=self.slab.capacity,
        )

    @property
    def location(self) -> str:
        return str(self._folder)

    async def get(self, key: str, *, limit: int) -> bytes:
        return await self._files.get(key, limit=limit)

    async def get_into(self, key: str, offset: int, into: memoryview) -> None:
        await self._files.get_into(key, offset, into)

    async def put(self, key: str, parts: Sequence[Buffer], *, create_only: bool = False) -> None:
        await self._files.put(key, parts, create_only=create_only)

    async def stat(self, key: str) -> BlobInfo:
        return await self._files.stat(key)

    async def list(self, prefix: str) -> AsyncIterator[BlobInfo]:
        async for info in self._files.list(prefix):
            if info.key not in self._own and not info.key.startswith(f"{RETIRED}/"):
                yield info

    async def delete(self, key: str) -> None:
        await self._files.delete(key)

    def share(self, key: str) -> int:
        """A descriptor that holds a shared lock on the object, so that the memory it refers to is not reused.

        `let_go` ends the lock, and so does the death of the process. Raises `NotFound`, `TierUnavailable`.
        """
        path = self._folder / key
        try:
            fd = open_regular(path, os.O_RDONLY, follow_symlinks=False)
        except OSError as error:
            raise foreign(error, path, "locked") from error
        fcntl.flock(fd, fcntl.LOCK_SH)
        if not _is_at(path, fd):  # retired before the lock was there to be seen
            os.close(fd)
            raise NotFound(f"{path} is gone")
        return hold(fd)

    def retire(self, key: str, index: str = "") -> Callable[[], bool]:
        """Remove the object at once; the returned function tells whether its last reader has gone.

        ``index`` is the key of the index of its extents, for `still_read`.
        """
        return self._retired.take_away(key, index)

    def keep(self, key: str) -> Replaced:
        """Keep the object apart for its readers, as it is about to be replaced. Blocking; raises as `put`."""
        return self._retired.keep(key)

    def still_read(self) -> Sequence[StillRead]:
        """Steps that earlier writers have retired and somebody still reads: their extents are not free. Blocking."""
        return self._retired.left()

    async def close(self) -> None:
        await whole(self._close())

    async def _close(self) -> None:
        await self._files.close()
        await asyncio.to_thread(self.slab.close)
        self._retired.close()
        if self._lock >= 0:
            let_go(self._lock)
            self._lock = -1

    def remove(self) -> None:
        """Free the memory: delete the folder with everything in it. Blocking.

        To be called before `close`: the lock goes last, so that no other process opens a half-deleted folder.
        """
        remove_folder(self._folder)

    @classmethod
    def discard(cls, folder: Path) -> None:
        """Delete a folder without a writer, with everything in it; blocking. Raises as `open`."""
        try:
            lock = take(folder)
        except OSError as error:
            raise TierUnavailable(f"the RAM tier at {folder} cannot be removed: {error.strerror}") from error
        try:
            remove_folder(folder)
        finally:
            let_go(lock)


def _is_at(path: Path, fd: int) -> bool:
    try:
        there, held = path.lstat(), os.fstat(fd)
    except FileNotFoundError:
        return False
    return (there.st_dev, there.st_ino) == (held.st_dev, held.st_ino)


def _files(folder: Path, *, tries: bool = True) -> PosixStore:
    return PosixStore(folder, survives=Survives.PROCESS, fsync=False, direct=False, follow_symlinks=True, tries=tries)


def _open_slab(folder: Path, capacity: int, quota: Quota | None) -> tuple[Slab, str, str]:
    """The slab of the folder, its key and notice: the one that is there if it is of this boot, else a new one."""
    note = read_note(folder)
    slab = None
    reserve = quota is None  # a capacity that was asked for
    if note is not None and not (folder / note.slab).is_symlink():  # a link to a memfd, which has ended
        with contextlib.suppress(FileNotFoundError):
            slab, note = _old_slab(folder, note, capacity, quota)
    if slab is None or note is None:
        for stale in ("packs", "steps"):
            shutil.rmtree(folder / stale, ignore_errors=True)
        slab, note = _new_slab(folder, capacity, quota)
    try:
        if reserve:
            slab.check_room(capacity, besides=expected_elsewhere(folder) if note.memfd is None else 0)
            slab.expect(capacity)
        write_note(folder, replace(note, expected=capacity if reserve else 0))
        notice = _notice(folder, note)
    except BaseException:
        slab.close()
        raise
    return slab, note.slab, notice


def _old_slab(folder: Path, note: Note, capacity: int, quota: Quota | None) -> tuple[Slab | None, Note]:
    path = folder / note.slab
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        found = os.fstat(fd)
        if found.st_size < note.capacity:
            os.close(fd)
            return None, note
        size = max(note.capacity, capacity)
        os.ftruncate(fd, max(found.st_size, size))
        reserved = undo_growth(path, fd, min(size, found.st_blocks * 512 // ALIGNMENT * ALIGNMENT))
    except OSError:
        os.close(fd)
        raise
    return Slab(fd, size, reserved, growing=partial(growing, path), quota=quota), replace(note, capacity=size)


def _new_slab(folder: Path, capacity: int, quota: Quota | None) -> tuple[Slab, Note]:
    key = pack_key(new_pack_id())
    path = folder / key
    for made in (path.parent.parent, path.parent):
        made.mkdir(mode=0o700)
    room = os.statvfs(folder)
    memfd = None
    if room.f_bavail * room.f_frsize >= capacity + expected_elsewhere(folder):
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    elif hasattr(os, "memfd_create"):
        fd = os.memfd_create("tieredckpt-slab", os.MFD_CLOEXEC)
        memfd = os.fstat(fd).st_ino
        path.symlink_to(f"/proc/{os.getpid()}/fd/{fd}")
    else:
        raise NoSpace(f"{folder} has less than the {format_size(capacity)} of the RAM tier")
    os.ftruncate(fd, capacity)
    slab = Slab(fd, capacity, growing=partial(growing, path), quota=quota)
    return slab, Note(slab=key, capacity=capacity, boot_id=boot_id(), memfd=memfd)


def _notice(folder: Path, note: Note) -> str:
    if note.memfd is None:
        return ""
    room = os.statvfs(folder)
    left = max(0, room.f_bavail * room.f_frsize - expected_elsewhere(folder))
    lacking = max(0, note.capacity - left)
    return (
        f"shared memory at {folder} has {format_size(left)} left, {format_size(lacking)} too little for "
        f"the RAM tier's {format_size(note.capacity)}: a memfd takes its place, and its steps end with this "
        f"process; a larger /dev/shm (docker run --shm-size) lets them survive it"
    )
