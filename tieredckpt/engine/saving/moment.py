"""When a save may read the arrays of the trainer, and until when."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from tieredckpt.devices.base import Device, Stream
from tieredckpt.engine.saving.snapshot import Located, Snapshot
from tieredckpt.tree.arrays import device_view
from tieredckpt.tree.flatten import Flat

__all__ = ["Moment", "made_ready"]


class Moment:
    """A save whose arrays stay as they are until it has ended."""

    def __init__(self, stall: float | None = None) -> None:
        self._stall = stall

    @property
    def stall(self) -> float | None:
        """Seconds for which the trainer waited; None if it waits for the save to end."""
        return self._stall

    @property
    def may_copy_again(self) -> bool:
        """Whether the arrays still have the values that are to be saved."""
        return True

    async def copied(self, snapshot: Snapshot, located: Located, *, past_ram: bool) -> None:
        """Called when all is copied; returns when the save may be committed. Raises for arrays that have changed.

        ``past_ram``: the copy is on a slower tier, which takes nothing else until the save is committed.
        """

    def ended(self, error: Exception | None) -> None:
        """The save has ended, with that error if any."""


def made_ready(flat: Flat, streams: Mapping[Device, Stream]) -> Flat:
    """``flat`` with events where ``streams``, the trainer's, are now. Raises `DeviceUnavailable`."""
    if not streams:
        return flat
    devices = {found[0] for leaf in flat.arrays if (found := device_view(leaf)) is not None}
    return dataclasses.replace(flat, ready={device: streams[device].record() for device in devices & streams.keys()})
