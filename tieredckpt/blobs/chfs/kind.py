"""The kind of tier ``chfs``: a parallel file system on the media of the compute nodes."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from tieredckpt.blobs.base import Survives
from tieredckpt.blobs.checkup import Check
from tieredckpt.blobs.chfs.choice import choose_path, driver_spec, open_chfs
from tieredckpt.blobs.tier_checkup import try_tier
from tieredckpt.config.kinds import TierKind
from tieredckpt.config.tiers import ChfsTier
from tieredckpt.errors import TieredCkptError

__all__ = ["CHFS"]


async def _checkup(tier: ChfsTier, nbytes: int) -> AsyncIterator[Check]:
    try:
        way, why = choose_path(tier)
    except TieredCkptError as error:
        yield Check("way", False, f"{type(error).__name__}: {error}")
        return
    yield Check("way", True, f"{way}: {why}")
    async for check in try_tier(tier, nbytes, opens_within=max(tier.deadline, tier.rpc_timeout)):
        yield check


def _spec(tier: ChfsTier, location: str) -> dict[str, Any]:
    """The driver's spec, with the folder in which the store lies now: ``location`` tells."""
    spec = driver_spec(tier)
    return {**spec, "path": location.removeprefix("chfs:")} if location.startswith("chfs:") else spec


CHFS = TierKind(
    config=ChfsTier,
    open=open_chfs,
    survives=lambda tier: Survives.named(tier.survives),
    medium="nodes",
    shares_memory=True,
    tensorstore_spec=_spec,
    checkup=_checkup,
)
