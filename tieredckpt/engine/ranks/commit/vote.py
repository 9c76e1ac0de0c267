"""The vote of all ranks on a save: either all have their parts and these fit, or there is no step.

A save returns without waiting for other ranks. Behind it, every rank votes: it sends rank 0 step, serial and its part,
which names all chunks by their digests. When all votes are there and the parts fit together, rank 0 sends `Committed`:
from then on the step counts as held. Otherwise it sends `Aborted`: every rank drops its part, and all continue with
one serial, so that the next save works.

Ranks may skip a save, or make it long after the others. An *attempt* keeps the votes on different saves apart. It is
named by the epoch of the last restore of all ranks, the step, and how often that step was saved since.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from itertools import takewhile
from typing import Any

from tieredckpt.concurrency import in_thread
from tieredckpt.engine.keeping.evictor import Evictor
from tieredckpt.engine.ranks.commit import ballots
from tieredckpt.engine.ranks.commit.compare import Comparison, Digests
from tieredckpt.engine.ranks.commit.merged import MergedSteps, without_places
from tieredckpt.engine.ranks.commit.parts import encode_own, merge_parts
from tieredckpt.engine.ranks.communicator import COORDINATOR, RanksMissing
from tieredckpt.engine.ranks.departed import Departed
from tieredckpt.engine.ranks.group import Group
from tieredckpt.engine.ranks.messages import Aborted, Committed, CompareReplicas, PartDropped, Save
from tieredckpt.engine.ranks.turns import Turns
from tieredckpt.engine.state.state import State
from tieredckpt.engine.wire_types import Failure, brief, decode, encode
from tieredckpt.errors import RanksUnavailable, TieredCkptError
from tieredckpt.events import CommitFailed, ReplicasDiffer, StepCommitted
from tieredckpt.format.manifest import StepId, StepIndex
from tieredckpt.format.replicas import Difference, ReplicasDisagree, show_difference

__all__ = ["Missed", "Votes"]

_log = logging.getLogger("tieredckpt")


class Missed(Exception):
    """The other ranks have aborted this save already."""


class Votes:
    """The votes of the ranks on their saves, as one rank sees them. Lives on the engine's loop.

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
        self.parts: dict[StepId, dict[int, bytes]] = {}
        """At rank 0: the encoded parts of the steps that RAM holds, by rank."""
        self.merged_steps = MergedSteps()
        """At rank 0: the steps that the parts make together."""
        self.comparison = Comparison(state, group)
        self._failing_here = ballots.FailingHere(state)
        self._epoch = 0
        """Epoch: the number of the last common restore."""
        self._saves: Counter[int] = Counter()
        """How often each step was saved since the last restore."""
        self._saving: set[str] = set()
        """Attempts that are being copied here."""
        self._announced: dict[str, StepId] = {}
        """Attempts that this rank has voted for, and that rank 0 has not decided on."""
        self._given_up: list[str] = []
        """Attempts that this rank has voted for and given up since its last vote."""
        self._missed: dict[str, str] = {}
        """Attempts that were aborted before this rank had its part of them, and why."""
        self._suspects: set[tuple[int, ...]] = set()
        """At rank 0: the ranks that differed in the last save that was compared."""
        self._open: set[str] = set()
        """At rank 0: the attempts that it is deciding on."""
        self._dropped: dict[StepId, list[int]] = {}
        """At rank 0: the ranks that have dropped their parts of steps on which it has not decided."""
        state.membership.part_dropped = self._report_dropped

    # -- this rank's saves --------------------------------------------------------------------------------

    def begin(self, step: int) -> str:
        """Name the attempt of a new save of ``step``. Raises `Missed` if it was aborted already."""
        attempt = f"{self._epoch}.{step}.{self._saves[step]}"
        self._saves[step] += 1
        if (reason := self._missed.pop(attempt, None)) is not None:
            raise Missed(reason)
        self._saving.add(attempt)
        if self._group.coordinates:
            self._open.add(attempt)
        return attempt

    def restore_begins(self, epoch: int) -> None:
        """Begin the restore of that epoch, as all ranks do: the saves of each step are counted from 0 again."""
        self._forget_promises(self._state.membership.promised)
        self._epoch = epoch
        self._saves.clear()
        self._missed.clear()

    def saved(
        self, attempt: str, step: StepId, index: StepIndex, tier: str | None, replicas: Mapping[bytes, Digests]
    ) -> None:
        """Vote yes, behind the training: this rank has its part in RAM, or has streamed it to ``tier``.

        ``replicas`` has the digests of the data that it and others store in common.
        """
        self._saving.discard(attempt)
        self._announced[attempt] = step
        self._state.membership.undecided.add(step)
        origin = self._state.branch.continued_by(step).origin
        restored = 0 if origin is None else origin.step.serial
        alike = self.comparison.hold(attempt, replicas)
        self._group.start(self._announce(attempt, step, index, tier, restored, alike), f"vote on {step}")

    async def _announce(
        self,
        attempt: str,
        step: StepId,
        index: StepIndex,
        tier: str | None,
        restored: int,
        replicas: dict[bytes, bytes],
    ) -> None:
        if (reason := self._missed.pop(attempt, None)) is not None:  # it was aborted while it was copied
            await self._drop_announced(attempt, reason)
            return
        part, failure = b"", None
        try:
            part = await in_thread(encode_own, index, pool=self._state.pool)
        except Exception as error:  # as without memory
            failure = Failure.of(error)
        save = self._ballot(step.serial, part=part, tier=tier, failure=failure, origin=restored, replicas=replicas)
        await self._say(attempt, step, save)

    def not_saved(self, attempt: str, step: int, error: BaseException) -> None:
        """Vote no, behind the training: this rank has no part."""
        self._saving.discard(attempt)
        self._missed.pop(attempt, None)
        save = self._ballot(0, failure=Failure.of(error))
        self._group.start_last(self._say(attempt, StepId(0, step), save), f"vote on step {step}")

    def _ballot(self, serial: int, **what: Any) -> Save:
        last, gone = self._state.branch.last_serial, self._departed.take()
        given_up, self._given_up = tuple(self._given_up), []
        return Save(serial, last, gone=gone, failing=self._failing_here.names(), given_up=given_up, **what)

    async def _say(self, attempt: str, step: StepId, save: Save) -> None:
        if self._group.coordinates:
            try:
                await self._decide(attempt, step, save)
            finally:
                if attempt in (promised := self._state.membership.promised):
                    self._forget_promises(takewhile(attempt.__ne__, promised))
                    del promised[attempt]
            return
        deadline = asyncio.get_running_loop().time() + self._group.patience
        try:
            await self._group.gather(f"saved/{attempt}", encode(save))
        except RanksUnavailable as error:
            self._mark_indeterminate(attempt, step, str(error))
            return
        while attempt in self._announced and (left := deadline - asyncio.get_running_loop().time()) > 0:
            await self._state.changed.wait(left)
        self._mark_indeterminate(attempt, step, f"rank 0 has not decided on it within {self._group.deadline:g} s")

    def _mark_indeterminate(self, attempt: str, step: StepId, reason: str) -> None:
        """Stop waiting; the part stays while there is room, as rank 0 may still decide."""
        if attempt in self._announced:
            self._group.missed([COORDINATOR])
            self.comparison.forget(attempt)
            self._state.membership.undecided.discard(step)
            self._state.branch.indeterminate(step)
            self._fail(step, (COORDINATOR,), reason)

    def _report_dropped(self, step: StepId) -> None:
        """Report that this rank has no part any more of a step that it voted for; rank 0 may still decide on it."""
        if step in self._announced.values():
            self._group.report(PartDropped(step.step, step.serial))

    # -- rank 0's decision ----------------------------------------------------------------------------

    async def _decide(self, attempt: str, step: StepId, mine: Save) -> None:
        saves = {COORDINATOR: mine}
        differing: tuple[Difference, ...] = ()
        deadline = asyncio.get_running_loop().time() + self._group.deadline
        try:
            await self._gather(attempt, saves)
            votes = {rank: save.replicas for rank, save in saves.items()}
            differing = await self.comparison.differing(attempt, votes, deadline)
            self._check(step, differing)
            parts = {rank: save.part for rank, save in saves.items()}
            whole = await in_thread(lambda: without_places(merge_parts(parts)), pool=self._state.pool)
            if dropped := self._dropped.pop(step, None):
                raise RanksUnavailable(f"{ballots.named(dropped)} dropped a part of it to make room meanwhile", dropped)
        except Exception as error:  # whatever it is, the ranks wait for a decision
            self._open.discard(attempt)
            ranks: Sequence[int] = error.ranks if isinstance(error, RanksUnavailable) else ()
            reason = Failure.of(error).text
            if not isinstance(error, TieredCkptError):
                _log.exception("%s: unexpected failure of the vote", step)
            if isinstance(error, ReplicasDisagree):
                # All of the few ranks that store a copy are suspect; a comparison of all ranks tells which is wrong.
                named = {rank for found in differing for rank in found.ranks}
                reason = _told(differing) if named else reason
                differing = (*differing, *(found for found in error.found if named.isdisjoint(found.ranks)))
                ranks = sorted(named or {rank for found in differing for rank in found.ranks})
            failed = Aborted(
                step=step.step,
                serial=max(save.serial for save in saves.values()),
                tier=None,
                ranks=tuple(ranks),
                reason=reason,
                attempt=attempt,
                last_serial=self._after(saves),
                open=tuple(self._open),
                failing=ballots.failing(saves),
                differing=differing,
            )
            self._group.publish(failed)
            await self._apply_aborted(failed)
            return
        self._open.discard(attempt)
        self.merged_steps.keep(whole)
        tier = next((save.tier for save in saves.values() if save.tier is not None), None)
        if tier is None:
            self.parts[step] = parts
        committed = Committed(
            attempt, brief(whole.record), tier is None, tuple(self._open), ballots.failing(saves), differing
        )
        self._group.publish(committed)
        await self._apply_committed(committed)
        if tier is not None:
            await self._commit_streamed(step, tier, parts)

    async def part_dropped(self, rank: int, step: StepId) -> None:
        """Act on a rank that has dropped its part of a step: abort the vote, or count the step as not held any more."""
        if step in self._state.tiers[0].steps.held:
            await self._departed.forget(((step.serial, step.step),))
        else:
            self._dropped.setdefault(step, []).append(rank)

    def _check(self, step: StepId, differing: Sequence[Difference]) -> None:
        """Log replicas that are not equal, but not again while the same ranks differ.

        Raises `ReplicasDisagree` if the configuration says so.
        """
        before, self._suspects = self._suspects, {found.ranks for found in differing}
        if not differing:
            return
        told = _told(differing)
        if self._state.config.when_replicas_differ == "refuse":
            raise ReplicasDisagree(told, differing)
        if self._suspects != before:  # replicas that drift would fill the log
            _log.error("%s: %s", step, told)

    async def _gather(self, attempt: str, saves: dict[int, Save]) -> None:
        """Collect the votes of all ranks; raises when not all have saved the same step."""
        missing: Sequence[int] = ()
        try:
            came = await self._group.gather(f"saved/{attempt}", encode(saves[COORDINATOR]))
        except RanksMissing as error:
            came, missing = error.came, error.ranks
        saves.update({rank: decode(data, Save) for rank, data in came.items()})
        for save in saves.values():
            await self._departed.forget(save.gone)
        await ballots.discard(self._group.communicator, saves)
        if missing:
            raise RanksUnavailable(f"{ballots.named(missing)} not saved it within {self._group.deadline:g} s", missing)
        ballots.check(saves)

    def _after(self, saves: Mapping[int, Save]) -> int:
        """The serial that all ranks continue from; rank 0 may have made one save less than those that are missing."""
        if len(saves) == self._group.size and len({save.serial for save in saves.values()} - {0}) < 2:
            return max(save.serial or save.last_serial for save in saves.values())  # what they save since counts alike
        known = max(self._state.branch.last_serial, *(max(save.serial, save.last_serial) for save in saves.values()))
        return known if saves[COORDINATOR].serial else known + 1

    # -- the decision -------------------------------------------------------------------------------------

    async def apply(self, message: Committed | CompareReplicas | Aborted) -> None:
        """Apply a message of rank 0 about a vote."""
        match message:
            case Committed():
                await self._apply_committed(message)
            case Aborted():
                await self._apply_aborted(message)
            case CompareReplicas():
                self._group.start(self.comparison.answer(message), f"comparison of {message.attempt}")

    async def _apply_committed(self, committed: Committed) -> None:
        """Count the step as held, or as undecided until its commit on a shared tier if RAM has not all parts."""
        step = committed.record.id
        self._state.membership.failing = frozenset(committed.failing)
        self._announced.pop(committed.attempt, None)
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
        await self._forget_older(step, committed.open)
        self._state.changed.notify()

    async def _apply_aborted(self, failed: Aborted) -> None:
        """Drop this rank's part, and continue from the serial of all ranks."""
        self._state.membership.failing = frozenset(failed.failing)
        self.turns.decided(failed.attempt, failed.last_serial)
        self._emit(StepId(failed.serial, failed.step), failed.differing)
        if failed.attempt in self._announced:
            await self._give_up(failed.attempt, failed.ranks, failed.reason)
        else:
            if self.is_undecided(failed.attempt):
                self._missed[failed.attempt] = failed.reason
            self._fail(StepId(failed.serial, failed.step), failed.ranks, failed.reason)
        await self._forget_older(StepId(failed.serial, failed.step), failed.open)

    def is_undecided(self, attempt: str) -> bool:
        """Whether this rank has not begun an attempt, still copies for it, or, as rank 0, has not decided on it."""
        return attempt in self._saving or attempt in self._open or self._is_to_come(attempt)

    def _is_to_come(self, attempt: str) -> bool:
        epoch, step, nth = map(int, attempt.split("."))
        return epoch == self._epoch and nth >= self._saves[step]

    def _forget_promises(self, asked_before: Iterable[str]) -> None:
        """At rank 0: keep no packs for attempts that it has not begun, and that were asked for before another."""
        for attempt in tuple(asked_before):
            if self._is_to_come(attempt):
                self._state.membership.promised.pop(attempt, None)

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

    async def _give_up(self, attempt: str, ranks: Sequence[int], reason: str) -> None:
        self._given_up.append(attempt)
        self._fail(self._announced[attempt], ranks, reason)
        await self._drop_announced(attempt, reason)

    async def _drop_announced(self, attempt: str, reason: str) -> None:
        step = self._announced.pop(attempt)
        self.comparison.forget(attempt)
        await self.drop(step, ballots.not_committed(step, reason))

    def _emit(self, step: StepId, differing: Sequence[Difference]) -> None:
        for found in differing:
            self._state.events.emit(ReplicasDiffer(step.step, step.serial, found.key, found.ranks, found.more))

    def _fail(self, step: StepId, ranks: Sequence[int], reason: str) -> None:
        _log.error("%s of %d ranks was not committed: %s", step, self._group.size, reason)
        if step.serial:
            self._state.membership.failed[step] = ballots.not_committed(step, reason)
        self._state.events.emit(CommitFailed(step.step, step.serial, None, tuple(ranks), reason))
        self._state.changed.notify()

    async def _forget_older(self, step: StepId, opened: Sequence[str]) -> None:
        """Give up older attempts that rank 0 has not made: it decides in the order of its own saves."""
        for attempt, before in tuple(self._announced.items()):
            if before.serial and before < step and attempt not in opened and not self._group.coordinates:
                await self._give_up(attempt, (COORDINATOR,), f"rank {COORDINATOR} has not saved it")


def _told(differing: Sequence[Difference]) -> str:
    told = "; ".join(map(show_difference, differing[:4]))
    return f"{told}. Memory or computation of a rank is wrong, or what was declared or sharded as replicas is none"
