"""The kind of tier ``ram``: shared memory of this node. The engine opens it, once it knows whose RAM it is."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator

from tieredckpt.blobs.base import BlobStore, Survives
from tieredckpt.blobs.checkup import Check
from tieredckpt.blobs.memory import memory_limit
from tieredckpt.blobs.ram.folder import shared_memory_root
from tieredckpt.config.kinds import TierKind
from tieredckpt.config.tiers import RamTier
from tieredckpt.errors import TierUnavailable
from tieredckpt.units import format_size

__all__ = ["RAM"]


async def _open(tier: RamTier, *, read_only: bool = False) -> BlobStore:
    raise TierUnavailable(f"tier {tier.name!r}: it is not known yet whose RAM it is")


async def _checkup(tier: RamTier, nbytes: int) -> AsyncIterator[Check]:
    """Check only that RAM would fit, since RAM belongs to its trainer."""
    limit, source = memory_limit()
    if isinstance(tier.capacity, int):
        yield Check(
            "capacity", tier.capacity <= limit, f"{format_size(tier.capacity)} of {format_size(limit)}, by {source}"
        )
    folder = (tier.path or shared_memory_root()).parent
    while not folder.is_dir():
        folder = folder.parent
    usage = shutil.disk_usage(folder)
    wanted = tier.capacity if isinstance(tier.capacity, int) else 0
    detail = f"{format_size(usage.free)} free of {format_size(usage.total)} in {folder}"
    if usage.total < wanted:
        detail += "; the slab would be a memfd, whose steps end with the process"
    yield Check("shared memory", True, detail)


RAM = TierKind(
    config=RamTier,
    open=_open,
    survives=lambda tier: Survives.PROCESS,
    exists=lambda tier: False,  # it is found by its owner note
    location=lambda tier: None,
    scopes=("node",),
    medium="memory",
    tensorstore_spec=lambda tier, location: {"driver": "file", "path": location},
    checkup=_checkup,
)
