"""Reserve room on a file system before use: a full device is then an error, not half an object or a signal."""

from __future__ import annotations

import ctypes
import errno
import os

__all__ = ["check_room", "free_bytes", "reserve"]

_libc = ctypes.CDLL(None, use_errno=True)


def reserve(fd: int, nbytes: int) -> None:
    """Reserve room for a file, so that a full device is an error before the first byte is written.

    It is fallocate(2) itself, and nothing where the file system lacks it: posix_fallocate(3) would then write into
    every block, which on NFS doubles the traffic. On a local file system `check_room` comes first. Raises `OSError`.
    """
    if nbytes == 0 or not hasattr(_libc, "fallocate"):
        return
    length, start = ctypes.c_int64(nbytes), ctypes.c_int64(0)
    if _libc.fallocate(ctypes.c_int(fd), ctypes.c_int(0), start, length) != 0:
        number = ctypes.get_errno()
        if number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO):
            raise OSError(number, os.strerror(number))


def check_room(fd: int, nbytes: int) -> None:
    """Check that the file system has so much room before asking for it. Raises `OSError`.

    For a larger request than the free room, ext4 and tmpfs take all of it before they fail, and others meet a full
    device. Not for files over a network: a server or a fileset may report a quota's soft limit, which refuses nothing.
    """
    free = free_bytes(os.fstatvfs(fd))
    if free is not None and nbytes > free:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def free_bytes(found: os.statvfs_result) -> int | None:
    """The free bytes for this user by statvfs(3); None if it counts no blocks, and so has no figure."""
    return found.f_bavail * found.f_frsize if found.f_blocks else None
