"""Questions of the folder kinds to the system: the type of a file system, extended attributes, `lfs`."""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = ["COHERENT", "LUSTRE", "NFS", "RAMFS", "SYSTEM", "TMPFS", "System", "is_local", "name_of", "nearest"]

NFS = 0x6969
LUSTRE = 0x0BD00BD0
TMPFS, RAMFS = 0x01021994, 0x858458F6
_CEPH, _GPFS, _GFS2, _OCFS2 = 0x00C36400, 0x47504653, 0x01161970, 0x7461636F
COHERENT = {LUSTRE, _CEPH, _GPFS, _GFS2, _OCFS2}
"""Types of file systems whose clients all see the same names and sizes at any time, since they ask other nodes."""
_NETWORK = {
    NFS: "NFS",
    LUSTRE: "Lustre",
    _CEPH: "CephFS",
    _GPFS: "GPFS",
    _GFS2: "GFS2",
    _OCFS2: "OCFS2",
    0x65735546: "FUSE",
    0xFF534D42: "SMB",
    0xFE534D42: "SMB",
    0x517B: "SMB",
    0x01021997: "9P",
    0x5346414F: "AFS",
    0x6B414653: "AFS",
    0x19830326: "BeeGFS",
    0x20030528: "OrangeFS",
    0xAAD7AAEA: "PanFS",
}
_LOCAL = {
    0xEF53: "ext4",
    0x58465342: "XFS",
    0x9123683E: "Btrfs",
    0x2FC12FC1: "ZFS",
    0xCA451A4E: "bcachefs",
    0xF2F52010: "F2FS",
    0x3153464A: "JFS",
    0x3434: "NILFS2",
    0x4D44: "FAT",
    0x2011BAB0: "exFAT",
    0x7366746E: "NTFS",
    TMPFS: "tmpfs",
    RAMFS: "ramfs",
    0x958458F6: "hugetlbfs",
    0x794C7630: "overlayfs",
}
"""Types of file systems that belong to one machine. An unknown type may be on a network."""
_SECONDS = 30.0


def _type_of(path: Path) -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "statfs") or os.uname().sysname != "Linux":
        return 0
    room = ctypes.create_string_buffer(512)  # struct statfs, of which f_type is the first word
    if libc.statfs(os.fsencode(path), room) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), str(path))
    return ctypes.c_long.from_buffer(room).value & 0xFFFFFFFF


def _options_of(path: Path) -> str:
    found = os.stat(path).st_dev
    device = f"{os.major(found)}:{os.minor(found)}"
    with open("/proc/self/mountinfo", errors="surrogateescape") as mounts:
        for fields in map(str.split, mounts):
            if fields[2] == device:
                return f"{fields[fields.index('-') + 1]} {fields[-1]}"
    return ""


def _get_attribute(path: Path, name: str) -> bytes:
    return os.getxattr(path, name)


def _set_attribute(path: Path, name: str, value: bytes) -> None:
    os.setxattr(path, name, value)


def _lfs(arguments: Sequence[str]) -> None:
    subprocess.run(["lfs", *arguments], check=True, capture_output=True, text=True, timeout=_SECONDS)  # noqa: S603, S607 no shell, and the site's own


@dataclass(frozen=True, slots=True)
class System:
    """Questions to the system, each a function that blocks and raises `OSError`.

    The kinds are made with one, so that a test can give the answers of a file system that is not here.
    """

    type_of: Callable[[Path], int] = _type_of
    """``f_type`` of statfs(2) of a path; 0 where the platform has none."""
    options_of: Callable[[Path], str] = _options_of
    """The type by name and the options that the file system of a path is mounted with; empty if not known."""
    get_attribute: Callable[[Path, str], bytes] = _get_attribute
    set_attribute: Callable[[Path, str, bytes], None] = _set_attribute
    lfs: Callable[[Sequence[str]], None] = _lfs
    """Run Lustre's command. Raises `subprocess.SubprocessError` too."""


SYSTEM = System()


def name_of(kind: int) -> str:
    """The name of a type of file system, for people."""
    return _NETWORK.get(kind) or _LOCAL.get(kind, f"type {kind:#x}")


def is_local(kind: int) -> bool:
    """Whether a type of file system belongs to one machine; True where the platform names none."""
    return kind == 0 or kind in _LOCAL


def nearest(path: Path) -> Path:
    """``path``, or the nearest folder above it that is there."""
    while not os.path.lexists(path) and path != path.parent:
        path = path.parent
    return path
