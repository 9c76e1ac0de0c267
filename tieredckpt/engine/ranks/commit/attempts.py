"""This rank's attempts to save steps with the others, from its call of `save` to the decision of rank 0.

Ranks may skip a save, or make it long after the others. Names keep the votes on different saves apart: an attempt is
named by the epoch of the last restore of all ranks, the step, and how often that step was saved since.
"""

from __future__ import annotations

from collections import Counter

from tieredckpt.format.manifest import StepId

__all__ = ["Attempts", "Missed"]


class Missed(Exception):
    """The other ranks have aborted this save already."""


class Attempts:
    """The attempts of one rank: to come, being copied, or voted on. Lives on the engine's loop."""

    def __init__(self) -> None:
        self._epoch = 0
        """The number of the last common restore."""
        self._saves: Counter[int] = Counter()
        """How often each step was saved since the last restore."""
        self._copying: set[str] = set()
        self._aborted: dict[str, str] = {}
        """Attempts that rank 0 has aborted before this rank voted on them, and why."""
        self.voted_for: dict[str, StepId] = {}
        """Attempts that this rank has voted for and rank 0 has not decided on, and their steps."""
        self.voted_against: dict[str, int] = {}
        """Attempts that this rank has voted against and rank 0 has not decided on, and its serial with each."""

    def begin(self, step: int) -> str:
        """Name the attempt of a new save of ``step``. Raises `Missed` if it was aborted already."""
        attempt = f"{self._epoch}.{step}.{self._saves[step]}"
        self._saves[step] += 1
        if (reason := self._aborted.pop(attempt, None)) is not None:
            raise Missed(reason)
        self._copying.add(attempt)
        return attempt

    def begin_epoch(self, epoch: int) -> None:
        """Count the saves of each step from 0 again, as all ranks do at a restore."""
        self._epoch = epoch
        self._saves.clear()
        self._aborted = {attempt: reason for attempt, reason in self._aborted.items() if attempt in self._copying}

    def end_copy(self, attempt: str) -> str | None:
        """This rank has its part, or none; returns why the others have aborted the attempt meanwhile, if they have."""
        self._copying.discard(attempt)
        return self._aborted.pop(attempt, None)

    def abort_early(self, attempt: str, reason: str) -> None:
        """Remember that an attempt was aborted, if this rank has yet to vote on it."""
        if attempt in self._copying or self.is_to_come(attempt):
            self._aborted[attempt] = reason

    def is_to_come(self, attempt: str) -> bool:
        """Whether this rank may still begin an attempt."""
        epoch, step, nth = map(int, attempt.split("."))
        return (epoch, nth) >= (self._epoch, self._saves[step])

    def is_undecided(self, attempt: str) -> bool:
        """Whether an attempt may still become a step, as far as this rank knows."""
        return attempt in (*self._copying, *self.voted_for, *self.voted_against) or self.is_to_come(attempt)

    def open_beside(self, attempt: str) -> tuple[str, ...]:
        """The other attempts that were begun here and are not decided."""
        return tuple(other for other in (*self._copying, *self.voted_for, *self.voted_against) if other != attempt)
