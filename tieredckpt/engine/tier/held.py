"""The steps that one tier holds, and who hears of their changes."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any, Self

from tieredckpt.format.manifest import StepId, StepRecord

__all__ = ["Held", "HeldSteps"]


@dataclass(frozen=True, slots=True)
class Held:
    """A step as one tier holds it."""

    record: StepRecord
    btree_key: str
    """Empty in the RAM of a rank that has no part of a step which other ranks hold."""
    whole: bool = True
    """Whether the record was read from the step, and not from a catalog, which has no structure, say."""


class HeldSteps(dict[StepId, Held]):
    """The steps that a tier holds, and which of them came or went since somebody asked.

    Changed on the engine's loop. Another thread may call `news`, but only one at a time for each listener.
    """

    def __init__(self) -> None:
        super().__init__()
        self._changed: dict[Hashable, set[StepId]] = {}
        """By listener, from its first call: of a tier that nobody asks about, nothing piles up."""

    def news(self, listener: Hashable) -> set[StepId]:
        """The steps that came, went or were replaced since the listener's last call; at the first one all."""
        if listener not in self._changed:
            self._changed[listener] = set()
            return set(self)
        changed = self._changed[listener]
        found: set[StepId] = set()
        while changed:
            found.add(changed.pop())
        return found

    def _tell(self, *steps: StepId) -> None:
        for changed in tuple(self._changed.values()):
            changed.update(steps)

    # Each tells of a change after it was made: a listener that looks in between is told once more than needed.

    def __setitem__(self, step: StepId, held: Held) -> None:
        super().__setitem__(step, held)
        self._tell(step)

    def __delitem__(self, step: StepId) -> None:
        super().__delitem__(step)
        self._tell(step)

    def pop(self, step: StepId, *default: Any) -> Any:
        found = super().pop(step, *default)
        self._tell(step)
        return found

    def popitem(self) -> tuple[StepId, Held]:
        step, held = super().popitem()
        self._tell(step)
        return step, held

    def clear(self) -> None:
        self.exchange({})

    def exchange(self, others: Mapping[StepId, Held]) -> None:
        """Hold other steps instead; one that stays is held all the while, also for another thread."""
        self.update(others)
        for step in self.keys() - others.keys():
            del self[step]

    def setdefault(self, step: StepId, held: Held) -> Held:
        if step not in self:
            self[step] = held
        return self[step]

    def update(self, *others: Any, **none: Any) -> None:
        added = dict(*others, **none)
        super().update(added)
        self._tell(*added)

    def __ior__(self, other: Any) -> Self:  # type: ignore[override, misc]  # dict has two overloads
        self.update(other)
        return self
