"""Writes down what the stores of this process do to files in some folders, by what they ask of the system.

The calls of the module `os` are noted as they return. What is written to a file is read back from it when it is
synced, gets its name, or, for a file that is written in place as the slab is, at every entry: so it does not
matter how it was written. What escapes the notes shows: they, applied to nothing, give the files that are there.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import aiofiles.os
import numpy as np
import pytest

from reliability.journal import FolderMade, FolderRemoved, FolderSynced, Journal, Made, Moved, Removed, Synced, Written
from reliability.system import path_of

__all__ = ["FileRecorder", "recording"]

_TEMPORARY = "~"
_PAGE = 4096


class FileRecorder:
    """Notes the changes below the folders of tiers; made by `recording`."""

    def __init__(self, journal: Journal, folders: Mapping[str, Path]) -> None:
        self._journal = journal
        self._folders = {tier: str(folder) for tier, folder in folders.items()}
        self._names: dict[tuple[str, str], int] = {}
        """The file of each name, by tier and path."""
        self._known: dict[tuple[str, int], bytes] = {}
        """The content of each file as it was last seen."""
        self._in_place: dict[tuple[str, str], None] = {}
        """Names of files that are written without being given another name, in order."""

    def look(self) -> None:
        """Note what was written to the files that are written in place."""
        with self._journal.guards_order:
            for tier, path in tuple(self._in_place):
                if (tier, path) in self._names:
                    self._look_at(tier, path)

    # -- the calls ----------------------------------------------------------------------------------------

    def open(self, call: Callable[..., int], path: Any, flags: int, *arguments: Any, **named: Any) -> int:
        place = self._place(path, named.get("dir_fd"))
        if place is None or not flags & os.O_CREAT:
            return call(path, flags, *arguments, **named)
        with self._journal.guards_order:
            self.look()
            fd = call(path, flags, *arguments, **named)
            if place not in self._names:
                self._make(*place)
                if not place[1].endswith(_TEMPORARY):
                    self._in_place[place] = None
            return fd

    def replace(self, call: Callable[..., None], old: Any, new: Any, **named: Any) -> None:
        before, after = self._place(old, None), self._place(new, None)
        if before is None or after is None:
            call(old, new, **named)
            return
        with self._journal.guards_order:
            self.look()
            if before not in self._names:
                self._make(*before)
            self._look_at(*before)
            call(old, new, **named)
            file = self._names[after] = self._names.pop(before)
            self._journal.add(Moved(after[0], before[1], after[1], file))

    def link(self, call: Callable[..., None], old: Any, new: Any, **named: Any) -> None:
        before, after = self._place(old, None), self._place(new, None)
        with self._journal.guards_order:
            call(old, new, **named)
            if before is not None and after is not None:
                self._look_at(*before)
                file = self._names[after] = self._names[before]
                self._journal.add(Made(after[0], after[1], file))

    def unlink(self, call: Callable[..., None], path: Any, **named: Any) -> None:
        place = self._place(path, named.get("dir_fd"))
        with self._journal.guards_order:
            self.look()
            call(path, **named)
            if place in self._names:
                self._journal.add(Removed(place[0], place[1], self._names.pop(place)))

    def mkdir(self, call: Callable[..., None], path: Any, *arguments: Any, **named: Any) -> None:
        place = self._place(path, named.get("dir_fd"))
        with self._journal.guards_order:
            call(path, *arguments, **named)
            if place is not None:
                self._journal.add(FolderMade(*place))

    def rmdir(self, call: Callable[..., None], path: Any, **named: Any) -> None:
        place = self._place(path, named.get("dir_fd"))
        with self._journal.guards_order:
            call(path, **named)
            if place is not None:
                self._journal.add(FolderRemoved(*place))

    def fsync(self, call: Callable[..., None], fd: int) -> None:
        place = self._place(fd, None)
        with self._journal.guards_order:
            if place in self._names:
                self._look_at(*place)
            call(fd)
            if place is not None and stat.S_ISDIR(os.fstat(fd).st_mode):
                self._journal.add(FolderSynced(*place))
            elif place in self._names:
                self._journal.add(Synced(place[0], self._names[place]))

    # -- what was changed ---------------------------------------------------------------------------------

    def _place(self, path: Any, folder: int | None) -> tuple[str, str] | None:
        """The tier of a path or descriptor, and its name there; None for what no tier has."""
        name = path_of(path, folder)
        for tier, root in self._folders.items():
            if name == root or name.startswith(f"{root}/"):
                return tier, name[len(root) + 1 :]
        return None

    def _make(self, tier: str, path: str) -> None:
        file = self._names[tier, path] = self._journal.new_file()
        self._known[tier, file] = b""
        self._journal.add(Made(tier, path, file))

    def _look_at(self, tier: str, path: str) -> None:
        file = self._names[tier, path]
        with open(os.path.join(self._folders[tier], path), "rb") as opened:
            data = opened.read()
        before = self._known[tier, file]
        if data == before:
            return
        self._known[tier, file] = data
        if len(data) != len(before):
            start = 0 if data[: len(before)] != before else len(before)
            self._journal.add(Written(tier, file, start, data[start:], len(data)))
            return
        for start, stop in _changed(before, data):
            self._journal.add(Written(tier, file, start, data[start:stop], len(data)))


def _changed(before: bytes, data: bytes) -> Iterator[tuple[int, int]]:
    """The runs of pages in which two files of the same size differ."""
    pages = range(0, len(data), _PAGE)
    differs = [before[page : page + _PAGE] != data[page : page + _PAGE] for page in pages]
    edges = np.flatnonzero(np.diff([False, *differs, False]))
    for first, last in edges.reshape(-1, 2):
        yield int(first) * _PAGE, min(int(last) * _PAGE, len(data))


@contextlib.contextmanager
def recording(journal: Journal, folders: Mapping[str, Path]) -> Iterator[FileRecorder]:
    """Note in ``journal`` what is done below ``folders``, by name of the tier, while the block runs."""
    recorder = FileRecorder(journal, folders)
    with pytest.MonkeyPatch.context() as patch:
        for name in ("open", "replace", "link", "unlink", "mkdir", "rmdir", "fsync"):
            patch.setattr(os, name, _noted(getattr(os, name), getattr(recorder, name)))
        patch.setattr(aiofiles.os, "unlink", aiofiles.os.wrap(os.unlink))  # it has bound that one by now
        yield recorder


def _noted(call: Callable[..., Any], note: Callable[..., Any]) -> Callable[..., Any]:
    def noted(*arguments: Any, **named: Any) -> Any:
        return note(call, *arguments, **named)

    return noted
