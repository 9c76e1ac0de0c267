"""The folder of a RAM tier: where it lies, its protection from other users, its lock, and its removal."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from tieredckpt.blobs.locks import let_go, lock_file
from tieredckpt.blobs.posix.files import skip_unreadable
from tieredckpt.errors import Conflict

__all__ = [
    "LOCK",
    "RANK_FOLDER",
    "SHARED_MEMORY_VARIABLE",
    "check_owner",
    "folders_in",
    "is_store_folder",
    "keep_earlier_versions_out",
    "locked",
    "move_in",
    "ram_root",
    "remove",
    "shared_memory_root",
    "take",
    "unfinished_moves",
]

SHARED_MEMORY_VARIABLE = "TIEREDCKPT_SHARED_MEMORY"
"""The environment variable that names another folder for RAM tiers than this user's own in ``/dev/shm``."""

RANK_FOLDER = "rank-"
"""Prefix of the name of a folder that belongs to one rank of a node."""

LOCK = "lock"

_TRIES = 100
"""How often to try to make a folder that another process removes at once."""

_MOVING = ".moving"
"""Suffix of the link from the new to the former name of a folder that is being moved to a store's."""

_UUID = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")


def shared_memory_root() -> Path:
    """The folder of this user's RAM tiers: ``TIEREDCKPT_SHARED_MEMORY`` if set, else a folder in shared memory.

    That is in ``/dev/shm`` on Linux, and in the temporary folder elsewhere.
    """
    if chosen := os.environ.get(SHARED_MEMORY_VARIABLE):
        return Path(chosen).absolute()
    base = Path("/dev/shm")
    if not base.is_dir() or not os.access(base, os.W_OK):
        base = Path(tempfile.gettempdir())
    return base / f"tieredckpt-{os.getuid()}"


def ram_root(path: Path | None) -> Path:
    """The folder with a subfolder for every store: ``path`` of the tier, else this user's."""
    return path or shared_memory_root()


def is_store_folder(name: str) -> bool:
    """Whether ``name`` is that of a store's folder: a UUID."""
    return _UUID.fullmatch(name) is not None


def folders_in(folder: Path) -> list[Path]:
    """The folders in a folder; none where it goes at this moment, or is not ours to list.

    Blocking. Raises `TierUnavailable` if no file can be opened now.
    """
    with skip_unreadable(folder):
        return [path for path in folder.iterdir() if path.is_dir() and not path.is_symlink()]
    return []


def take(folder: Path) -> int:
    """Create and lock the folder for this user alone; returns the lock's descriptor. Raises `Conflict`, `OSError`."""
    tries = 0
    while True:
        try:
            for own in (*_above(folder), folder):
                _own_folder(own)
            lock = _lock_folder(folder)
        except FileNotFoundError:  # its owner has just removed it, or nothing can be made there, as in /proc
            tries += 1
            if tries == _TRIES:
                raise
            continue
        if os.fstat(lock).st_nlink:
            return lock
        let_go(lock)


@contextlib.contextmanager
def locked(folders: Sequence[Path]) -> Iterator[None]:
    """Hold the locks of all folders meanwhile. Blocking; raises as `take`, with none held."""
    locks: list[int] = []
    try:
        locks.extend(map(take, folders))
        yield
    finally:
        for lock in locks:
            let_go(lock)


def _above(folder: Path) -> list[Path]:
    """The parent folders that belong to this library, outermost first."""
    ranks = [folder.parent] if folder.name.startswith(RANK_FOLDER) else []
    top = ranks[0] if ranks else folder
    return [top.parent, *ranks] if is_store_folder(top.name) or top.parent == shared_memory_root() else ranks


def _own_folder(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o700)
    check_owner(path, strictly=True)
    loose = stat.S_IMODE(path.lstat().st_mode) & 0o077
    if loose & 0o022 and any(path.iterdir()):
        raise _open_to_others(path)
    if loose:
        path.chmod(0o700)
    if loose & 0o022 and any(path.iterdir()):  # somebody was faster
        raise _open_to_others(path)


def check_owner(path: Path, *, strictly: bool = False) -> None:
    """Refuse a folder of another user, who could read the state or forge it; root may read any folder."""
    found = path.lstat()
    ours = found.st_uid == os.getuid() or (os.getuid() == 0 and not strictly)
    if not stat.S_ISDIR(found.st_mode) or not ours:
        raise Conflict(f"{path} is not a folder of user {os.getuid()}; remove it or choose another path")
    if not strictly and stat.S_IMODE(found.st_mode) & 0o022:
        raise _open_to_others(path)


def _open_to_others(path: Path) -> Conflict:
    return Conflict(
        f"{path} can be written to by other users, and what is in it may be theirs; remove it or choose another path"
    )


def _lock_folder(folder: Path) -> int:
    refusal = "the RAM tier at {} is in use by {}; one store at a time may write to it"
    return lock_file(folder / LOCK, partial(refusal.format, folder))


def remove(folder: Path) -> None:
    """Delete a folder that this process has locked, except the folders of ranks and stores in it. Blocking.

    The lock goes last. Another program, such as a cleanup of ``/dev/shm``, may have deleted the folder before.
    """
    mine: list[Path] = []
    with contextlib.suppress(FileNotFoundError):
        mine += (path for path in folder.iterdir() if not _is_of_others(path))
    for path in sorted(mine, key=lambda path: path.name == LOCK):
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        folder.rmdir()
        for above in reversed(_above(folder)):
            if not is_store_folder(above.name):
                _let_earlier_versions_in(above)
            above.rmdir()


# -- earlier versions, which had one folder for each name or path ---------------------------------------------


def move_in(old: Path, new: Path) -> None:
    """Move a folder of an earlier version to its new place. Blocking.

    A process that dies meanwhile leaves a link, by which `unfinished_moves` finds the rest. Raises `Conflict` when
    another process uses the folder, `OSError`.
    """
    lock = take(old)
    try:
        for own in (*_above(new), new):
            _own_folder(own)
        if old not in new.parents and not any(new.iterdir()):
            old.rename(new)  # in one step; the empty folder is replaced
            return
        link = new.with_name(new.name + _MOVING)
        with contextlib.suppress(FileExistsError):
            link.symlink_to(old)
        mine = (path for path in old.iterdir() if not _is_of_others(path))
        for path in sorted(mine, key=lambda path: path.name == LOCK):
            path.rename(new / path.name)
        link.unlink()
        with contextlib.suppress(OSError):
            old.rmdir()
    finally:
        let_go(lock)


def unfinished_moves(root: Path) -> dict[str, Path]:
    """Folders from which a dead process was moving RAM to a store's folder, by the UUID of the store.

    Blocking. Raises `TierUnavailable` if no file can be opened now.
    """
    found = {}
    with skip_unreadable(root):
        for path in root.iterdir():
            if path.suffix == _MOVING and is_store_folder(path.stem) and path.is_symlink():
                found[path.stem] = path.readlink()
    return found


def keep_earlier_versions_out(root: Path, label: str | None, store: str) -> None:
    """Stop earlier versions from using a store's RAM folder at its old place. Blocking; raises `OSError`.

    Args:
        root: where the store's folder is.
        label: the name of the folder in such versions; None where they use the root itself.
        store: the UUID.
    """
    if label is None:
        with contextlib.suppress(FileExistsError):
            (root / LOCK).mkdir(mode=0o700)  # a lock that is no file
        return
    link = root / label
    if link.is_symlink():
        link.unlink()
    with contextlib.suppress(FileExistsError):  # an existing folder: RAM of an earlier version, and of another store
        link.symlink_to(store)


def _let_earlier_versions_in(root: Path) -> None:
    for path in root.iterdir():
        if path.is_symlink() and is_store_folder(str(path.readlink())) and not path.exists():
            path.unlink()
    if all(path.name == LOCK for path in root.iterdir()) and (root / LOCK).is_dir():
        (root / LOCK).rmdir()


def _is_of_others(path: Path) -> bool:
    """Whether ``path`` is no part of a folder's RAM: it is a rank's, or a store's in a root that was one RAM once."""
    return path.name.startswith(RANK_FOLDER) or is_store_folder(path.name) or path.suffix == _MOVING
