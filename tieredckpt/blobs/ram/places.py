"""Where the slower tiers of a configuration are, in a form that two configurations can be compared by.

Paths are compared after `os.path.realpath`, URLs by scheme, endpoint, bucket and prefix; no secret is in either.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from tieredckpt.blobs.ram.owner import Place, look_at
from tieredckpt.concurrency import left_behind_after
from tieredckpt.config import ChfsTier, KvstoreTier, PosixTier, RamTier, StoreConfig, TierConfig
from tieredckpt.config.tiers import normal
from tieredckpt.errors import TierUnavailable

__all__ = ["place_of", "places_of"]

_MEMBERS_THAT_LOCATE = ("driver", "endpoint", "base_url", "address", "bucket", "database", "path", "base", "kvstore")
"""Of a TensorStore kvstore spec; others say how it is reached, and may hold secrets."""


async def places_of(config: StoreConfig) -> dict[str, Place]:
    """By name, where the tiers are that can tell one store from another: not RAM, nor memory of this process."""
    found = await asyncio.gather(*(place_of(tier) for tier in config.tiers))
    return {tier.name: place for tier, place in zip(config.tiers, found, strict=True) if place is not None}


async def place_of(tier: TierConfig) -> Place | None:
    """Where a tier is, with what is there now; None for memory. A path that does not answer is taken by its text."""
    if isinstance(tier, RamTier):
        return None
    path = _path_of(tier)
    if path is None:
        location = _location(tier)
        return Place(location=location) if location else None
    try:
        return await left_behind_after(tier.deadline, tier.name, f"looking at {path}", look_at, path)
    except TierUnavailable:
        return Place(location=normal(path), configured=normal(path))


def _path_of(tier: PosixTier | ChfsTier | KvstoreTier) -> Path | None:
    if isinstance(tier, PosixTier):
        return tier.path
    if isinstance(tier, KvstoreTier):
        if isinstance(tier.spec, str):
            url = urlsplit(tier.spec)
            return Path(url.path) if url.scheme == "file" and url.path else None
        path = tier.spec.get("path")
        return Path(path) if tier.spec.get("driver") == "file" and isinstance(path, str) and path else None
    return None


def _location(tier: PosixTier | ChfsTier | KvstoreTier) -> str:
    if not isinstance(tier, KvstoreTier):
        return tier.location
    if isinstance(tier.spec, str):
        return "" if tier.spec.startswith("memory:") else _public_url(tier.spec)
    return "" if tier.spec.get("driver") == "memory" else json.dumps(_public(tier.spec), sort_keys=True)


def _public(spec: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: _public(value) if isinstance(value, Mapping) else _public_url(value) if isinstance(value, str) else value
        for name, value in spec.items()
        if name in _MEMBERS_THAT_LOCATE
    }


def _public_url(url: str) -> str:
    """Without a name and password before the host, and without what follows a question mark."""
    scheme, found, rest = url.partition("://")
    if not found:
        return url.rstrip("/")
    host, slash, path = rest.partition("?")[0].partition("#")[0].partition("/")
    return f"{scheme}://{host.rpartition('@')[2]}{slash}{path.rstrip('/')}"
