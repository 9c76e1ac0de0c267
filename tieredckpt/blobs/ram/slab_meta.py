"""``slab.json``: the note in a RAM tier's folder that names its slab, and a link beside the slab while it grows.

The note is used only if it is of this boot, and read without trust: a small regular file.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import msgspec

from tieredckpt.blobs.base import ALIGNMENT
from tieredckpt.blobs.boot import boot_id
from tieredckpt.blobs.mapping import give_back
from tieredckpt.blobs.posix.files import foreign
from tieredckpt.blobs.ram.files import read_json, replace_json
from tieredckpt.format.layout import parse_pack_key

__all__ = [
    "GROWING",
    "NOTE_FILES",
    "Note",
    "growing",
    "has_slab",
    "lacking_bytes",
    "read_note",
    "slab_bytes",
    "undo_growth",
    "write_note",
]

_NOTE = "slab.json"
_NEW_NOTE = "slab.tmp"
_SIZE_MAX = 4096

GROWING = ".growing"
"""Suffix of the link beside a slab that records how many bytes had memory before the slab grew.

It is a symbolic link, which takes no room in a full file system, and has the slab's name, for another slab may come.
"""

NOTE_FILES = (_NOTE, _NEW_NOTE)
"""Names that the note takes in its folder."""


class Note(msgspec.Struct, frozen=True, kw_only=True):
    """Record of a folder's slab."""

    slab: str
    """Key of the slab."""
    capacity: Annotated[int, msgspec.Meta(gt=0, le=(1 << 63) - 1, multiple_of=ALIGNMENT)]
    boot_id: str
    expected: int = 0
    """Bytes that the slab will have in all; its writer may still be reserving them."""
    memfd: int | None = None
    """The inode, if the slab is a memfd: the descriptor in its key may belong to another file by now."""


def read_note(folder: Path) -> Note | None:
    """The note of a folder; None if there is no usable one. Raises `TierUnavailable` if no file can be opened now."""
    try:
        note = read_json(folder / _NOTE, Note, limit=_SIZE_MAX)
        usable = note is not None and note.boot_id == boot_id() and parse_pack_key(note.slab) is not None
    except OSError as error:
        raise foreign(error, folder / _NOTE, "read") from error
    return note if usable else None


def slab_bytes(folder: Path, *, expected: bool = False) -> int:
    """Bytes of memory that the slab of a folder has, or with ``expected`` will have; 0 without a slab. Blocking."""
    note = read_note(folder)
    return 0 if note is None else max(_bytes_there(folder, note), note.expected if expected else 0)


def lacking_bytes(folder: Path) -> int:
    """Bytes that the slab of a folder has yet to take from the folder's file system. Blocking."""
    note = read_note(folder)
    if note is None or note.memfd is not None:
        return 0
    return max(0, note.expected - _bytes_there(folder, note))


def _bytes_there(folder: Path, note: Note) -> int:
    with contextlib.suppress(OSError):
        return (folder / note.slab).stat().st_blocks * 512
    return 0


def has_slab(folder: Path) -> bool:
    """Whether the slab of a folder exists: neither of another boot nor a memfd that has ended. Blocking."""
    note = read_note(folder)
    if note is not None:
        with contextlib.suppress(OSError):
            return (folder / note.slab).stat().st_ino == note.memfd or note.memfd is None
    return False


def write_note(folder: Path, note: Note) -> None:
    """Replace the note of a folder that is ours alone, if it says something else. Raises `OSError`, `TierUnavailable`.

    The note that is there takes no more room: others may have filled the file system.
    """
    if read_note(folder) != note:
        replace_json(folder / _NOTE, folder / _NEW_NOTE, note)


@contextlib.contextmanager
def growing(slab: Path, reserved: int) -> Iterator[None]:
    """Record, while a slab grows, that its first ``reserved`` bytes have their memory. Raises `OSError`.

    If this process dies meanwhile, only some of the bytes after these have their memory.
    """
    link = _link(slab)
    link.unlink(missing_ok=True)
    link.symlink_to(str(reserved))
    try:
        yield
    finally:
        link.unlink(missing_ok=True)


def undo_growth(slab: Path, fd: int, reserved: int) -> int:
    """Free the memory with which a dead process was growing a slab, open as ``fd``; returns the bytes that keep theirs.

    ``reserved`` is how many bytes have their memory now. Raises `OSError`.
    """
    link = _link(slab)
    with contextlib.suppress(OSError, ValueError):  # there is none, or none that this library wrote
        start = int(link.readlink().name)
        if start % ALIGNMENT == 0 and 0 <= start < reserved:
            give_back(fd, start, os.fstat(fd).st_size - start)
            reserved = start
    link.unlink(missing_ok=True)
    return reserved


def _link(slab: Path) -> Path:
    return slab.with_name(slab.name + GROWING)
