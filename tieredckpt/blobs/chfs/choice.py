"""Chooses how a tier reaches CHFS: by the worker of this library, or by TensorStore's ``chfs`` driver."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any, Literal

from tieredckpt.blobs.base import BlobStore, Survives
from tieredckpt.config.tiers import LOOKALIKE, ChfsTier
from tieredckpt.errors import Invalid

__all__ = ["choose_path", "driver_spec", "open_chfs"]

STABLE_FOR = 15.0
"""Seconds for which no server may join before a new store is written, if the tier has no ``servers``."""

_CLIENT = "tieredckpt._chfs"
_LIBRARY = "libchfs_lookalike.so"  # beside it


def choose_path(tier: ChfsTier) -> tuple[Literal["worker", "tensorstore"], str]:
    """The tier's way to CHFS, and why. Raises `Invalid` if the way that it asks for is missing, or both are."""
    client = importlib.util.find_spec(_CLIENT) is not None
    if tier.via == "worker" and not client:
        raise Invalid(f"tier {tier.name!r}: via = 'worker' needs the CHFS client, and {_NO_CLIENT}")
    if tier.via == "tensorstore" and not _has_driver():
        raise Invalid(f"tier {tier.name!r}: via = 'tensorstore' needs a driver, and {_NO_DRIVER}")
    if tier.via != "auto":
        return tier.via, f"the tier says via = '{tier.via}'"
    if client:
        return "worker", "the CHFS client was built, and a worker process keeps libchfs out of this one"
    if _has_driver():
        return "tensorstore", f"TensorStore has a `chfs` driver, and {_NO_CLIENT}"
    raise Invalid(f"tier {tier.name!r}: there is no way to CHFS: {_NO_CLIENT}, and {_NO_DRIVER}")


_NO_CLIENT = "tieredckpt was installed without it; install it with a C++17 compiler, on Linux"
_NO_DRIVER = (
    "the TensorStore that is installed has no `chfs` driver; native/tensorstore tells how to build one that has"
)


async def open_chfs(tier: ChfsTier, *, read_only: bool = False) -> BlobStore:
    """The blob store of a tier, connected. Raises `Invalid`, `TierUnavailable`.

    Without ``read_only``, the store may continue with servers that joined since it was written.
    """
    survives = Survives.named(tier.survives)
    way, _ = choose_path(tier)
    if way == "tensorstore":
        from tieredckpt.blobs.kvstore.store import KvStoreBlobs  # loads tensorstore, which the worker does without

        return await KvStoreBlobs.open(driver_spec(tier), survives=survives)
    from tieredckpt.blobs.chfs.store import ChfsStore

    store = ChfsStore(
        tier.folder,
        server=tier.server or "",
        library=_library(tier),
        chunk_size=tier.chunk_size,
        threads=tier.threads,
        servers=tier.servers,
        rpc_timeout=tier.rpc_timeout,
        stable_for=_stable_for(tier),
        writes=not read_only,
        survives=survives,
    )
    try:
        await store.connect()
    except BaseException:
        await store.close()
        raise
    return store


def _library(tier: ChfsTier) -> str:
    """The path of libchfs: what the tier names, or the look-alike if its server asks for that; else empty."""
    if tier.library is not None:
        return str(tier.library)
    if not _is_lookalike(tier):
        return ""
    client = importlib.util.find_spec(_CLIENT)
    if client is not None and client.origin is not None:
        return str(Path(client.origin).with_name(_LIBRARY))
    raise Invalid(f"tier {tier.name!r}: {tier.server} needs the look-alike of CHFS, and {_NO_CLIENT}")


def _stable_for(tier: ChfsTier) -> float:
    return 0.0 if _is_lookalike(tier) else STABLE_FOR  # nothing joins a folder


def _is_lookalike(tier: ChfsTier) -> bool:
    return tier.server is not None and tier.server.startswith(LOOKALIKE)


def driver_spec(tier: ChfsTier) -> dict[str, Any]:
    """The TensorStore kvstore spec of a tier, for the ``chfs`` driver of ``native/tensorstore``."""
    spec: dict[str, Any] = {
        "driver": "chfs",
        "path": f"{tier.folder}/",
        "chunk_size": tier.chunk_size,
        "chfs_concurrency": {"limit": tier.threads},
    }
    members = {"server": tier.server or "", "library": _library(tier)}
    return spec | {name: value for name, value in members.items() if value}


def _has_driver() -> bool:
    import tensorstore as ts

    try:
        ts.KvStore.Spec({"driver": "chfs", "path": "/"})
    except ValueError:
        return False
    return True
