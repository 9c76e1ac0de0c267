"""When a save may read the arrays of the trainer, and until when."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from tieredckpt.devices.base import Device, Stream
from tieredckpt.engine.saving.snapshot import Located, Snapshot
from tieredckpt.errors import Invalid
from tieredckpt.tree.arrays import device_view
from tieredckpt.tree.flatten import Flat

__all__ = ["Capture", "check_immutable", "made_ready"]


class Capture:
    """How one save takes the values of the arrays: here the arrays stay as they are until it has ended."""

    stall: float | None = None
    """Seconds for which the trainer waited; None if it waits for the save to end."""

    @property
    def arrays_may_change(self) -> bool:
        """Whether the arrays may have lost the values that are to be saved, so that no second copy can be made."""
        return False

    async def copied(self, snapshot: Snapshot, located: Located, *, past_ram: bool) -> None:
        """Called when all is copied; returns when the save may be committed. Raises for arrays that have changed.

        ``past_ram``: the copy is on a slower tier, which takes nothing else until the save is committed.
        """

    def ended(self, error: Exception | None) -> None:
        """The save has ended, with that error if any."""


def check_immutable(flat: Flat) -> None:
    """Raise `Invalid`, naming them, for arrays that can change after a save by reference has returned."""
    mutable = list(dict.fromkeys(leaf.array for leaf in flat.arrays if not leaf.immutable))
    if mutable:
        raise Invalid(
            f"capture='reference' needs immutable arrays, and {', '.join(map(repr, mutable[:5]))} "
            f"({len(mutable)} in all) can change; use capture='copy'"
        )


def made_ready(flat: Flat, streams: Mapping[Device, Stream]) -> Flat:
    """``flat`` with events where ``streams``, the trainer's, are now. Raises `DeviceUnavailable`."""
    if not streams:
        return flat
    devices = {found[0] for leaf in flat.arrays if (found := device_view(leaf)) is not None}
    return dataclasses.replace(flat, ready={device: streams[device].record() for device in devices & streams.keys()})
