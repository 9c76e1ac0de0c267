"""``owner.json``: the note in a RAM tier's folder that identifies the owning store by the places of its other tiers.

A store is known by its UUID, but a copied folder has the same UUID, and a new store has none yet. So the note records
for every slower tier where it is, and whether the store's marker was ever seen there. The note is not trusted further:
any program with this user's rights may have written it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from pathlib import Path

import msgspec

from tieredckpt.blobs.ram.files import read_json, replace_json
from tieredckpt.format.layout import MARKER

__all__ = ["OWNER_FILES", "Owner", "Place", "is_removed", "look_at", "read_owner", "shares", "write_owner"]

_OWNER = "owner.json"
_NEW_OWNER = "owner.tmp"
_SIZE_MAX = 256 << 10

OWNER_FILES = (_OWNER, _NEW_OWNER)
"""Names that the note takes in its folder."""


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """The place of a slower tier of a store."""

    location: str
    """An absolute path after `os.path.realpath`, or a URL without secrets."""
    configured: str = ""
    """The path as configured, which is compared while its file system does not answer."""
    inode: tuple[int, int] | None = None
    """Device and inode of the store's marker there; None if it is not a file of this machine, or has several names."""
    file_system: str = ""
    """Identity of the file system, which survives another mount; empty if unknown."""
    seen: bool = False
    """Whether the store's marker was ever there; always False for a tier that does not outlive the node."""
    lasting: bool = True
    """Whether the tier outlives the node."""


class Owner(msgspec.Struct, frozen=True, kw_only=True):
    """The owner's note in a RAM folder."""

    label: str | None = None
    """The ``name`` of the store's configuration."""
    ranks: int = 1
    """How many ranks the store had."""
    places: tuple[Place, ...] = ()
    used_at: float = 0.0
    """Time at which a writer last opened it, in seconds since the epoch."""


def read_owner(folder: Path) -> Owner | None:
    """The note of a folder; None if there is no usable one, as in a folder of an earlier version.

    Blocking. Raises `TierUnavailable` if no file can be opened now.
    """
    owner = read_json(folder / _OWNER, Owner, limit=_SIZE_MAX)
    return None if owner is None else _with_paths(owner, lambda noted: os.fsdecode(noted.encode()))


def write_owner(folder: Path, owner: Owner) -> None:
    """Replace the note of a folder that is ours alone. Blocking; raises `OSError`, `UnicodeError` for no UTF-8."""
    noted = _with_paths(owner, lambda path: os.fsencode(path).decode())
    replace_json(folder / _OWNER, folder / _NEW_OWNER, noted)


def _with_paths(owner: Owner, converted: Callable[[str], str]) -> Owner:
    """``owner`` with other paths: a note has them in UTF-8, whatever encoding the names of files have in a process."""
    places = (
        msgspec.structs.replace(place, location=converted(place.location), configured=converted(place.configured))
        if place.location.startswith("/")
        else place
        for place in owner.places
    )
    return msgspec.structs.replace(owner, places=tuple(places))


def look_at(path: Path) -> Place:
    """A folder as a place, with the inode of its marker if there is one. Blocking, raises nothing."""
    real = Path(os.path.realpath(path))
    try:
        found = (real / MARKER).lstat()
    except OSError:
        inode = None
    else:
        inode = (found.st_dev, found.st_ino) if found.st_nlink == 1 else None  # else a copy has it too
    return Place(
        location=str(real),
        configured=os.path.normpath(path),
        inode=inode,
        file_system=_file_system_of(real),
        seen=inode is not None,
    )


def _file_system_of(path: Path) -> str:
    """The identity of the file system of a path, or of its nearest existing parent. Blocking.

    The ``f_fsid`` of statvfs(2), which stays when a file system is mounted again; the device number where it is 0.
    """
    for each in (path, *path.parents):
        try:
            room = os.statvfs(each)
            return f"{room.f_fsid:x}" if room.f_fsid else f"device {each.stat().st_dev:x}"
        except FileNotFoundError:
            continue
        except OSError:
            break
    return ""


def is_removed(noted: Place, now: Place) -> bool:
    """Whether a person removed a marker that was at a place and is not there any more.

    Otherwise another file system is there now: the right one is not mounted, or was replaced.
    """
    return bool(noted.file_system) and noted.file_system == now.file_system


def shares(noted: Collection[Place], ours: Collection[Place]) -> bool:
    """Whether two descriptions have a tier in common: its location, its path, or the inode of its marker."""
    names = {name for place in ours for name in (place.location, place.configured)} - {""}
    inodes = {place.inode for place in ours} - {None}
    return any(place.location in names or place.configured in names or place.inode in inodes for place in noted)
