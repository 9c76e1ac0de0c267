"""The kinds of tier that are folders: ``posix``, ``nfs`` and ``lustre``.

Folders on NFS and Lustre get what these need, whatever the kind of the tier. The kind states where the folder is: if it
is elsewhere, since its file system is not mounted, it is not touched.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from tieredckpt.blobs.base import BlobStore, Survives
from tieredckpt.blobs.posix.files import is_folder, unusable
from tieredckpt.blobs.posix.system import (
    COHERENT,
    LUSTRE,
    NFS,
    RAMFS,
    SYSTEM,
    TMPFS,
    System,
    is_local,
    name_of,
    nearest,
)
from tieredckpt.concurrency import on_own_thread_within
from tieredckpt.config.kinds import TierKind
from tieredckpt.config.shared_tiers import LustreTier, NfsTier, Striping
from tieredckpt.config.tiers import FolderTier, PosixTier
from tieredckpt.errors import Invalid, NotFound, TierUnavailable
from tieredckpt.format.layout import DERIVED, FOLDERS, MARKER

if TYPE_CHECKING:
    from tieredckpt.blobs.posix.paths import Folders

__all__ = ["LUSTRE_KIND", "NFS_KIND", "POSIX", "folder_kind"]

C = TypeVar("C", bound=FolderTier)

_log = logging.getLogger("tieredckpt")

_OF_GROUP, _FILE_OF_GROUP = 0o2770, 0o660
_KINDS = {NFS: "nfs", LUSTRE: "lustre"}


def folder_kind(config: type[C], stated: int | None = None, system: System = SYSTEM) -> TierKind[C]:
    """A kind of tier for folders on file systems of the type ``stated``; ``system`` answers for the machine."""

    async def open_folder(tier: C, /, *, read_only: bool = False) -> BlobStore:
        make = partial(_make, tier, system, stated, read_only=read_only)
        return await on_own_thread_within(tier.deadline, tier.name, f"opening {tier.path}", make)

    return TierKind(
        config=config,
        open=open_folder,
        survives=_survives,
        exists=_exists,
        location=lambda tier: tier.path,
        transient=lambda tier: tier.model_copy(update={"fsync": False}),
        tensorstore_spec=lambda tier, location: {"driver": "file", "path": location},
    )


def _make(tier: FolderTier, system: System, stated: int | None, *, read_only: bool) -> BlobStore:
    try:
        return _made(tier, system, stated, read_only=read_only)
    except OSError as error:
        raise TierUnavailable(f"tier {tier.name!r}: {unusable(error, tier.path)}") from error


def _made(tier: FolderTier, system: System, stated: int | None, *, read_only: bool) -> BlobStore:
    """As `_make`. Raises `OSError` too."""
    from tieredckpt.blobs.posix.store import PosixStore

    found, is_there = system.type_of(nearest(tier.path)), is_folder(tier.path)
    if stated not in (None, found) and found:  # 0: this platform does not say
        raise TierUnavailable(
            f"tier {tier.name!r}: {tier.path} is on {name_of(found)}, not on {name_of(stated or 0)}; is it mounted? "
            "If the folder is meant to be there, let the tier have kind = 'posix'"
        )
    if read_only and not is_there:
        raise NotFound(f"tier {tier.name!r}: there is no folder {tier.path}")
    of_group = tier.access == "group"
    store = PosixStore(
        tier.path,
        survives=_survives(tier),
        fsync=tier.fsync,
        direct=tier.direct,
        threads=tier.threads,
        folder_mode=_OF_GROUP if of_group else 0o700,
        file_mode=_FILE_OF_GROUP if of_group else 0o600,
        folders=_folders(tier, system, found, writes=not read_only),
        facts=_facts(tier, system, found),
        tries=not read_only,
    )
    if of_group and not read_only:
        _check_group(tier)
    return store


def _check_group(tier: FolderTier) -> None:
    """Raise `Invalid` if the root, or one of the store's folders in it, is not for its group. Raises `OSError`."""
    for folder in (tier.path, *(tier.path / name for name in FOLDERS)):
        try:
            mode = folder.stat().st_mode
        except FileNotFoundError:
            continue
        if mode & _OF_GROUP != _OF_GROUP:
            raise Invalid(
                f"tier {tier.name!r}: the group of {folder} may not use it as `access = 'group'` says (its mode is "
                f"{mode & 0o7777:o}); `chgrp -R GROUP {tier.path}`, `chmod -R g+rwX {tier.path}` and "
                f"`find {tier.path} -type d -exec chmod 2770 {{}} +` let it"
            )


def _folders(tier: FolderTier, system: System, found: int, *, writes: bool) -> Callable[..., Folders]:
    from tieredckpt.blobs.posix.lustre import Layout, LustreFolders
    from tieredckpt.blobs.posix.paths import Folders
    from tieredckpt.blobs.posix.shared import CoherentFolders, SharedFolders

    exact = tier.access == "group"
    if found == LUSTRE:
        layout = None
        if isinstance(tier, LustreTier) and isinstance(tier.striping, Striping):
            layout = Layout(tier.striping.count, tier.striping.size, tier.striping.pool or "")
        return partial(LustreFolders, exact=exact, striping=layout, writes=writes, system=system)
    if is_local(found):
        return partial(Folders, exact=exact)
    return partial(CoherentFolders if found in COHERENT else SharedFolders, exact=exact)


def _facts(tier: FolderTier, system: System, found: int) -> dict[str, str]:
    """Facts for people about the tier's file system; warns of a mount that loses writes, or everything."""
    if found in (TMPFS, RAMFS):
        told = f"{name_of(found)}: a reboot loses what is here, whatever `survives` says; name a folder on a disk"
        _log.warning("tier %r: %s is on %s", tier.name, tier.path, told)
        return {"file system": told}
    if is_local(found):
        return {}
    try:
        options = system.options_of(nearest(tier.path))
    except OSError:
        options = ""
    told = f"{name_of(found)} ({options})" if options else name_of(found)
    for soft in {"soft", "softerr"} & {*options.replace(" ", ",").split(",")}:
        _log.warning(
            "tier %r: %s is mounted `%s`: the loss of a write may go unnoticed; mount it `hard`",
            tier.name,
            tier.path,
            soft,
        )
        told += f"; `{soft}` may lose writes, mount it `hard`"
    if (kind := _KINDS.get(found, tier.kind)) != tier.kind:
        told += f"; kind = {kind!r} says so, and has deadlines for it"
    return {"file system": told}


def _survives(tier: FolderTier) -> Survives:
    return Survives.named(tier.survives)


def _exists(tier: FolderTier) -> bool:
    try:
        # A client of NFS may say for a while that a name is missing.
        return MARKER in os.listdir(os.path.join(tier.path, DERIVED) if tier.lossy else tier.path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return True  # who knows


POSIX = folder_kind(PosixTier)
NFS_KIND = folder_kind(NfsTier, NFS)
LUSTRE_KIND = folder_kind(LustreTier, LUSTRE)
