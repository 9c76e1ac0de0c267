"""Which step a restore takes."""

from __future__ import annotations

from tieredckpt.engine.source import StepSource
from tieredckpt.engine.state import State
from tieredckpt.errors import Corrupt, NotFound, TierUnavailable
from tieredckpt.format.manifest import StepId, StepRecord
from tieredckpt.format.structure import NoneNode

__all__ = ["look_up", "look_up_whole"]


async def look_up_whole(state: State, step: int | None) -> tuple[StepId, StepRecord] | None:
    """As `look_up`, where another process has told of steps without their structure: that is read."""
    found = await look_up(state, step)
    if found is None or not isinstance(found[1].structure, NoneNode):
        return found
    async with StepSource.open(state, found[0]) as source:
        return found[0], source.index.record


async def look_up(state: State, step: int | None) -> tuple[StepId, StepRecord] | None:
    """The step of that number, or the newest; None when the store is empty. Raises as `Engine.look_up`."""
    records = state.records()
    if step is None and not records:
        silent = [tier for tier in state.tiers if tier.marker is None and tier.error is not None]
        silent = [tier for tier in silent if not (state.read_only and isinstance(tier.error, NotFound))]
        if silent:
            raise TierUnavailable(
                f"no tier that answers holds a step, and {', '.join(repr(tier.name) for tier in silent)} cannot be "
                f"read ({silent[0].error}); to start afresh all the same, take it out of the configuration"
            )
        damaged = {step: tier.name for tier in state.tiers for step in tier.damaged}
        if damaged:
            raise Corrupt(
                f"no step can be read: the commit of {max(damaged)} on tier {damaged[max(damaged)]!r}"
                + (f" and of {len(damaged) - 1} other steps are" if len(damaged) > 1 else " is")
                + " damaged; to start afresh all the same, move what is there out of the tier"
            )
        return None
    found = state.newest() if step is None else None
    found = found or state.find(step)
    return found, records[found]
