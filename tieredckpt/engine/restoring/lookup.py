"""Which step a restore takes."""

from __future__ import annotations

import msgspec

from tieredckpt.engine.restoring.source import whole_record
from tieredckpt.engine.state.state import State
from tieredckpt.errors import Corrupt, NotFound, TierUnavailable
from tieredckpt.format.manifest import StepId, StepRecord

__all__ = ["Wanted", "look_up"]


class Wanted(msgspec.Struct, frozen=True):
    """What a caller of `restore` asks for, which all ranks must ask for alike."""

    step: int | None
    whole: bool
    """Whether all keys are wanted."""
    resume: bool | None
    """Whether the caller trains on from it; None where it did not say."""

    @property
    def to_train_on(self) -> bool:
        """Whether a save may follow that continues what is restored."""
        return self.whole and self.resume is not False


async def look_up(state: State, step: int | None) -> tuple[StepId, StepRecord] | None:
    """The step of that number, or the newest; None when the store is empty. Raises as `Together.look_up`."""
    records = state.records()
    if step is None and not records:
        silent = [tier for tier in state.tiers if tier.marker is None and tier.health.error is not None]
        silent = [tier for tier in silent if not (state.read_only and isinstance(tier.health.error, NotFound))]
        if silent:
            raise TierUnavailable(
                f"no tier that answers holds a step, and {', '.join(repr(tier.name) for tier in silent)} cannot be "
                f"read ({silent[0].health.error}); to start afresh all the same, take it out of the configuration"
            )
        damaged = {step: tier.name for tier in state.tiers for step in tier.steps.damaged}
        if damaged:
            raise Corrupt(
                f"no step can be read: the commit of {max(damaged)} on tier {damaged[max(damaged)]!r}"
                + (f" and of {len(damaged) - 1} other steps are" if len(damaged) > 1 else " is")
                + " damaged; to start afresh all the same, move what is there out of the tier"
            )
        return None
    found = (state.newest() if step is None else None) or state.find(step)
    record = await whole_record(state, found)
    # What turned out unreadable is found no more.
    return await look_up(state, step) if record is None else (found, record)
