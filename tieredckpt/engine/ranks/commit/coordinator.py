"""Rank 0's side of the vote on a save: it collects the votes, and commits or aborts the step.

Whatever goes wrong, it decides: all ranks wait for that.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tieredckpt.concurrency import in_thread
from tieredckpt.engine.ranks.commit import ballots
from tieredckpt.engine.ranks.commit.attempts import Attempts
from tieredckpt.engine.ranks.commit.ballot_box import BallotBox
from tieredckpt.engine.ranks.commit.compare import Comparison
from tieredckpt.engine.ranks.commit.merged import MergedStep, without_places
from tieredckpt.engine.ranks.commit.parts import merge_parts
from tieredckpt.engine.ranks.communicator import COORDINATOR
from tieredckpt.engine.ranks.departed import Departed
from tieredckpt.engine.ranks.group import Group
from tieredckpt.engine.ranks.messages import Aborted, Ballot, Committed
from tieredckpt.engine.state.state import State
from tieredckpt.engine.wire_types import Failure, brief
from tieredckpt.errors import RanksUnavailable, TieredCkptError
from tieredckpt.format.manifest import StepId
from tieredckpt.format.replicas import Difference, ReplicasDisagree, show_difference

__all__ = ["Coordinator", "Decision"]

_log = logging.getLogger("tieredckpt")

_MERGED_KEPT = 2
"""Merged steps: the one that is being promoted, and the one that was saved meanwhile."""


@dataclass(frozen=True, slots=True)
class Decision:
    """What rank 0 tells all ranks, and where they have streamed the parts of a step that RAM does not hold."""

    message: Committed | Aborted
    streamed_to: str | None = None
    parts: Mapping[int, bytes] = field(default_factory=dict)


class Coordinator:
    """Decides on the saves of all ranks; idle on ranks other than 0. Lives on the engine's loop."""

    def __init__(
        self, state: State, group: Group, attempts: Attempts, comparison: Comparison, departed: Departed
    ) -> None:
        self._state = state
        self._group = group
        self._attempts = attempts
        self._comparison = comparison
        self._departed = departed
        self._box = BallotBox(group, attempts)
        self.parts: dict[StepId, Mapping[int, bytes]] = {}
        """The encoded parts of the steps that RAM holds, by rank."""
        self.merged_steps: dict[StepId, MergedStep] = {}
        """The last steps that the parts make together, each until it has left RAM or newer ones have come."""
        self._differed: set[tuple[int, ...]] = set()
        """The ranks that differed in the last save that was compared."""

    def forget(self, step: StepId) -> None:
        """Forget a step that has left RAM."""
        self.parts.pop(step, None)
        self.merged_steps.pop(step, None)

    async def voted(self, rank: int, ballot: Ballot) -> None:
        """Count the vote of another rank, and the steps that have left its RAM."""
        try:
            await self._departed.forget(ballot.gone)
        finally:
            self._box.put(rank, ballot)

    async def part_dropped(self, rank: int, step: StepId) -> None:
        """Act on a rank that has dropped its part of a step: abort the vote, or count the step as not held any more."""
        self._box.part_dropped(rank, step)
        await self._departed.forget(((step.serial, step.step),))

    async def decide(self, mine: Ballot) -> Decision:
        """Collect the votes of all ranks, within the deadline, and decide on the attempt that rank 0 voted on."""
        decision = await self._decide(mine)
        message = decision.message
        serial = message.serial if isinstance(message, Aborted) else message.record.id.serial
        self._box.decided(mine.attempt, serial, message.open)
        return decision

    async def _decide(self, mine: Ballot) -> Decision:
        attempt, step = mine.attempt, StepId(mine.serial, mine.step)
        differing: tuple[Difference, ...] = ()
        deadline = asyncio.get_running_loop().time() + self._group.deadline
        try:
            await self._box.collect(mine, deadline)
            votes = self._box.votes_on(attempt)
            ballots.check(votes)
            digests = {rank: vote.replicas for rank, vote in votes.items()}
            differing = await self._comparison.differing(attempt, digests, deadline)
            self._check_replicas(step, differing)
            parts = {rank: vote.part for rank, vote in votes.items()}
            merged = await in_thread(lambda: without_places(merge_parts(parts)), pool=self._state.pool)
            ballots.check(votes)  # a rank may have dropped its part meanwhile
        except Exception as error:  # whatever it is, the ranks wait for a decision
            if not isinstance(error, TieredCkptError):
                _log.exception("%s: unexpected failure of the vote", step)
            return Decision(self._aborted(mine, error, differing))
        self.merged_steps[step] = merged
        while len(self.merged_steps) > _MERGED_KEPT:
            del self.merged_steps[min(self.merged_steps)]
        streamed_to = next((vote.tier for vote in votes.values() if vote.tier is not None), None)
        if streamed_to is None:
            self.parts[step] = parts
        committed = Committed(
            attempt,
            brief(merged.record),
            in_ram=streamed_to is None,
            open=self._attempts.open_beside(attempt),
            failing=ballots.failing(votes),
            differing=differing,
        )
        return Decision(committed, streamed_to, parts)

    def _check_replicas(self, step: StepId, differing: Sequence[Difference]) -> None:
        """Log replicas that are not equal, but not again while the same ranks differ.

        Raises `ReplicasDisagree` if the configuration says so.
        """
        before, self._differed = self._differed, {found.ranks for found in differing}
        if not differing:
            return
        shown = _show(differing)
        if self._state.config.when_replicas_differ == "refuse":
            raise ReplicasDisagree(shown, differing)
        if self._differed != before:  # replicas that drift would fill the log
            _log.error("%s: %s", step, shown)

    def _aborted(self, mine: Ballot, error: Exception, differing: Sequence[Difference]) -> Aborted:
        """The message that aborts an attempt because of ``error``, from the votes that have come."""
        attempt, votes = mine.attempt, self._box.votes_on(mine.attempt)
        reason = Failure.of(error).text
        ranks: Sequence[int] = error.ranks if isinstance(error, RanksUnavailable) else ()
        if isinstance(error, ReplicasDisagree):
            # All of the few ranks that store a copy are suspect; a comparison of all ranks tells which is wrong.
            named = {rank for found in differing for rank in found.ranks}
            reason = _show(differing) if named else reason
            differing = (*differing, *(found for found in error.found if named.isdisjoint(found.ranks)))
            ranks = sorted(named or {rank for found in differing for rank in found.ranks})
        return Aborted(
            step=mine.step,
            serial=max(vote.serial for vote in votes.values()),
            tier=None,
            ranks=tuple(ranks),
            reason=reason,
            attempt=attempt,
            last_serial=self._last_serial_of_all(votes),
            open=self._attempts.open_beside(attempt),
            failing=ballots.failing(votes),
            differing=tuple(differing),
        )

    def _last_serial_of_all(self, votes: Mapping[int, Ballot]) -> int:
        """The serial that all ranks continue from, of this attempt: what they save since counts alike.

        Where votes are missing, rank 0 may have made one save less than those that are.
        """
        known = max(vote.serial or vote.last_serial for vote in votes.values())
        alike = len(votes) == self._group.size and len({vote.serial for vote in votes.values()} - {0}) < 2
        return known if alike or votes[COORDINATOR].serial else known + 1


def _show(differing: Sequence[Difference]) -> str:
    shown = "; ".join(map(show_difference, differing[:4]))
    return f"{shown}. Memory or computation of a rank is wrong, or what was declared or sharded as replicas is none"
