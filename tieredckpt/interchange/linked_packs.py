"""Hard-link the packs of a step on a local tier into another folder, so that no byte of an array is copied.

A written pack never changes, so a link keeps its bytes for good: when the store collects the pack, it removes only its
own name, and the device frees the space with the last link.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections import defaultdict
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

from msgspec import UNSET

from tieredckpt.engine.exporting.content import StepContent
from tieredckpt.errors import Corrupt
from tieredckpt.format import layout, ocdbt
from tieredckpt.format.manifest import find_record
from tieredckpt.format.ocdbt import Extent, Value

__all__ = ["ENTRY", "NO_LINK", "StoredIndex", "link", "stored_indexes"]

ENTRY = re.compile(rb"(.*)/(zarr\.json|c(?:/[0-9]+)*)", re.DOTALL)
"""Key of an entry of a zarr array: the name of the array, and the rest."""
_LARGEST_MANIFEST = 1 << 20
_LARGEST_NODES = 1 << 30
NO_LINK = frozenset(
    {errno.EXDEV, errno.EPERM, errno.EACCES, errno.EMLINK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.ENOENT}
)
"""Errors of `os.link` for files that cannot be linked: to another file system, or of another user; or if the store has
collected a pack since its index was read."""


@dataclass(frozen=True, slots=True)
class StoredIndex:
    """The index of a step in a tier's folder."""

    root: Path
    arrays: dict[bytes, dict[bytes, Value]]
    """Entries of each array that is stored whole, by the array's key and the rest of their own. Extents are relative to
    the root."""


def stored_indexes(step: StepContent) -> Iterable[StoredIndex]:
    """The index of a step on each tier that has it in local files, nearest first; damaged ones are skipped."""
    for root, folder in step.folders():
        try:
            manifest = _read(root / folder / layout.MANIFEST, _LARGEST_MANIFEST)
            path = ocdbt.read_root(manifest).path
            nodes = _read(root / path, _LARGEST_NODES)
            record = find_record(manifest, nodes, path)
            if record.serial == step.info.serial and record.derived is UNSET:  # and no lossy copy
                yield StoredIndex(root, _by_array(ocdbt.decode(manifest, nodes, path)))
        except (OSError, Corrupt):  # collected, moved or damaged; the store itself reports that
            continue


def _by_array(entries: Iterable[tuple[bytes, Value]]) -> dict[bytes, dict[bytes, Value]]:
    arrays: dict[bytes, dict[bytes, Value]] = defaultdict(dict)
    for key, value in entries:
        if (found := ENTRY.fullmatch(key)) is not None:
            arrays[found[1]][found[2]] = value
    return {key: entries for key, entries in arrays.items() if b"zarr.json" in entries}


def _read(path: Path, most: int) -> bytes:
    with path.open("rb") as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise Corrupt(f"{path} is larger than the index of any step")
    return data


def link(root: Path, extents: Collection[Extent], to: Path) -> bool:
    """Link the packs of ``extents`` into the folder ``to``, under their own names; False if that is impossible.

    Raises `Corrupt` for a pack that is shorter than the index says.
    """
    ends: dict[str, int] = {}
    for extent in extents:
        ends[extent.path] = max(ends.get(extent.path, 0), extent.offset + extent.length)
    to.mkdir()
    try:
        for path, end in ends.items():
            target = to / Path(path).name
            os.link(root / path, target, follow_symlinks=False)
            if not target.is_file() or target.is_symlink() or target.stat().st_size < end:
                raise Corrupt(f"{root / path} is no file of at least {end} bytes; verify and repair the step first")
    except OSError as error:
        shutil.rmtree(to)
        if error.errno in NO_LINK:
            return False
        raise
    return True
