"""One rank of a store of several: its saves and restores, and what it does on messages of the others."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial

from tieredckpt.blobs.ram.find import FoundRam
from tieredckpt.concurrency import in_thread
from tieredckpt.engine.keeping.collector import Collector
from tieredckpt.engine.keeping.policies import any_due, waits_for_promotion
from tieredckpt.engine.keeping.safety import why_kept
from tieredckpt.engine.opening.ram import mark_ram
from tieredckpt.engine.ranks.commit.attempts import Missed
from tieredckpt.engine.ranks.commit.commit import Commits
from tieredckpt.engine.ranks.commit.compare import digests_elsewhere, with_own
from tieredckpt.engine.ranks.commit.vote import Votes
from tieredckpt.engine.ranks.communicator import COORDINATOR
from tieredckpt.engine.ranks.departed import Departed
from tieredckpt.engine.ranks.group import Group
from tieredckpt.engine.ranks.messages import (
    Aborted,
    Ballot,
    Committed,
    CompareReplicas,
    Damaged,
    Evicted,
    Find,
    Logged,
    PartDropped,
    Promote,
    Promoted,
    RendezvousComplete,
    RendezvousOpened,
    ReplicaDigests,
    Replicate,
    Replicated,
    Reported,
    RestoreJoined,
    RestoreRequested,
    RestoreWithdrawn,
    SaveAt,
    Signalled,
    Stuck,
    TierChanged,
    Wanted,
)
from tieredckpt.engine.ranks.open import Opening, adopt_catalog, catalog_of
from tieredckpt.engine.ranks.replicas.replication import Replication
from tieredckpt.engine.ranks.reports import Reports
from tieredckpt.engine.ranks.restore.restore import CollectiveRestores
from tieredckpt.engine.ranks.schedule import SharedSchedule
from tieredckpt.engine.saving.call import SaveCall
from tieredckpt.engine.saving.save import Saved
from tieredckpt.engine.state.adoption import adopt_if_gone
from tieredckpt.engine.state.branch import Origin
from tieredckpt.engine.state.state import State
from tieredckpt.engine.tier import step_index
from tieredckpt.engine.tier.held import Held
from tieredckpt.engine.tier.tier import Tier
from tieredckpt.engine.wire_types import Failure, StepOnTier
from tieredckpt.errors import Conflict, NoSpace, NotFound, RanksUnavailable, TierUnavailable
from tieredckpt.events import (
    CommitFailed,
    Event,
    SaveSkipped,
    StepCommitted,
    StepEvicted,
    StepPromoted,
    TierFailed,
    TierRecovered,
)
from tieredckpt.format.manifest import StepId, StepRecord
from tieredckpt.tree.flatten import Flat
from tieredckpt.tree.replicated import split

__all__ = ["Ranked"]


class Ranked:
    """One rank of a store of several. Lives on the engine's loop.

    ``open_tiers``, ``look_up`` and ``promote_at_once`` do what a store of one rank does.
    """

    def __init__(
        self,
        state: State,
        collector: Collector,
        group: Group,
        open_tiers: Callable[[Sequence[FoundRam]], Awaitable[None]],
        look_up: Callable[[int | None], Awaitable[tuple[StepId, StepRecord] | None]],
        promote_at_once: Callable[[StepId, Tier], Awaitable[object]],
    ) -> None:
        self._state = state
        self._collector = collector
        self.group = group
        self._departed = Departed(state, collector.evictor)
        self.votes = Votes(state, collector.evictor, group, self._commit_streamed, self._departed)
        self.commits = Commits(state, collector, group, self.votes)
        self.opening = Opening(state, collector.evictor, group, self.votes, self.commits, open_tiers)
        self.restores = CollectiveRestores(state, group, self.votes, self.opening, look_up, self._departed)
        self.reports = Reports(state, collector, group, promote_at_once)
        ram = state.config.ram
        self.replicas = Replication(state, collector, group, self.commits, ram) if ram and ram.replicas > 1 else None
        self.schedule = SharedSchedule(state, coordinates=group.coordinates, send=self._send_save_at)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._heard_at = 0.0
        """When rank 0 last sent a message, by the loop's clock."""
        self._unsubscribe: Callable[[], None] = lambda: None

    async def open(self) -> None:
        """Open the store with the other ranks."""
        await self.opening.open()
        if self.replicas is not None:
            await self.replicas.open()
        self._unsubscribe = self._state.events.subscribe(
            self._report if self.group.coordinates else self._departed.note
        )
        self._loop = asyncio.get_running_loop()
        self.group.begin(self._apply, self._apply_report)
        if self.replicas is not None and self.group.coordinates:
            self.group.start(self.replicas.lead(), "copies in the RAM of other nodes")

    async def close(self) -> None:
        """Leave the other ranks."""
        await self.group.close()
        self._unsubscribe()
        await self.opening.close()

    async def save(self, call: SaveCall, flat: Flat, save: Callable[..., Awaitable[Saved]]) -> Saved:
        """Save this rank's part by ``save``, a `Writer.save` of the call; the ranks vote behind the training."""
        state, saved, serial, began, step = self._state, None, 0, time.monotonic(), call.step
        try:
            attempt = self.votes.attempts.begin(step)
        except Missed as missed:
            reason = f"step {step} was not saved: {missed}"
            self.count_as_saved(step, call.origin)
            state.events.emit(SaveSkipped(step, reason))
            return Saved(StepId(state.branch.last_serial, step), None, 0, 0, 0.0, reason)
        nodes, size = self.group.nodes, state.config.chunk_size
        replicated = *state.config.replicated, *call.replicated
        share = partial(split, flat, replicated, rank=self.group.rank, nodes=nodes, chunk_size=size)
        try:
            async with self.votes.turns.mine(attempt):
                self.votes.dedupe.attempt, serial = attempt, state.branch.last_serial + 1
                own = await in_thread(share)
                elsewhere = await digests_elsewhere(state, own)  # while there is no part that could be lost
                saved = await save(own, began=began)
            if saved.tier is None:
                self.count_as_saved(step, call.origin, serial)
                self.votes.not_saved(attempt, step, NoSpace(saved.skipped))
                return saved
            state.membership.undecided.add(saved.step)  # at once, or a save that needs room would drop the part
            streamed = state.membership.streamed.get(saved.step)
            index = streamed.index if streamed is not None else await step_index.load(state.tiers[0], saved.step)
            alike = with_own(elsewhere, own.replicated, index)
        except BaseException as error:
            self.count_as_saved(step, call.origin, serial)
            self.votes.not_saved(attempt, step, error)
            if saved is not None:
                await self.votes.drop(saved.step)
            raise
        self.votes.saved(attempt, saved.step, index, None if streamed is None else saved.tier, alike)
        return saved

    def give_up(self, step: int, error: BaseException) -> None:
        """Vote no on a save that this rank does not begin."""
        with suppress(Missed):
            attempt = self.votes.attempts.begin(step)
            self.votes.turns.skip(attempt)
            self.votes.not_saved(attempt, step, error)

    def count_as_saved(self, step: int, origin: Origin | None, serial: int = 0) -> None:
        """Count the step as saved, as other ranks do: else not all would save the next one, or number it alike."""
        self._state.branch.last_serial = max(self._state.branch.last_serial, serial)
        self._state.branch.count_from(origin)
        self._state.observation.count_save(step)

    def _send_save_at(self, step: int) -> None:
        if self._loop is not None:  # asked from the trainer's thread
            self._loop.call_soon_threadsafe(self.group.publish, SaveAt(step))

    def _save_at(self, order: SaveAt) -> None:
        late = self.schedule.received(order.step)
        if late is not None:
            self.give_up(late, RanksUnavailable("the order to save it came too late"))

    async def drained(self) -> None:
        """Wait until the ranks have voted on every save, and rank 0 has promoted what is due.

        Raises `TieredCkptError` if a shared tier fails, and `RanksUnavailable` if rank 0 sends nothing any more.
        """
        state = self._state
        if self.group.deserted:
            raise RanksUnavailable(f"rank {COORDINATOR} is silent, so nothing more gets to shared tiers", [COORDINATOR])
        loop = asyncio.get_running_loop()
        begin = loop.time()
        while state.membership.undecided:
            await self.heard_more(min(state.membership.undecided), state.tiers[-1], begin)
        begin = loop.time()
        while not self.group.coordinates and (due := any_due(state)) is not None:
            step, tier = due
            if tier.health.error is not None:
                raise TierUnavailable(f"tier {tier.name!r} lacks {step}: {tier.health.error}")
            await self.heard_more(step, tier, begin)
        for tier in state.tiers:
            for step, error in tier.steps.stuck.items():
                if not self.group.coordinates and step in state.records() and step not in tier.steps.held:
                    raise Failure.of(error).error()

    async def heard_more(self, step: StepId, tier: Tier, since: float) -> None:
        """Wait for a change, while a caller waits for a step on a tier ``since`` some time, by the loop's clock.

        Raises `RanksUnavailable` when rank 0 has sent nothing for longer than the step may take.
        """
        state = self._state
        if self.group.coordinates:
            await state.changed.wait()
            return
        record, spilled = state.records().get(step), state.membership.streamed.get(step)
        nbytes = spilled.index.record.nbytes * self.group.size if spilled is not None else 0
        nbytes = record.nbytes if record is not None else nbytes
        patience = self.group.patience + nbytes / tier.config.min_bandwidth
        left = max(since, self._heard_at) + patience - asyncio.get_running_loop().time()
        if left <= 0:
            self.group.missed([COORDINATOR])
            raise RanksUnavailable(f"tier {tier.name!r} lacks {step}, and rank {COORDINATOR} is silent", [COORDINATOR])
        await state.changed.wait(left)

    async def _commit_streamed(self, step: StepId, tier: str, parts: Mapping[int, bytes]) -> None:
        await self.commits.commit_streamed(step, tier, parts)

    # -- messages of rank 0 ---------------------------------------------------------------------------

    def _report(self, event: Event) -> None:
        """At rank 0: publish events of steps and shared tiers to the other ranks."""
        state = self._state
        if any(getattr(event, "tier", None) == tier.name for tier in state.derived):
            return  # the others know nothing of those
        if isinstance(event, CommitFailed) and event.tier is None:
            self.schedule.failed(event.step)
        elif isinstance(event, StepCommitted):
            self.group.start(self._let_former_steps_go(), "eviction of steps of former ranks")
            if self.replicas is not None:
                self.replicas.saved(StepId(event.serial, event.step))
        elif isinstance(event, StepPromoted):
            tier = state.tier(event.tier)
            if (held := tier.steps.held.get(StepId(event.serial, event.step))) is not None:
                promoted = StepOnTier.of(held.record, held.btree_key)
                self.group.publish(Promoted(tier.name, promoted, tier.used, event.seconds, event.lag))
        elif isinstance(event, StepEvicted):
            step = StepId(event.serial, event.step)
            if state.tier(event.tier).in_memory:
                self.votes.coordinator.forget(step)
                self.opening.give_back()
            adopt_if_gone(state, step)  # as the others do
            self.group.publish(Evicted(event.step, event.serial, event.tier))
        elif isinstance(event, TierFailed) and state.tier(event.tier).shared:
            self.group.publish(TierChanged(event.tier, Failure.of(event.error), event.retry_in))
        elif isinstance(event, TierRecovered) and state.tier(event.tier).shared:
            catalog = catalog_of(state.tier(event.tier))
            self.group.publish(TierChanged(event.tier, None, 0.0, catalog, state.identity.marker))

    def report_stuck(self, step: StepId, tier: Tier, error: Exception) -> None:
        """Report to the other ranks that a step cannot be promoted to a tier for now."""
        self.group.publish(Stuck(step.step, step.serial, tier.name, Failure.of(error)))

    async def _apply(self, message: Logged) -> None:
        state = self._state
        self._heard_at = asyncio.get_running_loop().time()
        match message:
            case Committed() | CompareReplicas() | Aborted(tier=None):
                await self.votes.apply(message)
            case Aborted():
                await self._not_promoted(message)
            case Promote():
                self.commits.execute(message)
            case Promoted():
                await self._promoted(message)
            case Evicted():
                await self._evicted(message)
            case Stuck():
                state.tier(message.tier).steps.stuck[StepId(message.serial, message.step)] = message.failure.error()
            case SaveAt():
                self._save_at(message)
            case TierChanged():
                self._tier_changed(message)
            case RendezvousOpened() | RendezvousComplete():
                self.restores.rendezvous.apply(message)
            case Replicate() if self.replicas is not None:
                self.replicas.apply_request(message)
            case Replicated() if self.replicas is not None:
                await self.replicas.apply_result(message)
        state.changed.notify()

    async def _apply_report(self, rank: int, message: Reported) -> None:
        """At rank 0: act on a report of another rank."""
        match message:
            case RestoreRequested() | RestoreJoined() | RestoreWithdrawn():
                self.restores.rendezvous.apply_report(rank, message)
            case Damaged() | Signalled() | Wanted():
                self.reports.apply(rank, message)
            case Find():
                self.group.start(self.votes.dedupe.answer(rank, message), f"chunks that rank {rank} asked for")
            case Ballot():
                await self.votes.coordinator.voted(rank, message)
            case ReplicaDigests():
                self.votes.comparison.answered(rank, message)
            case PartDropped():
                await self.votes.coordinator.part_dropped(rank, StepId(message.serial, message.step))

    async def _not_promoted(self, failed: Aborted) -> None:
        assert failed.tier is not None
        step = StepId(failed.serial, failed.step)
        self.commits.written.pop((step, failed.tier), None)
        reason = f"{step} was not committed on tier {failed.tier!r}: {failed.reason}"
        self._state.events.emit(CommitFailed(step.step, step.serial, failed.tier, failed.ranks, failed.reason))
        await self.votes.end_streamed(step, RanksUnavailable(reason, failed.ranks))

    async def _promoted(self, promoted: Promoted) -> None:
        record, step = promoted.held.record, promoted.held.id
        tier = self._state.tier(promoted.tier)
        tier.steps.drop(step)  # with what is remembered of its index, if it was committed anew
        tier.steps.held[step] = Held(record, promoted.held.btree_key)
        if step in self._state.membership.undecided:  # it did not fit into RAM
            self._state.branch.committed(record)
        tier.remote.used = promoted.used
        tier.steps.tombstones.discard(step)
        tier.steps.stuck.pop(step, None)
        await self.votes.end_streamed(step, None)
        written = self.commits.written.pop((step, tier.name), 0)
        self._state.events.emit(
            StepPromoted(step.step, step.serial, tier.name, record.nbytes, written, promoted.seconds, promoted.lag)
        )

    async def _evicted(self, evicted: Evicted) -> None:
        step, tier = StepId(evicted.serial, evicted.step), self._state.tier(evicted.tier)
        if not tier.in_memory:
            tier.steps.drop(step)
            self._collector.evictor.tell_gone(step, tier)
        elif step in tier.steps.held:
            if await self._collector.evictor.drop_with_others(step, tier):
                self._departed.is_known(step)
            self.commits.forget(step)
            self.opening.give_back()
        adopt_if_gone(self._state, step)

    def _tier_changed(self, changed: TierChanged) -> None:
        tier = self._state.tier(changed.tier)
        tier.health.error = None if changed.failure is None else changed.failure.error()
        if tier.health.error is not None:
            self._state.events.emit(TierFailed(tier.name, tier.health.error, changed.retry_in))
            return
        if changed.marker is not None and changed.marker != self._state.identity.marker:
            self._state.identity.marker = changed.marker
            self.group.start(mark_ram(self._state), "mark of RAM")
        if changed.catalog is not None and self._state.identity.marker is not None:
            adopt_catalog(tier, changed.catalog, self._state.identity.marker)
        self._state.events.emit(TierRecovered(tier.name))

    async def _let_former_steps_go(self) -> None:
        """At rank 0: evict steps of former ranks once a newer one replaces them: no save can use their memory."""
        first = self._state.tiers[0]
        for step, homes in tuple(self.commits.homes.items()):
            if step not in first.steps.held:
                self.commits.homes.pop(step, None)  # the task of another commit may have been here
                continue
            needed = why_kept(self._state, step, first) or waits_for_promotion(self._state, step, first)
            if any(part != home for part, home in homes.items()) and not needed:
                with suppress(Conflict, NotFound):
                    await self._collector.evictor.evict(step, first)
