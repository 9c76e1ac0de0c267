"""The votes that have come to rank 0, until it has decided on the attempt to save a step."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from msgspec.structs import replace

from tieredckpt.engine.notify import Notification
from tieredckpt.engine.ranks.commit.attempts import Attempts
from tieredckpt.engine.ranks.commit.ballots import named
from tieredckpt.engine.ranks.communicator import COORDINATOR
from tieredckpt.engine.ranks.group import Group
from tieredckpt.engine.ranks.messages import Ballot
from tieredckpt.engine.wire_types import Failure
from tieredckpt.errors import RanksUnavailable
from tieredckpt.format.manifest import StepId

__all__ = ["BallotBox"]


class BallotBox:
    """Keeps votes by attempt and rank. Idle on ranks other than 0; lives on the engine's loop.

    A vote on a save that rank 0 never makes is kept until a later save is decided on.
    """

    def __init__(self, group: Group, attempts: Attempts) -> None:
        self._group = group
        self._attempts = attempts
        self._votes: dict[str, dict[int, Ballot]] = {}
        self._came = Notification()

    def put(self, rank: int, ballot: Ballot) -> None:
        """Keep the vote of a rank, unless it comes too late."""
        if self._attempts.is_undecided(ballot.attempt):
            self._votes.setdefault(ballot.attempt, {})[rank] = ballot
            self._came.notify()

    def part_dropped(self, rank: int, step: StepId) -> None:
        """Count the vote of a rank that has its part of ``step`` no more as one against it."""
        for votes in self._votes.values():
            if rank in votes and StepId(votes[rank].serial, votes[rank].step) == step:
                failure = Failure.of(RanksUnavailable("it dropped its part to make room meanwhile", [rank]))
                votes[rank] = replace(votes[rank], failure=failure)

    async def collect(self, mine: Ballot, deadline: float) -> None:
        """Wait for the votes of all ranks on an attempt, which `votes_on` has then.

        Raises `RanksUnavailable` when some have not come by the ``deadline`` of the loop's clock.
        """
        votes = self._votes.setdefault(mine.attempt, {})
        votes[COORDINATOR] = mine
        if missing := await self._group.all_in(votes, self._came, deadline):
            raise RanksUnavailable(f"{named(missing)} not saved it within {self._group.deadline:g} s", missing)

    def votes_on(self, attempt: str) -> Mapping[int, Ballot]:
        """The votes that have come on an attempt which is being decided on, by rank."""
        return self._votes[attempt]

    def decided(self, attempt: str, serial: int, undecided: Collection[str]) -> None:
        """Forget the votes on an attempt, and those that their ranks give up when they hear of the decision."""
        del self._votes[attempt]
        for other in self._votes.keys() - undecided:
            left = {rank: vote for rank, vote in self._votes.pop(other).items() if _serial_of(vote) >= serial}
            self._votes |= {other: left} if left else {}


def _serial_of(vote: Ballot) -> int:
    """The serial that the rank of a vote reaches with the step, also without a part of it."""
    return vote.serial or vote.reached
