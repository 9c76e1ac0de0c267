"""Keeps one tier up to date behind the training: connects it, promotes what is due, catches up after failures."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

from tieredckpt.engine.ask import is_due
from tieredckpt.engine.collector import Collector
from tieredckpt.engine.copier import copy_step
from tieredckpt.engine.state import State
from tieredckpt.engine.tier import Tier
from tieredckpt.errors import Conflict, Corrupt, NotFound, TieredCkptError
from tieredckpt.events import TierFailed, TierRecovered
from tieredckpt.format.manifest import StepId

__all__ = ["Promoter"]

_log = logging.getLogger("tieredckpt")


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
        self._lost: set[StepId] = set()
        """Steps with a chunk that is intact nowhere: they cannot be promoted."""

    def next_due(self) -> StepId | None:
        """The step to promote next: the newest that is due, for it is the one a restart would take."""
        state = self._state
        view = state.view()
        waiting = (step for step in state.records() if step not in self._lost and is_due(state, step, self.tier, view))
        return max(waiting, default=None)

    @property
    def idle(self) -> bool:
        """Whether the tier has all that it should have."""
        return self.busy is None and self.next_due() is None

    async def run(self) -> None:
        """Work until cancelled. Errors of the tier are reported and retried, never raised."""
        while True:
            wait = self.tier.retry_at - time.monotonic() if self.tier.error is not None else 0.0
            if wait > 0:
                await asyncio.sleep(wait)  # nothing but time brings a failed tier back
            try:
                if self.tier.blobs is None or self.tier.marker is None:
                    await self._connect(self.tier)
                    self._succeeded()
                step = self.next_due() if self.tier.index else None
                if step is None and self.tier.error is not None:
                    await self._probe()
                    continue
                if step is None:
                    await self._state.changed.wait()
                    continue
                await self._promote(step)
            except TieredCkptError as error:
                self._failed(error)
            except Exception as error:
                _log.exception("tier %r: unexpected failure", self.tier.name)
                self._failed(error)

    async def _promote(self, step: StepId) -> None:
        self.busy = step
        try:
            await copy_step(self._state, self._collector, step, self.tier)
        except (Corrupt, NotFound) as error:
            if step not in self._state.records():
                return  # it was evicted meanwhile
            _log.error("%s cannot be promoted to tier %r: %s", step, self.tier.name, error)
            self._lost.add(step)
            self._state.changed.beat()
            return
        finally:
            self.busy = None
        self._succeeded()
        await self._collector.settle(self.tier)

    async def _probe(self) -> None:
        """Ask a failed tier that nothing is due for whether it works again."""
        await self.tier.probe()
        self._succeeded()

    def _succeeded(self) -> None:
        if self.tier.recover():
            _log.info("tier %r works again", self.tier.name)
            self._state.events.emit(TierRecovered(self.tier.name))
        self._state.changed.beat()

    def _failed(self, error: Exception) -> None:
        delay = self.tier.fail(error)
        level = logging.ERROR if isinstance(error, Conflict) else logging.WARNING
        _log.log(level, "tier %r failed, next try in %.1f s: %s", self.tier.name, delay, error)
        self._state.events.emit(TierFailed(self.tier.name, error, delay))
        self._state.changed.beat()

    def is_lost(self, step: StepId) -> bool:
        """Whether the step cannot be promoted, since a chunk of it is intact nowhere."""
        return step in self._lost
