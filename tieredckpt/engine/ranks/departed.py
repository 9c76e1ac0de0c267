"""Steps that have left the RAM of a rank: rank 0 is told with the next vote, for no such step is whole any more."""

from __future__ import annotations

from tieredckpt.engine.keeping.evictor import Evictor
from tieredckpt.engine.state.state import State
from tieredckpt.events import Event, StepEvicted
from tieredckpt.format.manifest import StepId

__all__ = ["Departed", "StepNumbers"]

StepNumbers = tuple[tuple[int, int], ...]
"""Serials and step numbers."""


class Departed:
    """Remembers which steps have left the RAM of this rank, until rank 0 knows. Lives on the engine's loop."""

    def __init__(self, state: State, evictor: Evictor) -> None:
        self._state = state
        self._evictor = evictor
        self._untold: list[tuple[int, int]] = []
        """Steps of this rank that rank 0 does not know of yet."""

    def note(self, event: Event) -> None:
        """Remember a step that has left this rank's RAM."""
        if isinstance(event, StepEvicted) and event.tier == self._state.tiers[0].name:
            self._untold.append((event.serial, event.step))

    def is_known(self, step: StepId) -> None:
        """Forget a step that rank 0 knows of."""
        self._untold.remove((step.serial, step.step))

    def take(self) -> StepNumbers:
        """The steps that have left since the last call, for a message to rank 0."""
        untold, self._untold = tuple(self._untold), []
        return untold

    def take_back(self, untold: StepNumbers) -> None:
        """Remember steps again that `take` returned: the message may not have come to rank 0."""
        self._untold += untold

    async def forget(self, steps: StepNumbers) -> None:
        """At rank 0: evict steps from RAM after another rank has dropped its part of them."""
        first = self._state.tiers[0]
        for serial, step in steps:
            found = StepId(serial, step)
            if first.in_memory and found in first.steps.held:
                await self._evictor.drop_with_others(found, first)
