"""The kind of tier ``posix``: a folder."""

from __future__ import annotations

import os

from tieredckpt.blobs.base import BlobStore, Survives
from tieredckpt.concurrency import left_behind_after
from tieredckpt.config.kinds import TierKind
from tieredckpt.config.tiers import PosixTier
from tieredckpt.errors import NotFound
from tieredckpt.format.layout import MARKER

__all__ = ["POSIX"]


async def _open(tier: PosixTier, *, read_only: bool = False) -> BlobStore:
    from tieredckpt.blobs.posix.store import PosixStore

    def make() -> PosixStore:
        if read_only and not tier.path.is_dir():
            raise NotFound(f"tier {tier.name!r}: there is no folder {tier.path}")
        return PosixStore(
            tier.path,
            survives=_survives(tier),
            fsync=tier.fsync,
            direct=tier.direct,
            threads=tier.threads,
            tries=not read_only,
        )

    return await left_behind_after(tier.deadline, tier.name, f"opening {tier.path}", make)


def _survives(tier: PosixTier) -> Survives:
    return Survives.named(tier.survives)


POSIX = TierKind(
    config=PosixTier,
    open=_open,
    survives=_survives,
    exists=lambda tier: os.path.lexists(tier.path / MARKER),
    location=lambda tier: tier.path,
    transient=lambda tier: tier.model_copy(update={"fsync": False}),
    tensorstore_spec=lambda tier, location: {"driver": "file", "path": location},
)
