"""Which store this is, and where its slower tiers are."""

from __future__ import annotations

from dataclasses import dataclass, field

from tieredckpt.blobs.ram.owner import Place
from tieredckpt.format.manifest import StoreMarker

__all__ = ["Identity"]


@dataclass
class Identity:
    """Found out when the store is opened; see `tieredckpt.engine.opening`."""

    marker: StoreMarker | None = None
    made_up: bool = False
    """The marker is new: no tier that answered at start had one."""
    places: dict[str, Place] = field(default_factory=dict)
    """By name, where the slower tiers are, as they were looked at when the store was opened."""
    noted: dict[str, Place] = field(default_factory=dict)
    """By location, what RAM's note says of the slower tiers; at opening, of those that may not be mounted."""
