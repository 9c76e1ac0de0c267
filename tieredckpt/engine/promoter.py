"""Keeps one tier up to date behind the training: connects it, promotes what is due, catches up after failures."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

from tieredckpt.engine.ask import is_due
from tieredckpt.engine.collector import Collector
from tieredckpt.engine.copier import copy_step
from tieredckpt.engine.source import SilentSource
from tieredckpt.engine.state import State
from tieredckpt.engine.tier import Tier
from tieredckpt.errors import Corrupt, NotFound, TieredCkptError, TierUnavailable
from tieredckpt.events import TierRecovered
from tieredckpt.format.manifest import StepId

__all__ = ["Promoter"]

_log = logging.getLogger("tieredckpt")

_SOURCE_RETRY = 2.0
"""Seconds until a step that only a silent tier has the bytes of is tried again."""


class Promoter:
    """The background work of one tier. Lives on the engine's loop."""

    def __init__(
        self, state: State, collector: Collector, tier: Tier, connect: Callable[[Tier], Awaitable[None]]
    ) -> None:
        self.tier = tier
        self.busy: StepId | None = None
        self._state = state
        self._collector = collector
        self._connect = connect
        self.stuck = tier.stuck
        """Steps whose bytes cannot be had: a chunk is intact nowhere, or a tier that may have it is silent."""
        self._retry_at: dict[StepId, float] = {}
        """When those are tried again that a silent tier may have."""

    def next_due(self) -> StepId | None:
        """The step to promote next: the newest that is due, for it is the one a restart would take."""
        state = self._state
        if self.tier.index == 0:
            return None
        view = state.view()
        waiting = (step for step in state.records() if step not in self.stuck and is_due(state, step, self.tier, view))
        return max(waiting, default=None)

    @property
    def idle(self) -> bool:
        """Whether the tier has all that it should have."""
        return self.busy is None and self.next_due() is None

    async def run(self) -> None:
        """Work until cancelled. Errors of the tier are reported and retried, never raised."""
        while True:
            try:
                if self.tier.error is not None:
                    # Nothing but time brings a failed tier back.
                    await asyncio.sleep(max(0.0, self.tier.retry_at - time.monotonic()))
                    await self._come_back()
                self._forget_silence()
                step = self.next_due()
                if step is not None:
                    await self._promote(step)
                    continue
                self._succeeded()
                soonest = min(self._retry_at.values(), default=None)
                await self._state.changed.wait(None if soonest is None else soonest - time.monotonic())
            except TieredCkptError as error:
                self._state.report(self.tier, error)
            except Exception as error:
                _log.exception("tier %r: unexpected failure", self.tier.name)
                self._state.report(self.tier, error)

    async def _come_back(self) -> None:
        """See that a tier that failed works, is still the one that it was, and still ours; else open it anew."""
        tier = self.tier
        if await self._is_itself():
            if tier.lease is not None:
                await tier.lease.renew()
            return
        tier.marker = None
        await self._connect(tier)

    async def _is_itself(self) -> bool:
        if self.tier.marker is None:
            return False
        try:
            return await self.tier.probe()
        except TierUnavailable:
            if self.tier.ram is None:
                raise
            return False  # nobody mounts it again: shared memory that went away is made anew

    async def _promote(self, step: StepId) -> None:
        self.busy = step
        try:
            await copy_step(self._state, self._collector, step, self.tier)
            self._succeeded()
            await self._collector.settle(self.tier)
        except (SilentSource, Corrupt, NotFound) as error:
            if step in self._state.records():  # and was not evicted meanwhile
                _log.error("%s cannot be promoted to tier %r: %s", step, self.tier.name, error)
                self.stuck[step] = error
                if isinstance(error, SilentSource):
                    self._retry_at[step] = time.monotonic() + _SOURCE_RETRY
        finally:
            self.busy = None
            self._state.changed.beat()

    def _forget_silence(self) -> None:
        for step in [step for step, when in self._retry_at.items() if when <= time.monotonic()]:
            del self._retry_at[step], self.stuck[step]

    def _succeeded(self) -> None:
        if self.tier.recover():
            _log.info("tier %r works again", self.tier.name)
            self._state.events.emit(TierRecovered(self.tier.name))
            self._state.changed.beat()
