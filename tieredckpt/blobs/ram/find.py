"""Find the RAM tiers of this user on this machine: their stores, their steps, and whether a process uses them.

A RAM tier lies at ``ROOT/<store UUID>`` or, for one of several ranks, in ``rank-N`` below that. The marker in the
folder identifies the store, whatever the folder's name: earlier versions named it after the store, or used ROOT itself.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable
from pathlib import Path

import msgspec

from tieredckpt.blobs.posix.files import open_regular, skip_unreadable
from tieredckpt.blobs.ram.folder import (
    LOCK,
    RANK_FOLDER,
    check_owner,
    folders_in,
    is_store_folder,
    unfinished_moves,
)
from tieredckpt.blobs.ram.owner import Owner, is_removed, look_at, read_owner
from tieredckpt.blobs.ram.slab_meta import has_slab, slab_bytes
from tieredckpt.errors import Conflict, Corrupt, TierUnavailable
from tieredckpt.format import layout
from tieredckpt.format.marker import StoreMarker, decode_marker

__all__ = ["FoundRam", "by_store", "find_ram", "judged", "marker_at", "store_in"]

_RANK = re.compile(rf"{RANK_FOLDER}(\d{{1,9}})(?:\.replica)?")


class FoundRam(msgspec.Struct, frozen=True, kw_only=True):
    """One RAM folder, with a slab of its own."""

    folder: str
    marker: StoreMarker
    rank: int | None
    """Rank whose parts of steps it has; None where it has whole steps."""
    owner: Owner | None
    """None for a folder of an earlier version."""
    steps: tuple[tuple[int, int], ...]
    """Serial and number of the steps that it holds, oldest first."""
    nbytes: int
    """Memory that its slab has."""
    lost: bool
    """Whether the slab is lost with its process, or with an earlier boot."""
    user: str
    """The process that uses it, for people; empty when none does."""
    modified: float
    """When its last step was committed, in seconds since the epoch; 0 without one."""
    holding: tuple[str, ...] = ()
    """Set by `judged`: noted locations that still hold the store, as far as that can be told."""
    elsewhere: tuple[str, ...] = ()
    """Set by `judged`: noted locations where the store was seen, and another file system is now."""

    @property
    def store(self) -> str:
        return self.marker.store

    @property
    def used_at(self) -> float:
        """Time of the last opening for writing, or of the last write, in seconds since the epoch."""
        return max(self.modified, self.owner.used_at if self.owner is not None else 0.0)


def find_ram(root: Path) -> list[FoundRam]:
    """Every RAM folder of this user below a root, by path.

    Blocking; changes nothing. Raises `TierUnavailable` if no file can be opened now: what there is would be missed.
    """
    found = (_look_into(folder) for folder in _folders(root))
    return sorted((each for each in found if each is not None), key=lambda each: each.folder)


def judged(found: FoundRam) -> FoundRam:
    """Check what is at the noted locations now. Blocks as long as their file systems take.

    If a location cannot be looked at, a URL counts as still there; a path counts as gone if it is missing.
    """
    holding, elsewhere = [], []
    for place in found.owner.places if found.owner is not None else ():
        if not place.location.startswith("/"):
            holding.append(place.location)
            continue
        path = Path(place.location)
        there = None
        with contextlib.suppress(TierUnavailable):  # no file can be opened now
            there = marker_at(path)
        if there.store == found.store if there is not None else os.path.lexists(path / layout.MARKER):
            holding.append(place.location)  # also by a marker that is damaged
        elif there is None and place.seen and not is_removed(place, look_at(path)):
            elsewhere.append(place.location)
    return msgspec.structs.replace(found, holding=tuple(holding), elsewhere=tuple(elsewhere))


def by_store(found: Iterable[FoundRam]) -> dict[str, list[FoundRam]]:
    """RAM folders by the UUID of their store."""
    stores: dict[str, list[FoundRam]] = {}
    for each in found:
        stores.setdefault(each.store, []).append(each)
    return stores


def store_in(folder: Path) -> StoreMarker | None:
    """The store that owns a RAM folder: by its marker, or by its name if the marker is damaged or missing. Blocks."""
    marker = marker_at(folder)
    name = (folder.parent if _RANK.fullmatch(folder.name) else folder).name
    if is_store_folder(name) and (marker is None or not marker.owns(name)):
        return StoreMarker(store=name)
    return marker


def marker_at(folder: Path) -> StoreMarker | None:
    """The marker in a folder; None where there is none that this version reads.

    Blocking. Raises `TierUnavailable` if no file can be opened now.
    """
    with contextlib.suppress(Corrupt), skip_unreadable(folder):
        fd = open_regular(folder / layout.MARKER, os.O_RDONLY, follow_symlinks=False)
        with os.fdopen(fd, "rb") as file:
            return decode_marker(file.read(layout.MARKER_MAX + 1), str(folder))
    return None


def _folders(root: Path) -> list[Path]:
    """Folders that may be RAM tiers: the root (in earlier versions), its subfolders, and ranks' folders in these."""
    tops = [root, *folders_in(root), *unfinished_moves(root).values()]
    ranks = (path for top in tops for path in folders_in(top) if _RANK.fullmatch(path.name))
    return list(dict.fromkeys([*tops, *ranks]))


def _look_into(folder: Path) -> FoundRam | None:
    with contextlib.suppress(OSError, Conflict):  # it has just gone, or is another user's
        check_owner(folder, strictly=True)
        marker = store_in(folder)
        if marker is None:
            return None
        owner, rank = read_owner(folder), _RANK.fullmatch(folder.name)
        steps = _steps(folder)
        nbytes = slab_bytes(folder)
        return FoundRam(
            folder=str(folder),
            marker=marker,
            rank=int(rank[1]) if rank is not None else None,
            owner=owner,
            steps=tuple(sorted(steps)),
            nbytes=nbytes,
            lost=not has_slab(folder),
            user=_user(folder),
            modified=max(steps.values(), default=0.0),
        )
    return None


def _steps(folder: Path) -> dict[tuple[int, int], float]:
    """Serial and number of the committed steps, and when they were."""
    found: dict[tuple[int, int], float] = {}
    for path in folders_in(folder / layout.STEPS):
        parsed = layout.parse_step_folder(f"{layout.STEPS}{path.name}/")
        with contextlib.suppress(FileNotFoundError):
            if parsed is not None:
                found[parsed[1], parsed[0]] = (path / layout.MANIFEST).stat().st_mtime
    return found


def _user(folder: Path) -> str:
    """The process that locks a folder, from the kernel's list: taking the lock could disturb one that opens it."""
    with contextlib.suppress(ValueError), skip_unreadable(folder):
        lock = (folder / LOCK).lstat()
        held = f"{os.major(lock.st_dev):02x}:{os.minor(lock.st_dev):02x}:{lock.st_ino}"
        for line in Path("/proc/locks").read_text().splitlines():
            if held in line.split():
                return (folder / LOCK).read_text("utf-8", "replace")[:200] or "another process"
    return ""
