"""The configuration of tiers on file systems that nodes share: NFS and Lustre."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from tieredckpt.config.tiers import FolderTier, Interval, Threads
from tieredckpt.errors import Invalid
from tieredckpt.settings import Settings
from tieredckpt.units import parse_size

__all__ = ["LustreTier", "NfsTier", "Striping"]

_STRIPE_UNIT = 64 << 10


def _stripe_size(value: object) -> int:
    nbytes = parse_size(value)
    if not 0 < nbytes < 1 << 32 or nbytes % _STRIPE_UNIT:
        raise Invalid("should be a multiple of 64 KiB, below 4 GiB")
    return nbytes


class NfsTier(FolderTier):
    """A folder on NFS."""

    kind: Literal["nfs"] = "nfs"
    survives: Literal["node", "site"] = "site"
    deadline: Interval = 90.0
    """Longer than the 60 s after which an NFS client repeats a call over TCP."""


class Striping(Settings):
    """How the bytes of each pack are spread over OSTs."""

    count: Annotated[int, Field(strict=True, ge=-1, le=2000)]
    """OSTs of a pack; -1 for all, 0 for the default of the file system."""
    size: Annotated[int, BeforeValidator(_stripe_size)] = 16 << 20
    """Bytes on one OST before the next has its turn."""
    pool: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,15}$")] | None = None
    """Name of the pool that the OSTs are of."""


class LustreTier(FolderTier):
    """A folder on Lustre."""

    kind: Literal["lustre"] = "lustre"
    survives: Literal["node", "site"] = "site"
    deadline: Interval = 150.0
    """Longer than the 100 s (``obd_timeout``) after which a client gives a server up and connects again."""
    threads: Threads = 8
    striping: Literal["inherit"] | Striping = "inherit"
    """The layout of new packs; ``inherit`` sets none."""
