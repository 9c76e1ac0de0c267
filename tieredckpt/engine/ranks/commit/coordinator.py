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
from tieredckpt.engine.ranks.commit.compare import Comparison
from tieredckpt.engine.ranks.commit.merged import MergedStep, MergedSteps, without_places
from tieredckpt.engine.ranks.commit.parts import merge_parts
from tieredckpt.engine.ranks.communicator import COORDINATOR, RanksMissing
from tieredckpt.engine.ranks.departed import Departed
from tieredckpt.engine.ranks.group import Group
from tieredckpt.engine.ranks.messages import Aborted, Committed, Save
from tieredckpt.engine.state.state import State
from tieredckpt.engine.wire_types import Failure, brief, decode, encode
from tieredckpt.errors import RanksUnavailable, TieredCkptError
from tieredckpt.format.manifest import StepId
from tieredckpt.format.replicas import Difference, ReplicasDisagree, show_difference

__all__ = ["Coordinator", "Decision"]

_log = logging.getLogger("tieredckpt")


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
        self.parts: dict[StepId, Mapping[int, bytes]] = {}
        """The encoded parts of the steps that RAM holds, by rank."""
        self.merged_steps = MergedSteps()
        """The steps that the parts make together."""
        self._differed: set[tuple[int, ...]] = set()
        """The ranks that differed in the last save that was compared."""
        self._dropped: dict[StepId, list[int]] = {}
        """The ranks that have dropped their parts of steps before a decision."""

    def forget(self, step: StepId) -> None:
        """Forget a step that has left RAM."""
        self.parts.pop(step, None)
        self.merged_steps.forget(step)

    async def part_dropped(self, rank: int, step: StepId) -> None:
        """Act on a rank that has dropped its part of a step: abort the vote, or count the step as not held any more."""
        if step in self._state.tiers[0].steps.held:
            await self._departed.forget(((step.serial, step.step),))
        else:
            self._dropped.setdefault(step, []).append(rank)

    async def decide(self, attempt: str, step: StepId, mine: Save) -> Decision:
        """Collect the votes of all ranks, within the deadline, and decide on the attempt to save ``step``."""
        saves = {COORDINATOR: mine}
        differing: tuple[Difference, ...] = ()
        deadline = asyncio.get_running_loop().time() + self._group.deadline
        try:
            await self._collect(attempt, saves)
            digests = {rank: save.replicas for rank, save in saves.items()}
            differing = await self._comparison.differing(attempt, digests, deadline)
            self._check_replicas(step, differing)
            parts = {rank: save.part for rank, save in saves.items()}
            merged = await self._merged(step, parts)
        except Exception as error:  # whatever it is, the ranks wait for a decision
            if not isinstance(error, TieredCkptError):
                _log.exception("%s: unexpected failure of the vote", step)
            return Decision(self._aborted(attempt, step.step, saves, error, differing))
        self.merged_steps.keep(merged)
        streamed_to = next((save.tier for save in saves.values() if save.tier is not None), None)
        if streamed_to is None:
            self.parts[step] = parts
        committed = Committed(
            attempt,
            brief(merged.record),
            in_ram=streamed_to is None,
            open=self._attempts.open_beside(attempt),
            failing=ballots.failing(saves),
            differing=differing,
        )
        return Decision(committed, streamed_to, parts)

    async def _collect(self, attempt: str, saves: dict[int, Save]) -> None:
        """Collect the votes of all ranks into ``saves``; raises when not all have saved the same step."""
        missing: Sequence[int] = ()
        try:
            came = await self._group.gather(f"saved/{attempt}", encode(saves[COORDINATOR]))
        except RanksMissing as error:
            came, missing = error.came, error.ranks
        saves.update({rank: decode(data, Save) for rank, data in came.items()})
        for save in (*saves.values(), *await ballots.receive_given_up(self._group.communicator, saves)):
            await self._departed.forget(save.gone)
        if missing:
            raise RanksUnavailable(f"{ballots.named(missing)} not saved it within {self._group.deadline:g} s", missing)
        ballots.check(saves)

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

    async def _merged(self, step: StepId, parts: Mapping[int, bytes]) -> MergedStep:
        """Merge the parts. Raises `Conflict` if they do not fit, `RanksUnavailable` if a rank has lost its part."""
        merged = await in_thread(lambda: without_places(merge_parts(parts)), pool=self._state.pool)
        if dropped := self._dropped.pop(step, None):
            raise RanksUnavailable(f"{ballots.named(dropped)} dropped a part of it to make room meanwhile", dropped)
        return merged

    def _aborted(
        self,
        attempt: str,
        step: int,
        saves: Mapping[int, Save],
        error: Exception,
        differing: Sequence[Difference],
    ) -> Aborted:
        """The message that aborts an attempt because of ``error``, from the votes that have come."""
        reason = Failure.of(error).text
        ranks: Sequence[int] = error.ranks if isinstance(error, RanksUnavailable) else ()
        if isinstance(error, ReplicasDisagree):
            # All of the few ranks that store a copy are suspect; a comparison of all ranks tells which is wrong.
            named = {rank for found in differing for rank in found.ranks}
            reason = _show(differing) if named else reason
            differing = (*differing, *(found for found in error.found if named.isdisjoint(found.ranks)))
            ranks = sorted(named or {rank for found in differing for rank in found.ranks})
        return Aborted(
            step=step,
            serial=max(save.serial for save in saves.values()),
            tier=None,
            ranks=tuple(ranks),
            reason=reason,
            attempt=attempt,
            last_serial=self._last_serial_of_all(saves),
            open=self._attempts.open_beside(attempt),
            failing=ballots.failing(saves),
            differing=tuple(differing),
        )

    def _last_serial_of_all(self, saves: Mapping[int, Save]) -> int:
        """The serial that all ranks continue from, of this attempt: what they save since counts alike.

        Where votes are missing, rank 0 may have made one save less than those that are.
        """
        known = max(save.serial or save.last_serial for save in saves.values())
        alike = len(saves) == self._group.size and len({save.serial for save in saves.values()} - {0}) < 2
        return known if alike or saves[COORDINATOR].serial else known + 1


def _show(differing: Sequence[Difference]) -> str:
    shown = "; ".join(map(show_difference, differing[:4]))
    return f"{shown}. Memory or computation of a rank is wrong, or what was declared or sharded as replicas is none"
