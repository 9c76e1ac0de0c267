"""The vote of all ranks on a save: either all have their parts and these fit, or there is no step.

A save returns without waiting for other ranks. Behind it, every rank votes: it reports step, serial and its part, which
names all chunks by their digests, to rank 0. When all votes are there and the parts fit together, rank 0 sends
`Committed`: from then on the step counts as held. Otherwise it sends `Aborted`: every rank drops its part, and all
continue with one serial, so that the next save works. How rank 0 decides is in `coordinator`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from tieredckpt.concurrency import in_thread
from tieredckpt.engine.keeping.evictor import Evictor
from tieredckpt.engine.ranks.commit import ballots
from tieredckpt.engine.ranks.commit.attempts import Attempts
from tieredckpt.engine.ranks.commit.compare import Comparison, Digests
from tieredckpt.engine.ranks.commit.coordinator import Coordinator
from tieredckpt.engine.ranks.commit.dedupe import Dedupe
from tieredckpt.engine.ranks.commit.parts import encode_own
from tieredckpt.engine.ranks.communicator import COORDINATOR
from tieredckpt.engine.ranks.departed import Departed
from tieredckpt.engine.ranks.group import Group
from tieredckpt.engine.ranks.messages import Aborted, Ballot, Committed, CompareReplicas, PartDropped
from tieredckpt.engine.ranks.turns import Turns
from tieredckpt.engine.state.state import State
from tieredckpt.engine.wire_types import Failure
from tieredckpt.errors import RanksUnavailable, TieredCkptError
from tieredckpt.events import CommitFailed, ReplicasDiffer, StepCommitted
from tieredckpt.format.manifest import StepId, StepIndex
from tieredckpt.format.replicas import Difference

__all__ = ["Votes"]

_log = logging.getLogger("tieredckpt")


class Votes:
    """The votes of one rank on its saves, and what it does when rank 0 has decided. Lives on the engine's loop.

    ``commit_streamed`` commits a step on the shared tier to which ranks have streamed their parts.
    """

    def __init__(
        self,
        state: State,
        evictor: Evictor,
        group: Group,
        commit_streamed: Callable[[StepId, str, Mapping[int, bytes]], Awaitable[None]],
        departed: Departed,
    ) -> None:
        self._state = state
        self._evictor = evictor
        self._group = group
        self._commit_streamed = commit_streamed
        self._departed = departed
        self.turns = Turns(state.branch)
        self.attempts = Attempts()
        self.dedupe = Dedupe(state, group, self.attempts)
        self.comparison = Comparison(state, group)
        self.coordinator = Coordinator(state, group, self.attempts, self.comparison, departed)
        self._failing_here = ballots.FailingHere(state)
        state.membership.dropping_part = self._report_dropping

    def begin_epoch(self, epoch: int) -> None:
        """Begin the restore of that epoch, as all ranks do."""
        self.dedupe.begin_epoch()
        self.attempts.begin_epoch(epoch)

    # -- this rank's vote ---------------------------------------------------------------------------------

    def saved(
        self, attempt: str, step: StepId, index: StepIndex, tier: str | None, replicas: Mapping[bytes, Digests]
    ) -> None:
        """Vote yes, behind the training: this rank has its part in RAM, or has streamed it to ``tier``.

        ``replicas`` has the digests of the data that it and others store in common.
        """
        self._state.membership.undecided.add(step)
        if (reason := self.attempts.end_copy(attempt)) is not None:  # it was aborted while it was copied
            self._group.start(self.drop(step, ballots.not_committed(step, reason)), f"end of {step}")
            return
        self.attempts.voted_for[attempt] = step
        origin = self._state.branch.continued_by(step).origin
        restored = 0 if origin is None else origin.step.serial
        alike = self.comparison.hold(attempt, replicas)
        self._group.start(self._vote_for(attempt, step, index, tier, restored, alike), f"vote on {step}")

    def not_saved(self, attempt: str, step: int, error: BaseException) -> None:
        """Vote no, behind the training: this rank has no part."""
        if self.attempts.end_copy(attempt) is not None:
            return  # rank 0 has decided
        reached = self.attempts.voted_against[attempt] = self.turns.reached_with(attempt)
        vote = self._vote(attempt, StepId(0, step), failure=Failure.of(error), reached=reached)
        self._group.start_last(vote, f"vote on step {step}")

    async def _vote_for(
        self,
        attempt: str,
        step: StepId,
        index: StepIndex,
        tier: str | None,
        restored: int,
        replicas: Mapping[bytes, bytes],
    ) -> None:
        part, failure = b"", None
        try:
            part = await in_thread(encode_own, index, pool=self._state.pool)
        except Exception as error:  # as without memory
            failure = Failure.of(error)
        if attempt in self.attempts.voted_for:  # else it was aborted meanwhile
            await self._vote(attempt, step, part=part, tier=tier, failure=failure, origin=restored, replicas=replicas)

    async def _vote(self, attempt: str, step: StepId, **what: Any) -> None:
        ballot = Ballot(
            attempt,
            step.step,
            step.serial,
            self._state.branch.last_serial,
            gone=self._departed.take(),
            failing=self._failing_here.names(),
            **what,
        )
        if self._group.coordinates:
            await self._decide(attempt, step, ballot)
            return
        self._group.report(ballot)
        with suppress(TimeoutError):
            async with asyncio.timeout(self._group.patience):
                await self._state.changed.until(lambda: attempt not in self.attempts.voted_for)
        self._mark_indeterminate(attempt, f"rank 0 has not decided on it within {self._group.deadline:g} s")

    async def _decide(self, attempt: str, step: StepId, ballot: Ballot) -> None:
        """At rank 0, decide on an attempt with the votes of all ranks, and apply the decision as they do."""
        try:
            decision = await self.coordinator.decide(ballot)
            self._group.publish(decision.message)
            await self.apply(decision.message)
            if decision.streamed_to is not None:
                await self._commit_streamed(step, decision.streamed_to, decision.parts)
        finally:
            self.dedupe.decided(attempt)

    def _mark_indeterminate(self, attempt: str, reason: str) -> None:
        """Stop waiting; the part stays while there is room, as rank 0 may still decide."""
        if (step := self.attempts.voted_for.get(attempt)) is not None:
            self._group.missed([COORDINATOR])
            self.comparison.forget(attempt)
            self._state.membership.undecided.discard(step)
            self._state.branch.indeterminate(step)
            self._fail(step, (COORDINATOR,), reason)

    def _report_dropping(self, step: StepId) -> None:
        """Report that this rank drops its part of a step that it voted for; rank 0 may still decide on it."""
        if step in self.attempts.voted_for.values():
            self._group.report(PartDropped(step.step, step.serial))

    # -- the decision of rank 0 ---------------------------------------------------------------------------

    async def apply(self, message: Committed | CompareReplicas | Aborted) -> None:
        """Apply a message of rank 0 about a vote."""
        match message:
            case Committed():
                await self._apply_committed(message)
            case Aborted():
                await self._apply_aborted(message)
            case CompareReplicas():
                self._group.report(self.comparison.answer(message))

    async def _apply_committed(self, committed: Committed) -> None:
        """Count the step as held, or as undecided until its commit on a shared tier if RAM has not all parts."""
        step = committed.record.id
        self._state.membership.failing = frozenset(committed.failing)
        self.attempts.voted_for.pop(committed.attempt, None)
        self.comparison.forget(committed.attempt)
        for tier in self._state.tiers:
            tier.steps.unstick(RanksUnavailable)  # all ranks have answered
        self._emit(step, committed.differing)
        self._state.membership.failed.pop(step, None)
        self._state.branch.last_serial = max(self._state.branch.last_serial, step.serial)
        if committed.in_ram:
            self._state.membership.undecided.discard(step)
            self._state.branch.committed(committed.record)
            self._state.tiers[0].steps.agree(committed.record)
        else:
            self._state.membership.undecided.add(step)  # until it is on the tier
        self._state.events.emit(StepCommitted(step.step, step.serial, committed.record.nbytes))
        await self._give_up_older(step, committed.open)
        self._state.changed.notify()

    async def _apply_aborted(self, aborted: Aborted) -> None:
        """Drop this rank's part, and continue from the serial of all ranks."""
        step = StepId(aborted.serial, aborted.step)
        self._state.membership.failing = frozenset(aborted.failing)
        to_come = self.attempts.is_to_come(aborted.attempt)
        self.turns.decided(aborted.attempt, aborted.last_serial, to_come=to_come)
        self._emit(step, aborted.differing)
        if aborted.attempt in self.attempts.voted_for:
            await self._give_up(aborted.attempt, aborted.ranks, aborted.reason)
        else:
            if aborted.attempt in self.attempts.voted_against:
                self._forget_refused([aborted.attempt])
            else:
                self.attempts.abort_early(aborted.attempt, aborted.reason)
            self._fail(step, aborted.ranks, aborted.reason)
        await self._give_up_older(step, aborted.open)

    async def end_streamed(self, step: StepId, failure: TieredCkptError | None) -> None:
        """End the wait for a step that did not fit into RAM: it is on a shared tier, or failed to get there."""
        if step in self._state.membership.undecided:
            await self.drop(step, failure)

    async def drop(self, step: StepId, failure: TieredCkptError | None = None) -> None:
        """Drop this rank's part of a step that is not, or will not be, committed because of ``failure``."""
        self._state.membership.undecided.discard(step)
        self._state.branch.failed(step)
        self._state.membership.streamed.pop(step, None)
        if failure is not None:
            self._state.membership.failed[step] = failure
        await self._evictor.drop_part(step, self._state.tiers[0])
        self._state.changed.notify()

    async def _give_up_older(self, step: StepId, undecided: Sequence[str]) -> None:
        """Give up older attempts that rank 0 has not made: it decides in the order of its own saves."""
        if self._group.coordinates:
            return
        against = self.attempts.voted_against.items()
        self._forget_refused([each for each, serial in against if serial < step.serial and each not in undecided])
        for attempt, voted_for in tuple(self.attempts.voted_for.items()):
            if voted_for < step and attempt not in undecided:
                await self._give_up(attempt, (COORDINATOR,), f"rank {COORDINATOR} has not saved it")

    async def _give_up(self, attempt: str, ranks: Sequence[int], reason: str) -> None:
        """End an attempt that this rank has voted for, and drop its part."""
        step = self.attempts.voted_for.pop(attempt)
        self.comparison.forget(attempt)
        self._fail(step, ranks, reason)
        await self.drop(step)

    def _forget_refused(self, attempts: Iterable[str]) -> None:
        """Forget votes against saves on which rank 0 has decided, perhaps before they came, or never will."""
        for attempt in tuple(attempts):
            del self.attempts.voted_against[attempt]

    def _emit(self, step: StepId, differing: Sequence[Difference]) -> None:
        for found in differing:
            self._state.events.emit(ReplicasDiffer(step.step, step.serial, found.key, found.ranks, found.more))

    def _fail(self, step: StepId, ranks: Sequence[int], reason: str) -> None:
        _log.error("%s of %d ranks was not committed: %s", step, self._group.size, reason)
        if step.serial:
            self._state.membership.failed[step] = ballots.not_committed(step, reason)
        self._state.events.emit(CommitFailed(step.step, step.serial, None, tuple(ranks), reason))
        self._state.changed.notify()
