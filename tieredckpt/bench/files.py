"""What a save leaves in its folder, and how a file is made cold again."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Listing", "forget", "largest_first"]


@dataclass(frozen=True, slots=True)
class Listing:
    """The regular files below a folder at one time: size by identity, which a rename keeps."""

    sizes: dict[tuple[int, int], int]

    @classmethod
    def of(cls, folder: Path) -> Listing:
        """Look at every file; one that is deleted meanwhile is left out."""
        sizes: dict[tuple[int, int], int] = {}
        for path in _files(folder):
            try:
                found = path.stat()
            except FileNotFoundError:
                continue
            sizes[found.st_ino, found.st_mtime_ns] = found.st_size
        return cls(sizes)

    def since(self, before: Listing) -> tuple[int, int]:
        """How many files are new or changed since ``before``, and their bytes."""
        new = [size for identity, size in self.sizes.items() if identity not in before.sizes]
        return len(new), sum(new)


def _files(folder: Path) -> list[Path]:
    return [Path(where, name) for where, _, names in os.walk(folder) for name in names]


def largest_first(folder: Path) -> list[Path]:
    """The files below ``folder``, the largest first."""
    return sorted(_files(folder), key=lambda path: -path.stat().st_size)


def forget(folder: Path) -> None:
    """Take the files below ``folder`` out of the page cache, so that they are read from the device.

    posix_fadvise(2) drops clean pages alone, so each file is synced first.
    """
    for path in _files(folder):
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)
