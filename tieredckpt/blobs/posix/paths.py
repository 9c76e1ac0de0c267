"""The folders and names of a posix store: its root, durable folders, temporary files, publishing, listing.

Everything here blocks and belongs on a thread. A temporary name holds a ``~``, which no key may contain, so it can
neither be listed nor addressed.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import stat
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from tieredckpt.blobs.base import BlobInfo
from tieredckpt.blobs.posix.files import (
    describe,
    foreign,
    is_folder,
    new_temporary,
    open_regular,
    sync_folder,
    unusable,
)
from tieredckpt.blobs.posix.transfer import BLOCK
from tieredckpt.errors import Corrupt, NotFound, TieredCkptError, TierUnavailable

__all__ = ["KEY_PART", "Folders", "Scanned"]

_log = logging.getLogger("tieredckpt")

_TEMPORARY = re.compile(r"\.[0-9a-f]{32}\.tmp~")
KEY_PART = re.compile(r"[A-Za-z0-9._-]+")
_UNLINKED = re.compile(r"\.nfs[0-9A-Fa-f]{8,}")
"""Name that an NFS client gives to a file that was deleted while it was open, until it is closed."""

_NOT_THERE = (errno.ENOENT, errno.ENOTDIR)
_TRIES = 32
_SCAN_SECONDS = 0.05
"""Seconds for which a thread lists folders before it hands over results: handing over each alone takes longer."""


@dataclass(frozen=True, slots=True)
class Scanned:
    """The objects found in some folders."""

    infos: list[BlobInfo]
    took: float
    """Seconds."""
    worked: float
    """Seconds of processor time; the rest was spent waiting for the file system or for a processor."""


@dataclass(slots=True)
class Folders:
    """The tree of folders below ``root``; safe to use from several threads.

    The umask narrows the permissions of new files and folders, unless they are ``exact``. A missing root is made, if
    it ``makes`` one.
    """

    root: Path
    folder_mode: int
    follow_symlinks: bool
    fsync: bool
    file_mode: int = 0o600
    exact: bool = False
    makes: bool = True
    facts: dict[str, str] = field(init=False, default_factory=dict)
    """Facts for people about the file system, by name."""
    over_network: ClassVar[bool] = False
    """Whether a server may never answer a call."""
    _pruned: ClassVar[tuple[int, ...]] = (errno.ENOENT,)
    """Errors for a folder that another process removes at the moment of its use."""
    _identity: tuple[int, int] = field(init=False)
    _durable: set[Path] = field(init=False, default_factory=set)

    def __post_init__(self) -> None:
        """Make the root if it is missing. Its parents get the default mode, or the root's mode if that is exact.

        Raises `TieredCkptError`; `NotFound` where it is not to be made.
        """
        try:
            if not is_folder(self.root):
                if not self.makes:
                    raise NotFound(f"there is no folder {self.root}")
                missing = [path for path in (self.root, *self.root.parents) if not is_folder(path)]
                for path in reversed(missing):
                    if self.fsync:  # before there is anything in it: who finds the root syncs no name above it
                        self.sync(path.parent.parent)
                    try:
                        if self.exact or path == self.root:
                            self._make_one(path)
                        else:
                            os.mkdir(path)
                    except FileExistsError:
                        if not is_folder(path):
                            raise
                        self._complete(path)
            found = os.stat(self.root)
        except OSError as error:
            raise unusable(error, self.root) from error
        self._identity = (found.st_dev, found.st_ino)

    @property
    def block(self) -> int:
        """Block size of the file system, in bytes: large writes should end at its multiples."""
        return BLOCK

    def is_stale(self, error: TieredCkptError) -> bool:
        """Whether ``error`` means that the name now leads to another file than the one that was opened."""
        return False

    def sync(self, folder: Path) -> None:
        """Sync the names in a folder to stable media; warn once if that cannot be. Raises `OSError`."""
        above = folder in self.root.parents
        if above and not os.access(folder, os.W_OK):  # none of its names is of this user's making
            return
        try:
            if sync_folder(folder):
                return
            problem = "this file system cannot sync folders: a power cut may lose new files"
        except PermissionError:
            if not above:
                raise
            problem = f"{folder} may not be read, so not be synced: a power cut may lose new folders in it"
        if "names" not in self.facts:
            self.facts["names"] = problem
            _log.warning("%s: %s", self.root, problem)

    def check_root(self) -> None:
        """Raise `TierUnavailable` unless the root is the folder that was opened.

        A file system that was unmounted leaves an empty folder behind, in which everything would seem to be missing.
        """
        try:
            found = os.stat(self.root)
        except OSError as error:
            raise TierUnavailable(
                f"{self.root} has vanished ({error.strerror}); is its file system mounted?"
            ) from error
        if (found.st_dev, found.st_ino) != self._identity:
            raise TierUnavailable(f"{self.root} was replaced by another folder; is its file system mounted?")

    def check_way(self, path: Path) -> None:
        """Raise `Corrupt` if a folder between the root and ``path`` is a symbolic link: it may lead anywhere.

        ``O_NOFOLLOW`` protects only the last part of a path.
        """
        if self.follow_symlinks:
            return
        folder = str(self.root)
        for part in path.relative_to(self.root).parts[:-1]:
            folder = f"{folder}/{part}"
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                if stat.S_ISLNK(os.lstat(folder).st_mode):
                    raise Corrupt(f"{folder} is a symbolic link, which this store does not follow; remove it")

    def open(self, path: Path, flags: int) -> int:
        """As `open_regular`, for a file below the root."""
        self.check_way(path)
        return open_regular(path, flags, follow_symlinks=self.follow_symlinks)

    def error(self, error: OSError, path: Path, doing: str) -> TieredCkptError:
        """As `foreign`; but under a vanished root nothing counts as missing."""
        if error.errno in _NOT_THERE:
            try:
                self.check_root()
            except TierUnavailable as vanished:
                return vanished
        return foreign(error, path, doing)

    def create(self, path: Path, flags: int) -> tuple[Path, int]:
        """A new temporary file in the folder of ``path``, which is made, and a descriptor to write it.

        Raises `OSError`.
        """
        self.check_root()
        self.check_way(path)
        flags |= os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        left = _TRIES
        while True:
            temporary = path.parent / new_temporary()
            try:
                self._make(path.parent)
                fd = os.open(temporary, flags, self.file_mode)
                break
            except OSError as error:
                # A delete has removed a folder in between.
                left -= 1
                if error.errno not in self._pruned or not left:
                    raise
        if self.exact:
            try:
                os.fchmod(fd, self.file_mode)
            except BaseException:
                os.close(fd)
                with contextlib.suppress(OSError):
                    os.unlink(temporary)
                raise
        return temporary, fd

    def _make(self, folder: Path) -> None:
        for path in self._below_root(folder):
            try:
                self._make_one(path)
            except FileExistsError:
                if path not in self._durable:
                    self._complete(path)
                continue
            self._durable.discard(path)

    def _make_one(self, path: Path) -> None:
        os.mkdir(path, self.folder_mode)
        if self.exact:
            os.chmod(path, self.folder_mode)

    def _complete(self, path: Path) -> None:
        """Finish making a folder: its maker may have died, or the client may have repeated the call."""
        if self.exact:
            found = os.lstat(path)
            is_ours = stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()
            if is_ours and stat.S_IMODE(found.st_mode) != self.folder_mode:
                os.chmod(path, self.folder_mode)

    def _below_root(self, folder: Path) -> list[Path]:
        """``folder`` and its parents below the root, outermost first."""
        return [path for path in (*reversed(folder.parents), folder) if self.root in path.parents]

    def publish(self, temporary: Path, path: Path) -> None:
        """Give a finished file its name, durably.

        Raises `OSError`; `TierUnavailable` when the object exists but its name may not survive a crash.
        """
        self._rename(temporary, path)
        if self.fsync:
            try:
                self.sync_names(path.parent)
            except OSError as error:
                raise TierUnavailable(
                    f"{path} was written, but its folder was not synced: {error.strerror}; write it again"
                ) from error

    def _rename(self, temporary: Path, path: Path) -> None:
        os.replace(temporary, path)

    def sync_names(self, folder: Path) -> None:
        """Make the names in ``folder`` durable, and those of the folders down to it, unless they are known to be.

        The root's name is one of them: whoever made it may have died before it was synced. Raises `OSError`.
        """
        self.sync(folder)
        for path in (self.root, *self._below_root(folder)):
            if path not in self._durable:
                self.sync(path.parent)
                self._durable.add(path)

    def remove(self, path: Path) -> None:
        """Delete a file and the folders that this leaves empty. Raises `OSError`, `Corrupt`."""
        self.check_way(path)
        try:
            self._unlink(path)
        except IsADirectoryError:
            return
        except OSError as error:
            if error.errno not in _NOT_THERE:
                raise
            self.check_root()
            return
        folder = path.parent
        for empty in reversed(self._below_root(folder)):
            self._durable.discard(empty)
            try:
                os.rmdir(empty)
            except OSError:
                break
            folder = empty.parent
        if self.fsync:
            with contextlib.suppress(FileNotFoundError):
                self.sync(folder)

    def _unlink(self, path: Path) -> None:
        """Delete a file. Raises `OSError`, `IsADirectoryError` for a folder."""
        if stat.S_ISDIR(os.lstat(path).st_mode):  # some file systems unlink folders for a superuser
            raise IsADirectoryError
        os.unlink(path)

    def info(self, path: Path) -> BlobInfo:
        """Size and time of a file. Raises `OSError`, `Corrupt`."""
        self.check_way(path)
        return self._info(path)

    def _info(self, path: Path) -> BlobInfo:
        found = os.stat(path, follow_symlinks=self.follow_symlinks)
        return describe(self._key(path), path, found)

    def _key(self, path: Path) -> str:
        return path.relative_to(self.root).as_posix()

    def scan(self, pending: list[str], stopped: Callable[[], bool]) -> Scanned:
        """List some of the folders ``pending`` (``"a/b/"``): takes folders from it, and adds the subfolders found.

        Several threads may share ``pending``. Names that are not keys are skipped. Raises `OSError`, `Corrupt`,
        `TierUnavailable`.
        """
        infos: list[BlobInfo] = []
        began, worked = time.monotonic(), time.thread_time()
        first = True
        while (first or time.monotonic() < began + _SCAN_SECONDS) and not stopped():
            try:
                prefix = pending.pop()
            except IndexError:
                break
            if first:
                self.check_way(self.root / prefix / "any")
                first = False
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                for entry in self._entries(self.root / prefix):
                    name = entry.name
                    if not KEY_PART.fullmatch(name) or (name[0] == "." and _UNLINKED.fullmatch(name)):
                        continue
                    if entry.is_dir(follow_symlinks=False):
                        pending.append(f"{prefix}{name}/")
                    elif entry.is_file(follow_symlinks=self.follow_symlinks):
                        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                            infos.append(self._listed(prefix + name, entry))
        # After the scan: a listing of an unmounted file system's folder would be silently short.
        self.check_root()
        return Scanned(infos, time.monotonic() - began, time.thread_time() - worked)

    def _entries(self, folder: Path) -> Iterable[os.DirEntry[str]]:
        """The entries of a folder. Raises `OSError`, `TierUnavailable`."""
        with os.scandir(folder) as entries:
            return list(entries)

    def _listed(self, key: str, entry: os.DirEntry[str]) -> BlobInfo:
        """Size and time of a file that was just listed. Raises `OSError`, `Corrupt`."""
        return describe(key, entry.path, entry.stat(follow_symlinks=self.follow_symlinks))

    def sweep(self, age: float) -> int:
        """Remove temporary files unchanged for ``age`` seconds of the file system's own clock; returns how many.

        Raises `OSError`, `TierUnavailable`.
        """
        self.check_root()
        before = self.now() - age
        removed = 0
        for folder, _, names in os.walk(self.root):
            for name in filter(_TEMPORARY.fullmatch, names):
                stale = Path(folder, name)
                with contextlib.suppress(FileNotFoundError):
                    if os.lstat(stale).st_mtime <= before:
                        os.unlink(stale)
                        removed += 1
        return removed

    def now(self) -> float:
        """The time of the file system's own clock. Raises `OSError`."""
        clock = self.root / new_temporary()
        fd = os.open(clock, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            return os.fstat(fd).st_mtime
        finally:
            os.close(fd)
            os.unlink(clock)
