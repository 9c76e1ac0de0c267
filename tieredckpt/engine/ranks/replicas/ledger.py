"""At rank 0: which rank has which part in RAM, its own or a copy for another rank, and which copies are missing."""

from __future__ import annotations

from collections.abc import Sequence

from tieredckpt.engine.ranks.messages import Replicate
from tieredckpt.engine.state.state import State
from tieredckpt.engine.tier.steps import Steps
from tieredckpt.format.manifest import StepId

__all__ = ["Ledger"]


class Ledger:
    """The parts of steps that the RAM of ``size`` ranks has."""

    def __init__(self, state: State, size: int) -> None:
        self._state, self._size = state, size
        self._has: dict[StepId, dict[int, set[int]]] = {}
        """By step and part, the ranks that have it."""
        self._tried: set[StepId] = set()
        """Steps whose copies failed; the next step is tried again."""
        self._ordered = 0

    @property
    def _ram(self) -> Steps:
        return self._state.tiers[0].steps

    def note(self, step: StepId, part: int, rank: int) -> None:
        """Note that a rank has a part."""
        self._has.setdefault(step, {}).setdefault(part, set()).add(rank)

    def saved(self, step: StepId) -> None:
        """Note that a step was committed, so each rank has its own part of it."""
        held = self._ram.held  # what has left RAM is copied no more, and would pile up where no copy succeeds
        self._has = {known: has for known, has in self._has.items() if known in held}
        self._tried &= held.keys()
        for rank in range(self._size):
            self.note(step, rank, rank)

    def stays(self, step: StepId) -> bool:
        """Whether RAM here holds the step, and nobody evicts or deletes it just now."""
        return step in self._ram.held and step not in self._ram.leaving | self._state.deleting.keys()

    def missing(self, placed: Sequence[Sequence[int]], copies: int) -> Replicate | None:
        """A request for the missing copies of the newest step, if they can be made.

        ``placed`` has the ranks that shall have a copy of each part, and ``copies`` says on how many nodes that is.
        """
        held = self._ram.held
        step = max((step for step in held if self._state.on_line(step.serial) and self.stays(step)), default=None)
        if step is None or step in self._tried or held[step].record.ranks != self._size:
            return None
        has = self._has.get(step, {})
        if len(has) < self._size:
            return None  # a part is nowhere in RAM
        lacking = [
            (part, min(has[part], key=lambda rank: (rank != part, rank)), rank)
            for part, holders in enumerate(placed)
            for rank in (part, *holders)
            if rank not in has[part]
        ]
        if not lacking and self._state.membership.replicated.get(step) == copies:
            return None
        self._ordered += 1
        return Replicate(self._ordered, step.step, step.serial, tuple(lacking))

    def made(self, request: Replicate) -> None:
        """Note that all copies of a request were made, and forget what was noted of older steps."""
        step = StepId(request.serial, request.step)
        for part, _, rank in request.copies:
            self.note(step, part, rank)
        self._has = {known: has for known, has in self._has.items() if known >= step}

    def failed(self, step: StepId) -> None:
        """Note that a copy of a step could not be made."""
        self._tried.add(step)
