"""The RAM tier's blob store: a folder in shared memory whose one pack is a slab of reusable extents.

The *slab* is a file of fixed size, mapped once, from which page-aligned *extents* are handed out and taken
back. Its memory is reserved before it is used (``fallocate``), so that a full ``/dev/shm`` is an error when
the slab grows and never a SIGBUS later. The folder outlives the process; the kernel's boot id tells a stale
one from a live one.

Where shared memory is too small for the capacity asked for (containers often have 64 MiB), a memfd takes the
slab's place: as fast, but gone with the last process that holds it.
"""

from __future__ import annotations

import bisect
import contextlib
import ctypes
import fcntl
import json
import logging
import mmap
import os
import shutil
import socket
import stat
import tempfile
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from tieredckpt.blobs.base import ALIGNMENT, BlobInfo, Buffer, Survives, Traits
from tieredckpt.blobs.posix import PosixStore
from tieredckpt.errors import Conflict, Invalid, NoSpace, NotFound
from tieredckpt.format.layout import new_pack_id, pack_key
from tieredckpt.units import format_size

__all__ = ["RamStore", "Slab", "aligned", "memory_limit", "shared_memory_root"]

_log = logging.getLogger("tieredckpt")

_MADV_POPULATE_WRITE = 23  # Linux 5.14; not named by the mmap module
_PREFAULT_STRIDE = 32 << 20
_AUTO_SHARE_OF_MEMORY = 4  # an automatic slab takes at most a quarter of the memory there is


def aligned(nbytes: int) -> int:
    """``nbytes`` rounded up to `ALIGNMENT`."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def shared_memory_root() -> Path:
    """Where this user's RAM tiers live: ``/dev/shm`` on Linux, the temporary folder elsewhere."""
    base = Path("/dev/shm")
    if not base.is_dir() or not os.access(base, os.W_OK):
        base = Path(tempfile.gettempdir())
    return base / f"tieredckpt-{os.getuid()}"


def memory_limit() -> tuple[int, str]:
    """Bytes of memory that this process may use, and what says so (a cgroup or the machine)."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit, source = total, "the machine's memory"
    for path in _cgroup_limit_files():
        with contextlib.suppress(OSError, ValueError):
            value = int(path.read_text())
            if value < limit:
                limit, source = value, f"the cgroup limit in {path}"
    return limit, source


def _cgroup_limit_files() -> list[Path]:
    files = [Path("/sys/fs/cgroup/memory/memory.limit_in_bytes")]
    root = Path("/sys/fs/cgroup")
    group = root
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            hierarchy, _, path = line.split(":", 2)
            if hierarchy == "0":
                group = root / path.lstrip("/")
    while group != root and root in group.parents:
        files.append(group / "memory.max")
        group = group.parent
    return [*files, root / "memory.max"]


def _boot_id() -> str:
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return "unknown"


class Slab:
    """A mapped file cut into extents; safe to use from any thread.

    Args:
        fd: an open file of at least ``capacity`` bytes; the slab owns it.
        capacity: the largest size it may grow to, in bytes, a multiple of `ALIGNMENT`.
        reserved: how much of it has its memory already, from the start.
        writable: False for a slab that another process writes; nothing is handed out from it then.
    """

    def __init__(self, fd: int, capacity: int, reserved: int = 0, *, writable: bool = True) -> None:
        self.capacity = capacity
        self.writable = writable
        self._fd = fd
        self._map = mmap.mmap(fd, capacity, access=mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ)
        self.array: npt.NDArray[np.uint8] = np.frombuffer(self._map, dtype=np.uint8)
        self._guards_extents = threading.Lock()
        self._reserved = reserved
        self._free: list[tuple[int, int]] = [(0, reserved)] if reserved else []  # (offset, length), by offset
        self._prefaulted = 0
        self._closed = False

    @property
    def reserved(self) -> int:
        """Bytes of memory that the slab holds now."""
        return self._reserved

    @property
    def used(self) -> int:
        """Bytes in extents that are handed out."""
        with self._guards_extents:
            return self._reserved - sum(length for _, length in self._free)

    @property
    def room(self) -> int:
        """Bytes that could still be handed out, in one extent or in several."""
        return self.capacity - self.used

    def fileno(self) -> int:
        """The slab's file, for mappings of its own."""
        return self._fd

    def allocate(self, nbytes: int) -> int | None:
        """The offset of a free extent of ``nbytes`` rounded up to `ALIGNMENT`, or None when none is left."""
        need = aligned(nbytes)
        with self._guards_extents:
            while True:
                for i, (offset, length) in enumerate(self._free):
                    if length >= need:
                        if length == need:
                            del self._free[i]
                        else:
                            self._free[i] = (offset + need, length - need)
                        return offset
                if not self._grow(need):
                    return None

    def reserve(self, nbytes: int) -> None:
        """Have memory for ``nbytes`` in all, or for as much as the capacity allows.

        Raises:
            NoSpace: shared memory has less left; what the slab has already stays usable.
        """
        with self._guards_extents:
            target = min(self.capacity, aligned(nbytes))
            if target > self._reserved and not self._grow(target - self._reserved):
                raise NoSpace(
                    f"shared memory has no room for a slab of {format_size(target)}; "
                    f"it has {format_size(self._reserved)} already"
                )

    def _grow(self, nbytes: int) -> bool:
        nbytes = min(nbytes, self.capacity - self._reserved)
        if nbytes <= 0:
            return False
        try:
            os.posix_fallocate(self._fd, self._reserved, nbytes)
        except OSError:
            return False
        self._give_back(self._reserved, nbytes)
        self._reserved += nbytes
        return True

    def claim(self, offset: int, nbytes: int) -> bool:
        """Mark an extent as handed out, as found in a committed step; False if any of it is not free."""
        need = aligned(nbytes)
        with self._guards_extents:
            i = bisect.bisect_right(self._free, (offset, self.capacity + 1)) - 1
            if i < 0:
                return False
            start, length = self._free[i]
            if offset % ALIGNMENT or offset + need > start + length:
                return False
            rest = [(start, offset - start), (offset + need, start + length - offset - need)]
            self._free[i : i + 1] = [extent for extent in rest if extent[1]]
            return True

    def release(self, offset: int, nbytes: int) -> None:
        """Take an extent back; its bytes may be overwritten from now on."""
        with self._guards_extents:
            self._give_back(offset, aligned(nbytes))

    def _give_back(self, offset: int, length: int) -> None:
        i = bisect.bisect_left(self._free, (offset, 0))
        before = self._free[i - 1] if i else None
        after = self._free[i] if i < len(self._free) else None
        if before and before[0] + before[1] == offset:
            offset, length, i = before[0], before[1] + length, i - 1
            del self._free[i]
        if after and offset + length == after[0]:
            length += after[1]
            del self._free[i]
        self._free.insert(i, (offset, length))

    def prefault(self) -> None:
        """Map the reserved memory, so that later copies meet no page fault. Blocking; releases the GIL."""
        populate = getattr(ctypes.CDLL(None, use_errno=True), "madvise", None)
        address = self.array.ctypes.data
        while not self._closed and self._prefaulted < self._reserved:
            length = min(_PREFAULT_STRIDE, self._reserved - self._prefaulted)
            start = ctypes.c_void_p(address + self._prefaulted)
            if populate is None or populate(start, ctypes.c_size_t(length), _MADV_POPULATE_WRITE) != 0:
                return  # an old kernel: the first copies fault their pages in themselves
            self._prefaulted += length

    def close(self) -> None:
        """Unmap; views that are still alive keep the memory until they go."""
        if self._closed:
            return
        self._closed = True
        del self.array
        with contextlib.suppress(BufferError):
            self._map.close()
        os.close(self._fd)


class RamStore:
    """A blob store over a shared-memory folder and its slab.

    Small objects are files of the folder; the pack ``slab_key`` is the slab. Opened by `open`, which holds
    the folder's writer lock until `close`.
    """

    def __init__(
        self, folder: Path, files: PosixStore, slab: Slab, slab_key: str, lock: int, notice: str
    ) -> None:
        self.slab = slab
        self.slab_key = slab_key
        self.notice = notice
        """What is lost against ordinary shared memory, for people; empty when nothing is."""
        self._folder = folder
        self._files = files
        self._lock = lock

    @classmethod
    def open(cls, folder: Path, capacity: int | None) -> RamStore:
        """Open or create the folder; blocking. ``capacity`` in bytes, None for an automatic one.

        An explicit capacity is reserved at once; an automatic one is grown as saves need it.

        Raises:
            Conflict: another process writes to the folder (named), or it belongs to another user.
            Invalid: the capacity is beyond the memory that this process may use.
            NoSpace: the memory cannot be reserved.
        """
        limit, source = memory_limit()
        if capacity is not None and capacity > limit:
            raise Invalid(
                f"a RAM tier of {format_size(capacity)} cannot fit: {source} is {format_size(limit)}; "
                f"choose a capacity below that, with room for the training itself"
            )
        size = aligned(capacity if capacity is not None else limit // _AUTO_SHARE_OF_MEMORY)
        _own_folder(folder.parent)
        _own_folder(folder)
        lock = _lock_folder(folder)
        try:
            slab, key, notice = _open_slab(folder, size, reserve=capacity is not None)
        except BaseException:
            os.close(lock)
            raise
        files = PosixStore(folder, survives=Survives.PROCESS, fsync=False, direct=False, follow_symlinks=True)
        return cls(folder, files, slab, key, lock, notice)

    @classmethod
    def attach(cls, folder: Path) -> RamStore:
        """Open a folder that exists, to read it beside its writer; blocking.

        Raises:
            NotFound: there is no such folder, or its slab went with its process.
        """
        found = _read_note(folder / "slab.json")
        if found is None:
            raise NotFound(f"there is no RAM tier at {folder}")
        key, size = found
        try:
            fd = os.open(folder / key, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise NotFound(f"the RAM tier at {folder} has lost its slab: {error.strerror}") from error
        files = PosixStore(folder, survives=Survives.PROCESS, fsync=False, direct=False, follow_symlinks=True)
        return cls(folder, files, Slab(fd, size, writable=False), key, -1, _notice(folder / key))

    @property
    def traits(self) -> Traits:
        return Traits(
            survives=Survives.NOTHING if self.notice else Survives.PROCESS,
            durable=False,
            atomic_put=True,
            create_only=True,
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

    def list(self, prefix: str) -> AsyncIterator[BlobInfo]:
        return self._files.list(prefix)

    async def delete(self, key: str) -> None:
        await self._files.delete(key)

    def share(self, key: str) -> int:
        """A descriptor that holds a shared lock on the object, so that what it refers to is not reused.

        Closing it ends the lock, and so does the death of the process. Raises `NotFound`.
        """
        try:
            fd = os.open(self._folder / key, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            raise NotFound(f"{self._folder / key} is gone") from None
        fcntl.flock(fd, fcntl.LOCK_SH)
        return fd

    def retire(self, key: str) -> Callable[[], bool]:
        """Remove the object at once; the returned function tells when its last reader has gone."""
        try:
            fd = os.open(self._folder / key, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return lambda: True
        os.unlink(self._folder / key)
        done = False

        def unread() -> bool:
            nonlocal done
            if not done:
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    return False
                done = True
                os.close(fd)
            return True

        return unread

    async def close(self) -> None:
        await self._files.close()
        self.slab.close()
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def remove(self) -> None:
        """Give the memory back to the system: delete the folder with all that is in it. Blocking."""
        shutil.rmtree(self._folder, ignore_errors=True)
        with contextlib.suppress(OSError):
            self._folder.parent.rmdir()


def _own_folder(path: Path) -> None:
    """Make ``path`` a folder that is ours alone; somebody else's is refused, for they could read the state."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        raise Conflict(f"{path} is not a folder of user {os.getuid()}; remove it or choose another path")
    if stat.S_IMODE(found.st_mode) & 0o077:
        path.chmod(0o700)


def _lock_folder(folder: Path) -> int:
    path = folder / "lock"
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.read(fd, 200).decode(errors="replace") or "another process"
        os.close(fd)
        raise Conflict(
            f"the RAM tier at {folder} is in use by {holder}; one store at a time may write to it"
        ) from None
    os.ftruncate(fd, 0)
    os.pwrite(fd, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
    return fd


def _open_slab(folder: Path, capacity: int, *, reserve: bool) -> tuple[Slab, str, str]:
    """The slab of the folder: the one that is there if it is of this boot and still reachable, else a new one."""
    note = folder / "slab.json"
    found = _read_note(note)
    if found is not None:
        key, size = found
        try:
            fd = os.open(folder / key, os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            fd = -1  # a memfd that went with its process
        if fd >= 0 and os.fstat(fd).st_size >= size:
            held = os.fstat(fd).st_blocks * 512
            if size < capacity and not (folder / key).is_symlink():
                os.ftruncate(fd, capacity)
                size = capacity
                _write_note(note, key, size)
            slab = Slab(fd, size, reserved=min(size, held // ALIGNMENT * ALIGNMENT))
            if reserve:
                slab.reserve(capacity)
            return slab, key, _notice(folder / key)
        if fd >= 0:
            os.close(fd)
    for stale in ("packs", "steps"):
        shutil.rmtree(folder / stale, ignore_errors=True)
    key = pack_key(new_pack_id())
    path = folder / key
    path.parent.mkdir(mode=0o700, parents=True)
    room = os.statvfs(folder)
    if room.f_bavail * room.f_frsize >= capacity:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    elif hasattr(os, "memfd_create"):
        fd = os.memfd_create("tieredckpt-slab", os.MFD_CLOEXEC)
        path.symlink_to(f"/proc/{os.getpid()}/fd/{fd}")
    else:
        raise NoSpace(f"{folder} has less than the {format_size(capacity)} of the RAM tier")
    os.ftruncate(fd, capacity)
    slab = Slab(fd, capacity)
    try:
        if reserve:
            slab.reserve(capacity)
    except NoSpace:
        slab.close()
        shutil.rmtree(folder / "packs", ignore_errors=True)
        raise
    _write_note(note, key, capacity)
    notice = _notice(path)
    if notice:
        _log.warning("%s", notice)
    return slab, key, notice


def _notice(slab_path: Path) -> str:
    if not slab_path.is_symlink():
        return ""
    room = os.statvfs(slab_path.parent)
    return (
        f"shared memory at {slab_path.parent} has {format_size(room.f_bavail * room.f_frsize)} left, too little for "
        f"the RAM tier: a memfd takes its place, and its steps end with this process; a larger /dev/shm "
        f"(docker run --shm-size) lets them survive it"
    )


def _read_note(path: Path) -> tuple[str, int] | None:
    try:
        note = json.loads(path.read_bytes())
        key, size = note["slab"], note["capacity"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    if (
        note.get("boot_id") != _boot_id()
        or not isinstance(key, str)
        or not isinstance(size, int)
        or size <= 0
    ):
        return None
    return key, size


def _write_note(path: Path, key: str, capacity: int) -> None:
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps({"slab": key, "capacity": capacity, "boot_id": _boot_id()}))
    temporary.chmod(0o600)
    temporary.replace(path)
