"""Keeps one tier up to date behind the training: connects it, promotes what is due, catches up after failures."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from tieredckpt.blobs.base import Outgrown
from tieredckpt.concurrency import being_cancelled
from tieredckpt.engine import limits
from tieredckpt.engine.keeping.collector import Collector
from tieredckpt.engine.keeping.full_tier import NoRoom, evict_older
from tieredckpt.engine.keeping.policies import is_due
from tieredckpt.engine.keeping.retention import after_commit
from tieredckpt.engine.opening.connect import reopen
from tieredckpt.engine.restoring.source import SilentSource
from tieredckpt.engine.state.promotions import promoting
from tieredckpt.engine.state.state import State
from tieredckpt.engine.tier import marker_file
from tieredckpt.engine.tier.tier import Tier
from tieredckpt.errors import Conflict, Corrupt, NoSpace, NotFound, RanksUnavailable, TieredCkptError, TierUnavailable
from tieredckpt.events import TierRecovered
from tieredckpt.format.manifest import StepId

__all__ = ["Promote", "Promoter", "ReportStuck"]

Promote = Callable[[StepId, Tier], Coroutine[Any, Any, int]]
"""Copies a step to a tier; returns the bytes written."""
ReportStuck = Callable[[StepId, Tier, Exception], None]
"""Tells others that a step cannot come to a tier for now."""

_log = logging.getLogger("tieredckpt")


class Promoter:
    """The background work of one tier. Lives on the engine's loop."""

    def __init__(
        self,
        state: State,
        collector: Collector,
        tier: Tier,
        connect: Callable[[Tier], Awaitable[None]],
        promote: Promote,
        report_stuck: ReportStuck | None = None,
    ) -> None:
        self.tier = tier
        self.busy: StepId | None = None
        self._copying: asyncio.Task[int] | None = None
        self._state = state
        self._collector = collector
        self._connect = connect
        self._copy = promote
        self._report_stuck = report_stuck
        self._retry_at: dict[StepId, float] = {}
        """Time at which steps are tried again that a silent tier may have."""
        self._rests = 0
        """How often nothing was found due."""
        self._waiters = 0
        """How many wait for that."""
        self._flushes = 0
        """How many wait until all that can come has come."""

    def next_due(self, *, at_rest: bool = False) -> StepId | None:
        """The step to promote next: the newest that is due, for it is the one a restart would take.

        With ``at_rest``: the one that will be due when what is under way has ended.
        """
        state = self._state
        if self.tier.in_memory:
            return None
        view = state.view(at_rest=at_rest)
        waiting: Iterable[StepId] = state.waiting(self.tier)
        if mending := self.tier.steps.to_mend():
            waiting = sorted({*waiting, *mending}, reverse=True)
        for step in waiting:
            if step not in self.tier.steps.stuck and is_due(state, step, self.tier, view):
                return step
        return None

    @contextmanager
    def flushing(self) -> Iterator[None]:
        """While the block waits until all has come that can, try nothing a second time: the wait would never end."""
        self._flushes += 1
        try:
            yield
        finally:
            self._flushes -= 1
            self._state.changed.notify()

    async def rest(self) -> None:
        """Return when it has looked anew and found nothing due, or when its tier fails."""
        before = self._rests
        self._waiters += 1
        try:
            self._state.changed.notify()
            await self._state.changed.until(lambda: self._rests != before or self._fails)
        finally:
            self._waiters -= 1

    @property
    def _fails(self) -> bool:
        """Whether its tier failed and is not coming back just now."""
        return self.tier.health.error is not None and not self.tier.steps.scanning

    def give_way(self, step: StepId) -> None:
        """Interrupt the promotion of an older step, if one is under way; it is begun again when it is next."""
        if self.busy is not None and self.busy < step and self._copying is not None:
            self._copying.cancel()

    async def run(self) -> None:
        """Work until cancelled. Errors of the tier are reported and retried, never raised."""
        while not being_cancelled():
            try:
                if self.tier.health.error is not None:
                    # Nothing but time brings a failed tier back.
                    await asyncio.sleep(max(0.0, self.tier.health.retry_at - time.monotonic()))
                    await self._come_back_with_room()
                    self.tier.health.answered = True
                await self._collector.evictor.find_out(self.tier)
                step = self.next_due()
                if step is not None:
                    await self._promote(step)
                    continue
                self._succeeded()
                self._rests += 1
                if self._waiters:
                    self._state.changed.notify()
                soonest = math.inf if self._flushes else min(self._retry_at.values(), default=math.inf)
                await self._state.changed.wait(min(soonest - time.monotonic(), limits.in_force.ask_policies_again))
                if not self._flushes:
                    self._forget_silence()  # not before all else is done, or a tier that works would never be told to
            except TieredCkptError as error:
                self._state.report(self.tier, error)
            except Exception as error:
                _log.exception("tier %r: unexpected failure", self.tier.name)
                self._state.report(self.tier, error)

    async def _come_back(self) -> None:
        """Check that a failed tier works, is the same one, and is still locked by us; otherwise open it again."""
        tier = self.tier
        try:
            if await self._is_itself():
                return
        except Outgrown:
            await tier.disconnect()
            tier.lease = None  # it lies elsewhere, with all else
        if tier.marker is None and tier.blobs is not None:
            await reopen(self._state, tier)
        tier.marker = None  # what it holds is not known
        await self._connect(tier)

    async def _come_back_with_room(self) -> None:
        """`_come_back`; a device without room for a lease gives up an older step for one that is due."""
        try:
            await self._come_back()
        except NoSpace:
            due = self.next_due()
            if self.tier.marker is None or due is None:
                raise
            if not await evict_older(self._state, self._collector, due, self.tier, 0):
                raise
            await self._come_back()

    async def _is_itself(self) -> bool:
        tier = self.tier
        if tier.marker is None:
            return False
        try:
            if not await marker_file.is_still(tier.store, tier.marker):
                return False
            if tier.lease is not None:
                await tier.lease.renew()  # which shows besides that it can be written to
                if tier.lease.taken_over:
                    return False
        except TierUnavailable:
            # Nobody mounts shared memory again: where that went away it is made anew.
            if not tier.in_memory and not await reopen(self._state, tier):
                raise
            return False
        return True

    async def _promote(self, step: StepId) -> None:
        self.busy = step
        try:
            with promoting(self._state, self.tier):  # from now on, not from when the task first runs
                self._copying = asyncio.create_task(self._copy(step, self.tier))
                try:
                    await self._copying
                except asyncio.CancelledError:
                    if being_cancelled():
                        raise
                    return  # it gave way
            self._succeeded()
            await after_commit(self._state, self._collector, self.tier)
        except NoRoom as error:
            if not any(held > step and self._state.on_line(held.serial) for held in self.tier.steps.held):
                raise
            # As if it had come and left for those: they are newer, and fill the tier.
            _log.warning("%s does not come to tier %r, which newer ones fill: %s", step, self.tier.name, error)
            self.tier.steps.tombstones.add(step)
            if self._report_stuck is not None:
                self._report_stuck(step, self.tier, error)
        except (SilentSource, Corrupt, NotFound, Conflict, RanksUnavailable) as error:
            if step in self._state.records() and step not in self.tier.steps.tombstones:  # was not evicted meanwhile
                _log.error("%s cannot be promoted to tier %r: %s", step, self.tier.name, error)
                self._set_aside(step, error)
                if isinstance(error, RanksUnavailable):  # they would be waited for as long with each other step
                    self._set_aside_what_ranks_have(error)
        finally:
            self.busy = self._copying = None
            self._state.changed.notify()

    def _set_aside(self, step: StepId, error: TieredCkptError) -> None:
        self.tier.steps.stuck[step] = error
        if self._report_stuck is not None:
            self._report_stuck(step, self.tier, error)
        if isinstance(error, (SilentSource, RanksUnavailable)):
            self._retry_at[step] = time.monotonic() + limits.in_force.source_retry

    def _set_aside_what_ranks_have(self, error: RanksUnavailable) -> None:
        view, in_ram, stuck = self._state.view(), self._state.tiers[0].steps.held, self.tier.steps.stuck
        for step in tuple(self._state.waiting(self.tier)):
            if step in in_ram and step not in stuck and is_due(self._state, step, self.tier, view):
                self._set_aside(step, error)

    def _forget_silence(self) -> None:
        for step in [step for step, when in self._retry_at.items() if when <= time.monotonic()]:
            del self._retry_at[step]
            self.tier.steps.stuck.pop(step, None)

    def _succeeded(self) -> None:
        if self.tier.health.recover():
            _log.info("tier %r works again", self.tier.name)
            self._state.events.emit(TierRecovered(self.tier.name))
            self._state.changed.notify()
