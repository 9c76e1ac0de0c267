"""A step whose parts lie in the RAM of several ranks, merged from what is known of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass

from tieredckpt.engine.tier.tier import Tier
from tieredckpt.format.manifest import StepId, StepIndex
from tieredckpt.format.ocdbt import Extent

__all__ = ["MergedRam", "Near"]

Near = Mapping[bytes, tuple[Tier, Extent]]
"""Places of chunks in the RAM of this machine, by digest."""


@dataclass(frozen=True, slots=True)
class MergedRam:
    """A step, its merged index, and its chunks in the RAM of this machine."""

    step: StepId
    tier: Tier
    """The nearest tier with an index of it."""
    index: StepIndex
    """Index of the whole step."""
    near: Callable[[], AbstractAsyncContextManager[Near]]
    """Keeps what this machine's RAM has of the step while it is read."""
