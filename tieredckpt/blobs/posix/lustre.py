"""Folders of Lustre: how packs are striped, and what its errors mean."""

from __future__ import annotations

import errno
import logging
import os
import struct
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from tieredckpt.blobs.base import ALIGNMENT
from tieredckpt.blobs.posix.paths import Folders
from tieredckpt.blobs.posix.system import SYSTEM, System
from tieredckpt.blobs.posix.transfer import BLOCK
from tieredckpt.errors import Corrupt, NoSpace, TieredCkptError, TierUnavailable
from tieredckpt.format.layout import DERIVED, PACKS
from tieredckpt.units import format_size

__all__ = ["ADVICE", "Layout", "LustreFolders", "decode_layout", "encode_layout"]

_log = logging.getLogger("tieredckpt")

_ATTRIBUTE = "lustre.lov"
_V1, _V3, _COMPOSITE = 0x0BD10BD0, 0x0BD30BD0, 0x0BD60BD0
_STRIPES = struct.Struct("=IIQQIHH")
"""``struct lov_user_md_v1`` of lustre_user.h: magic, pattern, object id and sequence, stripe size, count, offset. A
``lov_user_md_v3`` has the name of the pool behind it, 16 bytes."""
_HEADER = struct.Struct("=IIIHHHHHHQ")
"""``struct lov_comp_md_v1``: magic, size, generation, flags, number of entries, mirrors, padding."""
_ENTRY = struct.Struct("=IIQQIIIQI")
"""``struct lov_comp_md_entry_v1``: id, flags, start, end, offset and size of its stripes, generation, time, padding."""
_ANY_OST, _ALL = 0xFFFF, 0xFFFF
_EVICTED = (errno.EIO, errno.ESHUTDOWN, errno.ENODEV, errno.ENOTCONN, errno.ESTALE, errno.EINTR)
_LARGEST_BLOCK = 64 << 20

ADVICE = "4 stripes of 16 MiB suit packs of 256 MiB: striping = { count = 4, size = '16 MiB' }"


@dataclass(frozen=True, slots=True)
class Layout:
    """How the bytes of a file are spread over OSTs: ``size`` bytes on each of ``count`` in turn, of a pool if named."""

    count: int
    """-1 for all that there are; 0 for the default of the file system."""
    size: int
    """0 for the default of the file system."""
    pool: str = ""
    start: int = 0
    """Offset in the file from which on this layout applies."""

    def __str__(self) -> str:
        number = {-1: "stripes on all OSTs", 0: "the default number of stripes", 1: "1 stripe"}
        count = number.get(self.count, f"{self.count} stripes")
        size = format_size(self.size) if self.size else "the default size"
        where = f" in pool {self.pool}" if self.pool else ""
        return f"{f'from {format_size(self.start)} on ' if self.start else ''}{count} of {size}{where}"


def encode_layout(layout: Layout) -> bytes:
    """The attribute that makes ``layout`` the default of a folder."""
    magic = _V3 if layout.pool else _V1
    head = _STRIPES.pack(magic, 0, 0, 0, layout.size, layout.count & 0xFFFF, _ANY_OST)
    return head + (layout.pool.encode().ljust(16, b"\0") if layout.pool else b"")


def decode_layout(attribute: bytes) -> tuple[Layout, ...]:
    """The components of a file's or folder's layout, in order. Raises `Corrupt`."""
    try:
        (magic,) = struct.unpack_from("=I", attribute)
        if magic != _COMPOSITE:
            return (_stripes(attribute, 0),)
        entries = _HEADER.unpack_from(attribute)[4]
        found = []
        for number in range(entries):
            _, _, start, _, offset, *_ = _ENTRY.unpack_from(attribute, _HEADER.size + number * _ENTRY.size)
            found.append(_stripes(attribute[offset:], start))
        return tuple(found)
    except (struct.error, UnicodeDecodeError) as error:
        raise Corrupt(f"a Lustre layout of {len(attribute)} bytes cannot be read: {error}") from error


def _stripes(attribute: bytes, start: int) -> Layout:
    magic, _, _, _, size, count, _ = _STRIPES.unpack_from(attribute)
    if magic not in (_V1, _V3):
        raise Corrupt(f"a Lustre layout has the unknown magic {magic:#x}")
    pool = attribute[_STRIPES.size : _STRIPES.size + 16].split(b"\0")[0].decode() if magic == _V3 else ""
    return Layout(-1 if count == _ALL else count, size, pool, start)


@dataclass(slots=True)
class LustreFolders(Folders):
    """`Folders` on Lustre; new packs are striped by ``striping``, or like the folder above.

    A new folder inherits the layout of the one above; an existing folder gets it before a pack is put there.
    """

    over_network: ClassVar[bool] = True
    striping: Layout | None = None
    writes: bool = True
    """Whether to set the layout that is asked for."""
    system: System = SYSTEM
    _block: int = field(init=False, default=BLOCK)
    _refused: set[Path] = field(init=False, default_factory=set)
    """Folders on which the layout that is asked for could not be set, as those of another user."""

    def __post_init__(self) -> None:
        Folders.__post_init__(self)
        packs = self.root / PACKS
        try:
            if self.striping is not None and self.writes:
                self._make(packs)
            layout = self._layout(packs if packs.is_dir() else self.root)
        except OSError as error:
            raise self.error(error, packs, "made") from error
        if layout and 0 < layout[-1].size <= _LARGEST_BLOCK and not layout[-1].size % ALIGNMENT:
            self._block = max(BLOCK // layout[-1].size, 1) * layout[-1].size
        told = ", ".join(map(str, layout)) or "that of the file system"
        good = any(part.count == -1 or part.count > 1 for part in layout)
        self.facts["layout of packs"] = told if good else f"{told}; {ADVICE}"

    @property
    def block(self) -> int:
        return self._block

    def _make_one(self, path: Path) -> None:
        Folders._make_one(self, path)
        if self.striping is not None and self._is_of_packs(path):
            self._stripe(path)

    def _complete(self, path: Path) -> None:
        Folders._complete(self, path)
        asked = self.striping is not None and (self._is_of_packs(path) or self._is_of_packs(path.parent))
        if asked and path not in self._refused and self._layout(path) != (self.striping,):
            self._stripe(path)

    def _is_of_packs(self, path: Path) -> bool:
        return path in (self.root / PACKS, self.root / DERIVED / PACKS)

    def _layout(self, folder: Path) -> tuple[Layout, ...]:
        """The layout of new files of a folder; nothing where it has none of its own, or it cannot be read."""
        try:
            return decode_layout(self.system.get_attribute(folder, _ATTRIBUTE))
        except (OSError, Corrupt):
            return ()

    def _stripe(self, folder: Path) -> None:
        layout = self.striping
        assert layout is not None
        try:
            self.system.set_attribute(folder, _ATTRIBUTE, encode_layout(layout))
            return
        except OSError as error:
            refused = error
        pool = ["-p", layout.pool] if layout.pool else []
        try:
            self.system.lfs(["setstripe", "-c", str(layout.count), "-S", str(layout.size), *pool, str(folder)])
        except (OSError, subprocess.SubprocessError) as error:
            is_first = not self._refused
            self._refused.add(folder)
            if not is_first:
                return
            said = (getattr(error, "stderr", None) or str(error)).strip()
            _log.warning("%s was not striped as %s: %s; `lfs setstripe`: %s", folder, layout, refused.strerror, said)

    def error(self, error: OSError, path: Path, doing: str) -> TieredCkptError:
        why = os.strerror(error.errno) if error.errno else str(error)
        what = f"{path} was not {doing}: {why}"
        if error.errno == errno.EDQUOT:
            return NoSpace(f"{what}; `lfs quota -h {self.root}` shows the quotas of this user, group and project")
        if error.errno == errno.ENOSPC and self._has_room():
            return NoSpace(
                f"{what}, though the file system has room: an OST is full, see `lfs df {self.root}`; evict steps, or "
                "give new packs more stripes or another pool"
            )
        if error.errno in _EVICTED:
            return TierUnavailable(
                f"{what}; a server may have evicted this client, or cannot be reached, see `lfs check servers` and the "
                "kernel's log; the client connects again by itself"
            )
        return Folders.error(self, error, path, doing)

    def _has_room(self) -> bool:
        try:
            free = os.statvfs(self.root)
        except OSError:
            return False
        return free.f_bavail * free.f_frsize >= 1 << 30
