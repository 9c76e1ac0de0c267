"""Evaluates the votes of all ranks on a save."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from tieredckpt.engine.ranks.communicator import COORDINATOR
from tieredckpt.engine.ranks.messages import Ballot
from tieredckpt.engine.ranks.reopen import is_unavailable_here
from tieredckpt.engine.state.state import State
from tieredckpt.errors import Conflict, RanksUnavailable
from tieredckpt.format.manifest import StepId
from tieredckpt.format.merging import show_ranks

__all__ = ["FailingHere", "check", "failing", "named", "not_committed"]

_LONGEST = 10
"""A failure names its tier in at most 2 to this power votes."""


class FailingHere:
    """The shared tiers that this rank cannot use, for its votes.

    A tier that failed here is named in the next votes, and in twice as many after each further failure. It proves
    little that the tier could be opened again: where the marker can be read, puts may fail.
    """

    def __init__(self, state: State) -> None:
        self._state = state
        self._seen: Counter[str] = Counter()
        self._times: Counter[str] = Counter()
        self._left: Counter[str] = Counter()

    def names(self) -> tuple[str, ...]:
        """The tiers to name in one vote."""
        found = []
        for tier in (tier for tier in self._state.tiers if tier.shared):
            name, failed = tier.name, tier.health.failed_here
            if failed > self._seen[name]:
                self._seen[name] = failed
                self._times[name] += 1
                self._left[name] = 2 ** min(self._times[name], _LONGEST)
            if self._left[name] or is_unavailable_here(tier):
                self._left[name] = max(0, self._left[name] - 1)
                found.append(name)
        return tuple(found)


def check(votes: Mapping[int, Ballot]) -> None:
    """Raise `RanksUnavailable` or `Conflict`, naming the ranks, where not all have saved the same step."""
    failures = {rank: vote.failure for rank, vote in votes.items() if vote.failure is not None}
    if failures:
        told = "; ".join(f"rank {rank}: {failure.text}" for rank, failure in sorted(failures.items())[:4])
        raise RanksUnavailable(f"{named(failures)} not saved it ({told})", failures)
    serials = {vote.serial for vote in votes.values()}
    if len(serials) > 1:
        late = [rank for rank, vote in votes.items() if vote.serial != max(serials)]
        raise RanksUnavailable(f"{named(late)} skipped a save before; from now on all count alike again", late)
    other = [rank for rank, vote in votes.items() if vote.origin != votes[COORDINATOR].origin]
    if other:
        raise Conflict(
            f"{named(other)} not restored last what rank {COORDINATOR} has; restore is a call of all ranks: make "
            f"it on all of them again"
        )
    streamed = {vote.tier for vote in votes.values() if vote.tier is not None}
    if len(streamed) > 1:
        raise Conflict(f"the ranks have streamed it to several tiers: {', '.join(sorted(streamed))}")


def failing(votes: Mapping[int, Ballot]) -> tuple[str, ...]:
    """The shared tiers that some rank cannot use."""
    return tuple({name for vote in votes.values() for name in vote.failing})


def named(ranks: Sequence[int] | Mapping[int, object]) -> str:
    """``ranks 1, 2 have``, ``rank 3 has``."""
    return f"{show_ranks(ranks)} {'has' if len(ranks) == 1 else 'have'}"


def not_committed(step: StepId, reason: str) -> RanksUnavailable:
    return RanksUnavailable(f"{step} was not committed: {reason}; the next save is made as if this one had not been")
