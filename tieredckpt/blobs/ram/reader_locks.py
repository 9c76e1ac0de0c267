"""Removed objects of a RAM tier that are still being read: kept apart until their last reader has finished.

A reader holds a shared lock on the manifest of its step, and locks belong to files, not to names. So a removed manifest
is renamed, with its index beside it: the next writer to open the folder, even after the death of this one, finds the
memory that readers still use. One that is replaced has a second name, and beside it a good manifest and its index.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from tieredckpt.blobs.posix.files import foreign, open_regular
from tieredckpt.errors import Corrupt

__all__ = ["RETIRED", "Replaced", "Retired", "StillRead"]

RETIRED = "retired"
"""Name of the folder in that of the RAM tier."""

_MANIFEST_MAX = 1 << 20
_INDEX = ".btree"
_ANEW = ".manifest"


@dataclass(frozen=True, slots=True)
class StillRead:
    """A step that an earlier writer removed while readers still use it."""

    manifest: bytes
    index: bytes
    unread: Callable[[], bool]
    """Whether the last reader has gone."""


@dataclass(frozen=True, slots=True)
class Replaced:
    """An object that a new one is to replace while readers may still use it."""

    unread: Callable[[], bool]
    """Whether the last reader has gone."""
    note: Callable[[bytes, bytes], None]
    """Keep a new object and its index for `StillRead`, before the old one is replaced: it may be damaged. Blocks."""


class Retired:
    """The objects that were removed from one folder; its methods block."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: set[BinaryIO] = set()

    def take_away(self, key: str, index: str) -> Callable[[], bool]:
        """Remove an object at once; the returned function tells whether its last reader has gone.

        ``index`` is the key of the index of its memory, which is kept beside it while it is read; empty where there is
        none. Raises `NoSpace`, `TierUnavailable`.
        """
        path, name = self._folder / key, self._folder / RETIRED / secrets.token_hex(8)
        try:
            file = path.open("rb")
        except FileNotFoundError:
            return lambda: True
        except OSError as error:
            raise foreign(error, path, "evicted") from error
        try:
            if self._until_unread(file, path)():  # an object without readers needs no other name
                return lambda: True
            name.parent.mkdir(mode=0o700, exist_ok=True)
            if index:
                with contextlib.suppress(FileNotFoundError):
                    # First: without it the memory could not be identified.
                    os.link(self._folder / index, _index_of(name))
            path.rename(name)
        except OSError as error:
            self._files.discard(file)
            file.close()
            raise foreign(error, path, "evicted") from error
        return self._until_unread(file, name)

    def keep(self, key: str) -> Replaced:
        """Keep an object apart that is about to be replaced. Raises `NoSpace`, `TierUnavailable`."""
        path, name = self._folder / key, self._folder / RETIRED / secrets.token_hex(8)
        try:
            file = path.open("rb")
        except FileNotFoundError:  # it is lost, and nobody knows who reads by it
            return Replaced(lambda: False, lambda manifest, index: None)
        except OSError as error:
            raise foreign(error, path, "replaced") from error
        try:
            name.parent.mkdir(mode=0o700, exist_ok=True)
            os.link(path, name)
        except OSError as error:
            file.close()
            raise foreign(error, path, "replaced") from error

        def note(manifest: bytes, index: bytes) -> None:
            with contextlib.suppress(OSError):  # only the next writer would miss it
                for beside, data in ((_index_of(name), index), (name.with_suffix(_ANEW), manifest)):
                    with open(beside, "xb", opener=_private) as made:
                        made.write(data)

        return Replaced(self._until_unread(file, name), note)

    def left(self) -> list[StillRead]:
        """Evicted or replaced steps of earlier writers that are still being read; deletes the others."""
        names = sorted(name for name in (self._folder / RETIRED).glob("*") if name.is_file())
        for name in (name for name in names if name.suffix and name.with_suffix("") not in names):
            name.unlink()
        found = []
        for name in (name for name in names if not name.suffix):
            try:
                file = os.fdopen(open_regular(name, os.O_RDONLY, follow_symlinks=False), "rb")
            except (OSError, Corrupt):
                continue  # not made by this class
            unread = self._until_unread(file, name)
            if not unread():
                with contextlib.suppress(FileNotFoundError):
                    anew = name.with_suffix(_ANEW)
                    manifest = anew.read_bytes() if anew.exists() else file.read(_MANIFEST_MAX)
                    found.append(StillRead(manifest, _index_of(name).read_bytes(), unread))
        return found

    def close(self) -> None:
        while self._files:
            self._files.pop().close()

    def _until_unread(self, file: BinaryIO, name: Path) -> Callable[[], bool]:
        self._files.add(file)

        def unread() -> bool:
            if file.closed:
                return True
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
            name.unlink(missing_ok=True)
            _index_of(name).unlink(missing_ok=True)
            name.with_suffix(_ANEW).unlink(missing_ok=True)
            self._files.discard(file)
            file.close()
            return True

        return unread


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _index_of(name: Path) -> Path:
    return name.with_suffix(_INDEX)
