"""A call of `save` on its way through the engine."""

from __future__ import annotations

from asyncio import AbstractEventLoop
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tieredckpt.devices.base import Device, Stream
from tieredckpt.engine.state.branch import Origin

__all__ = ["SaveCall", "Turn"]


@dataclass(frozen=True, slots=True, eq=False)
class Turn:
    """The place of a call of `save` among those of the same event loop."""

    loop: AbstractEventLoop
    """The trainer's, on which the call was made."""


@dataclass(frozen=True, slots=True)
class SaveCall:
    """A call of `save`, without the tree: a save of copies does not keep what was copied."""

    step: int
    """The trainer's number, not negative."""
    metrics: Mapping[str, float]
    """Finite or not, by name."""
    overwrite: bool
    """Whether to save a step number again that the branch has already."""
    replicated: Sequence[str]
    """Patterns of leaves that are equal on all ranks, besides those of the configuration."""
    origin: Origin | None
    """The last restore before the call."""
    at: float
    """When (monotonic) the trainer began to wait for this save."""
    streams: Mapping[Device, Stream]
    """Those on which the trainer works."""
    turn: Turn
    """It ends when the save has begun, which then tells other ranks itself how it ends."""
