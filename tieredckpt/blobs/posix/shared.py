"""Folders of NFS and other file systems whose clients believe names and sizes for a while that others have changed.

What another node has made may be missing here for a minute, if it was looked up before: a name counts as missing only
when a listing of its folder, which asks the server, has not got it. Sizes and times are those of opened files. A call
whose answer was lost is repeated by the client and then fails, although it has happened; whether it has is looked at.
"""

from __future__ import annotations

import contextlib
import errno
import os
from pathlib import Path
from typing import ClassVar

from tieredckpt.blobs.base import BlobInfo
from tieredckpt.blobs.posix.files import describe
from tieredckpt.blobs.posix.paths import Folders
from tieredckpt.errors import TieredCkptError, TierUnavailable

__all__ = ["SharedFolders"]


class SharedFolders(Folders):
    """`Folders` that other nodes change too."""

    __slots__ = ()
    over_network: ClassVar[bool] = True
    # A new name that is there already was made by a call of ours that was repeated.
    _pruned: ClassVar[tuple[int, ...]] = (errno.ENOENT, errno.ESTALE, errno.EEXIST)

    def is_stale(self, error: TieredCkptError) -> bool:
        return isinstance(error.__cause__, OSError) and error.__cause__.errno == errno.ESTALE

    def open(self, path: Path, flags: int) -> int:
        # A name that was replaced leads to the old file for a while: to list its folder has the client ask the server.
        with contextlib.suppress(OSError), os.scandir(path.parent) as entries:
            next(entries, None)
        try:
            return super().open(path, flags)
        except FileNotFoundError:
            if not self._is_listed(path):
                raise
        try:
            return super().open(path, flags)
        except FileNotFoundError as error:
            if not self._is_listed(path):
                raise
            raise TierUnavailable(f"{path} is listed, and its file system does not open it yet; try again") from error

    def _info(self, path: Path) -> BlobInfo:
        fd = self.open(path, os.O_RDONLY)
        try:
            return describe(self._key(path), path, os.fstat(fd))
        finally:
            os.close(fd)

    def _listed(self, key: str, entry: os.DirEntry[str]) -> BlobInfo:
        # Opened, since leases are judged by their times, and what is listed has those that the client remembers.
        path = self.root / key
        try:
            return self._info(path)
        except PermissionError:  # a stranger's file
            return super()._listed(key, entry)
        except OSError as error:
            if error.errno != errno.ESTALE:
                raise
            return self._info(path)

    def _unlink(self, path: Path) -> None:
        try:
            super()._unlink(path)
        except FileNotFoundError:
            if not self._is_listed(path):
                raise
            os.unlink(path)

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
            return os.path.samestat(os.fstat(fd), written)
        finally:
            os.close(fd)

    def _is_listed(self, path: Path) -> bool:
        """Whether a file is listed, and so are the folders on its way. The client looks names up anew after that."""
        folder, is_folder = self.root, True
        for name in path.relative_to(self.root).parts:
            try:
                with os.scandir(folder) as entries:
                    is_folder = next(entry.is_dir(follow_symlinks=False) for entry in entries if entry.name == name)
            except (StopIteration, FileNotFoundError, NotADirectoryError):
                return False
            folder /= name
        return not is_folder

    def sweep(self, age: float) -> int:
        """As `Folders.sweep`; and remove old empty folders, which held the last names of deleted open files."""
        removed = super().sweep(age)
        before = self.now() - age
        for folder, _, _ in os.walk(self.root, topdown=False):
            if folder != str(self.root):
                with contextlib.suppress(OSError):
                    if os.lstat(folder).st_mtime <= before:
                        os.rmdir(folder)
        return removed
