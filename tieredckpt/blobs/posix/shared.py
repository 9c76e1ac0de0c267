"""Folders of NFS and other file systems whose clients cache names and sizes that other nodes have changed.

A file that another node made may seem missing here for a minute, if it was looked up before. So a name counts as
missing only if a listing of its folder, which asks the server, does not have it. Sizes and times are taken from opened
files. If the reply to a call is lost, the client repeats the call, which then fails although it has happened; the
result is checked.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import ClassVar, TypeVar

from tieredckpt.blobs.base import BlobInfo
from tieredckpt.blobs.posix.files import describe
from tieredckpt.blobs.posix.paths import KEY_PART, Folders
from tieredckpt.errors import TieredCkptError, TierUnavailable

__all__ = ["CoherentFolders", "SharedFolders"]

T = TypeVar("T")


class CoherentFolders(Folders):
    """`Folders` of a network file system on which all nodes see the same names and sizes at any time."""

    __slots__ = ()
    over_network: ClassVar[bool] = True


class SharedFolders(Folders):
    """`Folders` that other nodes change too; this node may notice the changes later."""

    __slots__ = ()
    over_network: ClassVar[bool] = True
    # If a new name exists already, our own repeated call has made it.
    _pruned: ClassVar[tuple[int, ...]] = (errno.ENOENT, errno.ESTALE, errno.EEXIST)

    def is_stale(self, error: TieredCkptError) -> bool:
        return isinstance(error.__cause__, OSError) and error.__cause__.errno == errno.ESTALE

    def open(self, path: Path, flags: int) -> int:
        # A replaced name leads to the old file for a while; listing its folder makes the client ask the server.
        with contextlib.suppress(OSError), os.scandir(path.parent) as entries:
            next(entries, None)
        return self._unless_listed(path, partial(super().open, path, flags))

    def _unless_listed(self, path: Path, call: Callable[[], T], *, is_folder: bool = False) -> T:
        """The result of ``call``; its `FileNotFoundError` is trusted only if no listing has ``path``."""
        try:
            return call()
        except FileNotFoundError:
            self.check_root()
            if not self._is_listed(path, is_folder):
                raise
        try:
            return call()
        except FileNotFoundError as error:
            if not self._is_listed(path, is_folder):
                raise
            raise TierUnavailable(f"{path} is listed, and its file system does not open it yet; try again") from error

    def _info(self, path: Path) -> BlobInfo:
        return self._described(path, self.open(path, os.O_RDONLY))

    def _described(self, path: Path, fd: int) -> BlobInfo:
        try:
            return describe(self._key(path), path, os.fstat(fd))
        finally:
            os.close(fd)

    def _entries(self, folder: Path) -> Iterable[os.DirEntry[str]]:
        entries = self._unless_listed(folder, partial(super()._entries, folder), is_folder=True)
        # By name: some file systems list a file twice if it is replaced meanwhile.
        return {entry.name: entry for entry in entries}.values()

    def _listed(self, key: str, entry: os.DirEntry[str]) -> BlobInfo:
        # Opened, since leases are judged by their times, and a listing has the times that the client caches.
        path = self.root / key
        try:
            return self._described(path, super().open(path, os.O_RDONLY))  # its folder was listed a moment ago
        except PermissionError:  # a stranger's file
            return super()._listed(key, entry)
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ESTALE):
                raise
        return self._info(path)

    def _unlink(self, path: Path) -> None:
        self._unless_listed(path, partial(super()._unlink, path))

    def _rename(self, temporary: Path, path: Path) -> None:
        written = os.stat(temporary)
        try:
            os.replace(temporary, path)
        except FileNotFoundError:
            if self._is_listed(temporary) or not self._is(path, written):
                raise

    def _is(self, path: Path, written: os.stat_result) -> bool:
        try:
            fd = self.open(path, os.O_RDONLY)
        except OSError:
            return False
        try:
            found = os.fstat(fd)
            is_same = os.path.samestat(found, written)  # an inode's number may be reused
            return is_same and (found.st_size, found.st_mtime_ns) == (written.st_size, written.st_mtime_ns)
        finally:
            os.close(fd)

    def _is_listed(self, path: Path, is_folder: bool = False) -> bool:
        """Whether a file, or a folder, is listed, and the folders on its way are.

        After that the client looks the names up again.
        """
        folder, found = self.root, True
        for name in path.relative_to(self.root).parts:
            try:
                with os.scandir(folder) as entries:
                    found = next(entry.is_dir(follow_symlinks=False) for entry in entries if entry.name == name)
            except (StopIteration, NotADirectoryError):
                return False
            except FileNotFoundError:
                return folder != self.root  # the one above lists it
            folder /= name
        return found == is_folder

    def sweep(self, age: float) -> int:
        """As `Folders.sweep`; and remove old empty folders, which held the last names of deleted open files."""
        removed = super().sweep(age)
        before = self.now() - age
        for folder, _, _ in os.walk(self.root, topdown=False):
            parts = Path(folder).relative_to(self.root).parts
            if parts and all(map(KEY_PART.fullmatch, parts)):  # others are a user's
                with contextlib.suppress(OSError):
                    if os.lstat(folder).st_mtime <= before:
                        os.rmdir(folder)
        return removed
