"""The files that a save leaves in its folder, and how to drop a file from the page cache."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Listing", "forget", "largest_first"]


@dataclass(frozen=True, slots=True)
class Listing:
    """The regular files below a folder at one time: size by identity, which a rename keeps."""

    sizes: dict[tuple[int, int], int]

    @classmethod
    def of(cls, folder: Path) -> Listing:
        """List every file."""
        sizes: dict[tuple[int, int], int] = {}
        for _, found in _files(folder):
            sizes[found.st_ino, found.st_mtime_ns] = found.st_size
        return cls(sizes)

    def since(self, before: Listing) -> tuple[int, int]:
        """How many files are new or changed since ``before``, and their bytes."""
        new = [size for identity, size in self.sizes.items() if identity not in before.sizes]
        return len(new), sum(new)


def _files(folder: Path) -> list[tuple[Path, os.stat_result]]:
    """Every file; a file that is deleted meanwhile, such as that of a renewed lease, is left out."""
    found = []
    for where, _, names in os.walk(folder):
        for path in (Path(where, name) for name in names):
            with suppress(FileNotFoundError):
                found.append((path, path.stat()))
    return found


def largest_first(folder: Path) -> list[Path]:
    """The files below ``folder``, the largest first."""
    return [path for path, _ in sorted(_files(folder), key=lambda file: -file[1].st_size)]


def forget(folder: Path) -> None:
    """Take the files below ``folder`` out of the page cache, so that they are read from the device.

    posix_fadvise(2) drops only clean pages, so each file is synced first.
    """
    for path, _ in _files(folder):
        try:
            fd = os.open(path, os.O_RDONLY)
        except FileNotFoundError:
            continue  # a temporary file, by now
        try:
            os.fsync(fd)
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)
