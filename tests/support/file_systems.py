"""File systems that are not here, played over folders that are."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tieredckpt.blobs.posix.kind import folder_kind
from tieredckpt.blobs.posix.system import LUSTRE, NFS, System
from tieredckpt.config import LustreTier, NfsTier, PosixTier
from tieredckpt.config.kinds import TierKind, replaced

__all__ = ["FILE_SYSTEMS", "Attributes", "kind_on", "played", "system_of"]

FILE_SYSTEMS = {"posix": 0xEF53, "nfs": NFS, "lustre": LUSTRE}
"""The kinds that are folders, and the type of file system that each is meant for."""


@dataclass
class Attributes:
    """Extended attributes of folders, as Lustre has them; new folders have those of the one above."""

    refuse: int | None = None
    """The error that setting one gets."""
    set: list[tuple[Path, bytes]] = field(default_factory=list)
    run: list[Sequence[str]] = field(default_factory=list)
    """What `lfs` was told."""

    def get(self, path: Path, name: str) -> bytes:
        assert name == "lustre.lov"
        found = dict(self.set)
        for folder in (path, *path.parents):
            if folder in found:
                return found[folder]
        raise OSError(errno.ENODATA, os.strerror(errno.ENODATA))

    def put(self, path: Path, name: str, value: bytes) -> None:
        assert name == "lustre.lov"
        assert path.is_dir()
        if self.refuse is not None:
            raise OSError(self.refuse, os.strerror(self.refuse))
        self.set.append((path, value))

    def lfs(self, arguments: Sequence[str]) -> None:
        self.run.append(arguments)


def system_of(kind: int, *, options: str = "", attributes: Attributes | None = None) -> System:
    """A system all of whose file systems are of one type."""
    attributes = attributes or Attributes()
    return System(
        type_of=lambda _: kind,
        options_of=lambda _: options,
        get_attribute=attributes.get,
        set_attribute=attributes.put,
        lfs=attributes.lfs,
    )


def kind_on(name: str, system: System) -> TierKind[Any]:
    """The kind of that name with other answers of the system."""
    kinds: dict[str, tuple[type[Any], int | None]]
    kinds = {"posix": (PosixTier, None), "nfs": (NfsTier, NFS), "lustre": (LustreTier, LUSTRE)}
    return folder_kind(*kinds[name], system)


@contextmanager
def played() -> Iterator[None]:
    """Make all folders look like NFS to tiers of kind ``nfs``, and like Lustre to those of kind ``lustre``."""
    with replaced(*(kind_on(name, system_of(found)) for name, found in FILE_SYSTEMS.items() if name != "posix")):
        yield
