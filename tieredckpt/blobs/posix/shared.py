"""Folders of NFS and other file systems whose clients believe names and sizes for a while that others have changed.

What another node has made may be missing here for a minute, if it was looked up before: a name counts as missing only
when a listing of its folder, which asks the server, has not got it. Sizes and times are those of opened files. A call
whose answer was lost is repeated by the client and then fails, although it has happened; whether it has is looked at.
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
    """`Folders` of a network file system whose nodes all see the same names and sizes at any time."""

    __slots__ = ()
    over_network: ClassVar[bool] = True


class SharedFolders(Folders):
    """`Folders` that other nodes change too, which this one may notice later."""

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
        return self._unless_listed(path, partial(super().open, path, flags))

    def _unless_listed(self, path: Path, call: Callable[[], T], *, is_folder: bool = False) -> T:
        """The result of ``call``, which is believed that ``path`` is missing only if no listing has it."""
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
        # By name: some file systems list one twice that is replaced meanwhile.
        return {entry.name: entry for entry in entries}.values()

    def _listed(self, key: str, entry: os.DirEntry[str]) -> BlobInfo:
        # Opened, since leases are judged by their times, and what is listed has those that the client remembers.
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
            is_same = os.path.samestat(found, written)  # an inode's number may be used anew
            return is_same and (found.st_size, found.st_mtime_ns) == (written.st_size, written.st_mtime_ns)
        finally:
            os.close(fd)

    def _is_listed(self, path: Path, is_folder: bool = False) -> bool:
        """Whether a file, or a folder, is listed, and so are the folders on its way.

        The client looks names up anew after that.
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
