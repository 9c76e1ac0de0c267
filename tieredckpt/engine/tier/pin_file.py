"""Pins: empty objects of a tier, one for each step that stays there until a person takes the pin away."""

from __future__ import annotations

from collections.abc import Iterable

from tieredckpt.blobs.base import BlobInfo
from tieredckpt.concurrency import whole
from tieredckpt.engine.tier.tier import Tier
from tieredckpt.format import layout
from tieredckpt.format.manifest import StepId

__all__ = ["pin", "pinned", "unpin"]


def pinned(listed: Iterable[BlobInfo]) -> set[StepId]:
    """The steps that objects pin, whether the tier has them or not."""
    found = (layout.parse_pin_key(info.key) for info in listed)
    return {StepId(serial=of[1], step=of[0]) for of in found if of is not None}


async def pin(tier: Tier, step: StepId) -> None:
    """Keep a step on a tier. Raises `NoSpace`, and as `Tier.confirm_lease`."""
    await tier.confirm_lease()
    tier.steps.pinned.add(step)  # before the put: one that fails may have happened
    await tier.store.put(step.pin_key, [b""])


async def unpin(tier: Tier, step: StepId) -> None:
    """Take a pin away, if there is one. Raises as `Tier.confirm_lease`."""
    await tier.confirm_lease(deleting=True)
    await whole(_delete(tier, step))


async def _delete(tier: Tier, step: StepId) -> None:
    await tier.store.delete(step.pin_key)
    tier.steps.pinned.discard(step)
