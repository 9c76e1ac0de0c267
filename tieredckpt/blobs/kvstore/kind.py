"""The kind of tier ``kvstore``: any store that TensorStore has a driver for."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from tieredckpt._redact import without_secrets
from tieredckpt.blobs.base import BlobStore, Survives
from tieredckpt.config.kinds import TierKind
from tieredckpt.config.tiers import KvstoreTier

__all__ = ["KVSTORE"]

_log = logging.getLogger("tieredckpt")

_OBJECT_STORES = {"s3": "s3", "gcs": "gcs", "gs": "gcs"}
"""The kind of tier made for object stores, by driver or scheme."""

_MEMBERS_THAT_LOCATE = ("driver", "endpoint", "base_url", "address", "bucket", "database", "path", "base", "kvstore")
"""Members of a TensorStore kvstore spec that locate it; others say how it is reached, and may hold secrets."""


async def _open(tier: KvstoreTier, *, read_only: bool = False) -> BlobStore:
    from tieredckpt.blobs.kvstore.store import KvStoreBlobs  # loads tensorstore

    if (kind := _OBJECT_STORES.get(_driver(tier))) is not None:
        _log.warning(
            "tier %r: TensorStore's driver %r tells no sizes, so opening the store and collecting ask for each object "
            "about 30 times, and restores are slower; use kind = %r, which reads what is there already",
            *(tier.name, _driver(tier), kind),
        )
    stated = None if tier.survives is None else Survives.named(tier.survives)
    return await KvStoreBlobs.open(tier.spec, survives=stated)


def _survives(tier: KvstoreTier) -> Survives:
    """Assume that data off the nodes survives them, unless the configuration says otherwise."""
    if tier.survives is not None:
        return Survives.named(tier.survives)
    return {"memory": Survives.NOTHING, "file": Survives.NODE}.get(_driver(tier), Survives.SITE)


def _driver(tier: KvstoreTier) -> str:
    return tier.spec.partition(":")[0] if isinstance(tier.spec, str) else str(tier.spec.get("driver"))


def _location(tier: KvstoreTier) -> Path | str | None:
    match _driver(tier):
        case "memory":
            return None
        case "file":
            path = urlsplit(tier.spec).path if isinstance(tier.spec, str) else tier.spec.get("path")
            if isinstance(path, str) and path:
                return Path(path)
    return _public_url(tier.spec) if isinstance(tier.spec, str) else json.dumps(_public(tier.spec), sort_keys=True)


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


def _tensorstore_spec(tier: KvstoreTier, location: str) -> dict[str, Any]:
    import tensorstore as ts

    spec = ts.KvStore.Spec(tier.spec if isinstance(tier.spec, str) else dict(tier.spec))
    described: dict[str, Any] = without_secrets(spec.to_json())
    return described


KVSTORE = TierKind(
    config=KvstoreTier,
    open=_open,
    survives=_survives,
    location=_location,
    tensorstore_spec=_tensorstore_spec,
)
