"""The kinds of tier ``s3``, ``gcs`` and ``azure``: the objects below a prefix of a bucket."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

from tieredckpt.blobs.base import BlobStore, Survives
from tieredckpt.blobs.wrap import Deadline, Retrying
from tieredckpt.config.kinds import TierKind
from tieredckpt.config.object_tiers import AzureTier, GcsTier, ObjectTier, S3Tier
from tieredckpt.errors import Invalid, NotFound, TierUnavailable
from tieredckpt.format import layout

__all__ = ["AZURE", "GCS", "S3"]


async def _open(tier: ObjectTier, *, read_only: bool = False) -> BlobStore:
    try:
        from tieredckpt.blobs.object.client import Client
        from tieredckpt.blobs.object.probe import verdict_of
        from tieredckpt.blobs.object.store import ObjectStore
    except ImportError as error:
        raise Invalid(
            f"tier {tier.name!r} of kind {tier.kind!r} needs obstore: pip install 'tieredckpt[s3]' ({error})"
        ) from error
    client = await asyncio.to_thread(Client, tier)

    def store(*, create_only: bool) -> ObjectStore:
        return ObjectStore(
            client,
            create_only=create_only,
            survives=_survives(tier),
            object_size=tier.object_size,
            concurrency=tier.concurrency,
        )

    if read_only:
        return store(create_only=False)  # it puts nothing
    trial = store(create_only=True)
    try:
        asked = Retrying(Deadline(trial, tier.name, base=tier.deadline), attempts=tier.retries + 1)
        verdict = await verdict_of(asked, tier.service or "")
    finally:
        await trial.close()
    return store(create_only=verdict.create_only)


def _exists(tier: ObjectTier) -> bool:
    return asyncio.run(_holds_a_store(tier))


async def _holds_a_store(tier: ObjectTier) -> bool:
    try:
        store = Deadline(await _open(tier, read_only=True), tier.name, base=tier.deadline)
    except Invalid:
        return True  # opening it tells why not
    root = layout.DERIVED if tier.lossy else ""
    try:
        with suppress(NotFound):
            await store.stat(root + layout.MARKER)
            return True
        steps = await store.list_at_once(root + layout.STEPS)  # which identify the store if its marker is lost
        return steps is None or bool(steps)
    except TierUnavailable:
        return True  # who knows
    finally:
        await store.close()


def _survives(tier: ObjectTier) -> Survives:
    return Survives.named(tier.survives)


def _s3_spec(tier: S3Tier, location: str) -> dict[str, Any]:
    spec = {"driver": "s3", "bucket": tier.bucket, "path": _folder(tier)}
    given = {"endpoint": tier.service, "aws_region": tier.region}
    return {**spec, **{name: value for name, value in given.items() if value is not None}}


def _gcs_spec(tier: GcsTier, location: str) -> dict[str, Any]:
    return {"driver": "gcs", "bucket": tier.bucket, "path": _folder(tier)}


def _folder(tier: ObjectTier) -> str:
    return f"{tier.prefix}/" if tier.prefix else ""


S3 = TierKind(config=S3Tier, open=_open, survives=_survives, exists=_exists, schemes=("s3",), tensorstore_spec=_s3_spec)
GCS = TierKind(
    config=GcsTier, open=_open, survives=_survives, exists=_exists, schemes=("gs",), tensorstore_spec=_gcs_spec
)
AZURE = TierKind(config=AzureTier, open=_open, survives=_survives, exists=_exists, schemes=("az",))
"""TensorStore has no driver for Azure."""
