"""A real file system that shows a folder, read-only, and hangs or remembers as one over a network does.

It speaks the protocol of ``/dev/fuse`` (linux/fuse.h, version 7.31) itself, on a thread; mounting needs root.

::

    with mounted(folder, place) as network:
        network.hang()      # reads of packs are not answered ...
        network.answer()    # ... until now
"""

from __future__ import annotations

import contextlib
import ctypes
import enum
import errno
import os
import stat
import struct
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

__all__ = ["Network", "mounted"]

_IN = struct.Struct("=IIQQIIII")
_ATTRIBUTES = struct.Struct("=QQQQQQIIIIIIIIII")
_VALID = 60
"""Seconds for which the kernel believes names and sizes, those of missing names included."""
_BUFFER = (1 << 20) + 4096


class _Code(enum.IntEnum):
    LOOKUP, FORGET, GETATTR, OPEN, READ, STATFS, RELEASE, FLUSH = 1, 2, 3, 14, 15, 17, 18, 25
    INIT, OPENDIR, READDIR, RELEASEDIR, ACCESS, INTERRUPT, BATCH_FORGET = 26, 27, 28, 29, 34, 36, 42


_UNANSWERED = (_Code.FORGET, _Code.INTERRUPT, _Code.BATCH_FORGET)


class Network:
    """The folder ``source`` as the file system shows it; made by `mounted`."""

    def __init__(self, source: Path, fd: int) -> None:
        self._fd = fd
        self._paths = {1: source}
        self._files: dict[int, int] = {}
        self._guards_held = threading.Lock()
        self._held: list[tuple[int, bytes]] | None = None
        self.asked = threading.Event()
        """Set when a read hangs."""

    def hang(self) -> None:
        """Answer no read of a pack from now on."""
        with self._guards_held:
            self._held = []
            self.asked.clear()

    def answer(self) -> None:
        """Answer what was asked, and what is asked from now on."""
        with self._guards_held:
            held, self._held = self._held, None
        for unique, body in held or ():
            self._reply(unique, self._read(body))

    def serve(self) -> None:
        """Answer until the file system is unmounted."""
        while True:
            try:
                request = os.read(self._fd, _BUFFER)
            except OSError as error:
                if error.errno == errno.ENODEV:
                    return
                continue
            _, code, unique, node, *_ = _IN.unpack_from(request)
            body = request[_IN.size :]
            if code in _UNANSWERED or (code == _Code.READ and self._hold(unique, body)):
                continue
            try:
                self._reply(unique, self._answer(code, node, body))
            except OSError as error:
                self._reply(unique, b"", -(error.errno or errno.EIO))

    def _hold(self, unique: int, body: bytes) -> bool:
        (handle,) = struct.unpack_from("=Q", body)
        with self._guards_held:
            if self._held is None or not os.readlink(f"/proc/self/fd/{handle}").endswith(".pack"):
                return False
            self._held.append((unique, body))
            self.asked.set()
            return True

    def _reply(self, unique: int, data: bytes, error: int = 0) -> None:
        with contextlib.suppress(FileNotFoundError):  # of whoever was killed meanwhile
            os.write(self._fd, struct.pack("=IiQ", 16 + len(data), error, unique) + data)

    def _answer(self, code: int, node: int, body: bytes) -> bytes:
        match code:
            case _Code.INIT:
                return struct.pack("=IIIIHHIIHHI7I", 7, 31, 1 << 20, 0, 12, 9, 1 << 20, 1, 0, 0, 0, *[0] * 7)
            case _Code.LOOKUP:
                return self._look_up(self._paths[node] / os.fsdecode(body.rstrip(b"\0")))
            case _Code.GETATTR:
                return struct.pack("=QII", _VALID, 0, 0) + _attributes(os.lstat(self._paths[node]))
            case _Code.OPEN | _Code.OPENDIR:
                fd = os.open(self._paths[node], os.O_RDONLY)
                return struct.pack("=QII", fd, 0, 0)
            case _Code.READ:
                return self._read(body)
            case _Code.READDIR:
                return self._list(node, body)
            case _Code.STATFS:
                return struct.pack("=5Q4I6I", 1, 1, 1, 1, 1, 4096, 255, 4096, 0, *[0] * 6)
            case _Code.RELEASE | _Code.RELEASEDIR:
                os.close(struct.unpack_from("=Q", body)[0])
                return b""
            case _Code.FLUSH | _Code.ACCESS:
                return b""
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    def _look_up(self, path: Path) -> bytes:
        try:
            found = os.lstat(path)
        except FileNotFoundError:
            return struct.pack("=QQQQII", 0, 0, _VALID, 0, 0, 0) + bytes(_ATTRIBUTES.size)
        self._paths[found.st_ino] = path
        return struct.pack("=QQQQII", found.st_ino, 0, _VALID, _VALID, 0, 0) + _attributes(found)

    def _read(self, body: bytes) -> bytes:
        handle, offset, size = struct.unpack_from("=QQI", body)
        return os.pread(handle, size, offset)

    def _list(self, node: int, body: bytes) -> bytes:
        _, offset, size = struct.unpack_from("=QQI", body)
        found = b""
        entries = sorted(os.scandir(self._paths[node]), key=lambda entry: entry.name)
        for number, entry in list(enumerate(entries, 1))[offset:]:
            name = os.fsencode(entry.name)
            kind = (stat.S_IFDIR if entry.is_dir() else stat.S_IFREG) >> 12
            record = struct.pack("=QQII", entry.inode(), number, len(name), kind) + name
            record += bytes(-len(record) % 8)
            if len(found) + len(record) > size:
                break
            found += record
        return found


def _attributes(found: os.stat_result) -> bytes:
    times = (int(found.st_atime), int(found.st_mtime), int(found.st_ctime), 0, 0, 0)
    return _ATTRIBUTES.pack(
        found.st_ino, found.st_size, found.st_blocks, *times, found.st_mode, found.st_nlink, 0, 0, 0, 4096, 0
    )


@contextlib.contextmanager
def mounted(source: Path, place: Path) -> Iterator[Network]:
    """Show ``source`` at ``place``, a new folder, for the length of the block."""
    place.mkdir()
    try:
        fd = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        pytest.skip("needs /dev/fuse")
    libc = ctypes.CDLL(None, use_errno=True)
    options = f"fd={fd},rootmode=40000,user_id={os.getuid()},group_id={os.getgid()}"
    if libc.mount(b"network", os.fsencode(place), b"fuse", 6, options.encode()):  # neither devices nor other users
        os.close(fd)
        pytest.skip("this user may not mount a file system")
    network = Network(source, fd)
    thread = threading.Thread(target=network.serve, name="network file system")
    thread.start()
    try:
        yield network
    finally:
        network.answer()
        subprocess.run(["umount", "-l", str(place)], check=True)
        thread.join()
        os.close(fd)
