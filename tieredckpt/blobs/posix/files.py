"""The files of a posix store: temporary names, opening, what the system says of them, and whether it takes direct I/O.

Everything here blocks and belongs on a thread.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path

from tieredckpt.blobs.base import ALIGNMENT, BlobInfo
from tieredckpt.blobs.posix.transfer import O_DIRECT
from tieredckpt.errors import Conflict, Corrupt, Invalid, NoSpace, NotFound, TieredCkptError, TierUnavailable

__all__ = [
    "describe",
    "foreign",
    "is_folder",
    "is_full",
    "new_temporary",
    "open_regular",
    "probe",
    "skip_unreadable",
    "sync_folder",
    "unusable",
]

_CANNOT_SYNC = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS)
"""Errors of fsync(2) of a folder on file systems without it, such as AFS, SMB and some of FUSE."""
_NOTHING_LEFT = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)
"""Errors of open(2) that say nothing of the file: this process, or the system, has no descriptor or memory for it."""


def foreign(error: OSError, path: Path, doing: str) -> TieredCkptError:
    """The error of this library for an `OSError` met while ``doing`` something (a participle) to ``path``."""
    what = f"{path} was not {doing}: {os.strerror(error.errno) if error.errno else error}"
    match error.errno:
        case errno.ENOENT | errno.ENOTDIR:
            return NotFound(f"{path} does not exist")
        case errno.ENOSPC:
            return NoSpace(f"{what}; evict steps, or give the tier more room")
        case errno.EDQUOT:
            return NoSpace(f"{what}; evict steps, or have the quota of this user, group or project raised")
        case errno.EFBIG:
            return TierUnavailable(f"{what}; raise the limit on the size of a file (`ulimit -f`, or the file system's)")
        case errno.EMFILE | errno.ENFILE:
            return TierUnavailable(f"{what}; close some, or raise their limit (`ulimit -n`, or the system's)")
        case errno.ENOMEM:
            return TierUnavailable(f"{what}; free memory of this machine, or raise the limit of this process")
        case errno.EACCES | errno.EPERM:
            may = "let this user read, write and enter what is there"
            return TierUnavailable(f"{what}; {may}, or check that the file system is mounted and healthy")
        case errno.EEXIST:
            return Conflict(f"{path} exists already")
        case errno.ELOOP:
            return Corrupt(f"{path} is a symbolic link, which this store neither writes nor follows")
        case errno.ENAMETOOLONG:
            return Invalid(what)
        case _:
            return TierUnavailable(f"{what}; check that the file system is mounted and healthy")


@contextlib.contextmanager
def skip_unreadable(path: Path) -> Iterator[None]:
    """Skip what is read in the block if ``path`` cannot be read.

    Raises `TierUnavailable` if no file can be opened now: whether ``path`` can be read is not known then.
    """
    try:
        yield
    except OSError as error:
        if error.errno in _NOTHING_LEFT:
            raise foreign(error, path, "read") from error


def is_full(error: OSError) -> bool:
    """Whether ``error`` says that a device, or a quota on it, is full."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


def unusable(error: OSError, path: Path) -> TierUnavailable:
    """The error of this library for a tier whose root ``path`` cannot be used."""
    match error.errno:
        case errno.EACCES | errno.EPERM:
            what = "let this user read, write and enter the folder, and enter those above it"
        case errno.EROFS:
            what = "mount the file system writable, or open the store with read_only=True"
        case errno.ENOTDIR | errno.EEXIST | errno.ELOOP | errno.ENOENT:
            what = "a file or a symbolic link is there, or in place of a folder above; name another path"
        case errno.ENAMETOOLONG:
            what = "name a shorter path"
        case _:
            what = "check that the file system is mounted and healthy"
    return TierUnavailable(f"{path} cannot be used as a tier: {error.strerror or error}; {what}")


def is_folder(path: Path) -> bool:
    """Whether ``path`` is a folder. Raises `OSError`, for which `Path.is_dir` returns False from Python 3.14 on."""
    try:
        return stat.S_ISDIR(os.stat(path).st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False


def new_temporary() -> str:
    """An unguessable file name that is no key."""
    return f".{secrets.token_hex(16)}.tmp~"


def open_regular(path: Path, flags: int, *, follow_symlinks: bool) -> int:
    """A descriptor of the regular file ``path``. Raises `OSError`, `Corrupt` for any other kind of file."""
    # O_NONBLOCK: opening a planted FIFO must not hang; regular files do not heed it.
    flags |= os.O_CLOEXEC | os.O_NONBLOCK | (0 if follow_symlinks else os.O_NOFOLLOW)
    fd = os.open(path, flags)
    try:
        kind = os.fstat(fd).st_mode
        if stat.S_ISDIR(kind):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
        if not stat.S_ISREG(kind):
            raise Corrupt(f"{path} is no regular file; remove it")
    except BaseException:
        os.close(fd)
        raise
    return fd


def sync_folder(path: Path) -> bool:
    """Sync the names in a folder to stable media; returns whether the file system can. Raises `OSError`."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in _CANNOT_SYNC:
            raise
        return False
    finally:
        os.close(fd)
    return True


def probe(root: Path, *, tries: bool = True) -> bool:
    """Try whether files in ``root`` take direct I/O.

    A root that is not writable, or is not to be written, counts as taking direct I/O, since a read falls back by
    itself.
    """
    if not tries:
        return bool(O_DIRECT)
    path = root / new_temporary()
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except OSError:
        return bool(O_DIRECT)
    try:
        os.close(fd)
        return _takes_direct(path)
    finally:
        with contextlib.suppress(OSError):  # `sweep` removes it then
            os.unlink(path)


def _takes_direct(path: Path) -> bool:
    if not O_DIRECT:
        return False
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | O_DIRECT)
    except OSError:
        return False
    try:
        return os.pwritev(fd, [mmap.mmap(-1, ALIGNMENT)], 0) == ALIGNMENT
    except OSError as error:
        return is_full(error)  # a full device refuses nothing else
    finally:
        os.close(fd)


def describe(key: str, path: Path | str, found: os.stat_result) -> BlobInfo:
    """The size and times of a file. Raises `OSError` for a folder or a symbolic link, `Corrupt` for other kinds."""
    if stat.S_ISREG(found.st_mode):
        return BlobInfo(key, found.st_size, found.st_mtime)
    if stat.S_ISDIR(found.st_mode):
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
    if stat.S_ISLNK(found.st_mode):
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
    raise Corrupt(f"{path} is no regular file; remove it")
