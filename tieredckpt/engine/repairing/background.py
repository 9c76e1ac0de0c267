"""Repairs damage that a restore has found, in the background."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

from tieredckpt.engine.keeping.collector import Collector
from tieredckpt.engine.repairing.repair import repair_chunks, repair_index
from tieredckpt.engine.restoring.source import Damage
from tieredckpt.engine.state.state import State
from tieredckpt.engine.tier.tier import Tier
from tieredckpt.errors import TieredCkptError, TierUnavailable
from tieredckpt.format.manifest import StepId

__all__ = ["BackgroundRepair"]

_log = logging.getLogger("tieredckpt")

RepairElsewhere = Callable[[StepId, Sequence[Damage], Sequence[tuple[Tier, TieredCkptError]]], Awaitable[None]]
"""Repairs damaged chunks of a step, and its index on tiers where that could not be read."""


class BackgroundRepair:
    """The repairs under way of one process. Lives on the engine's loop.

    ``elsewhere`` asks another process to repair damage on the tiers that it manages; None without such a process.
    """

    def __init__(self, state: State, collector: Collector, elsewhere: RepairElsewhere | None) -> None:
        self._state = state
        self._collector = collector
        self._repair_elsewhere = elsewhere
        self._tasks: set[asyncio.Task[None]] = set()

    def behind(
        self, step: StepId, damage: Sequence[Damage], unreadable: Sequence[tuple[Tier, TieredCkptError]]
    ) -> None:
        """Begin to repair what a restore has found, on tiers that this process manages; failures are logged."""
        state = self._state
        mine = [each for each in damage if each.tier in state.tiers and state.manages(each.tier)]
        torn = [(tier, error) for tier, error in unreadable if state.manages(tier)]
        works: list[Callable[[], Awaitable[None]]] = [partial(self.repair, step, mine, torn)] if mine or torn else []
        if self._repair_elsewhere is not None:
            theirs = [each for each in damage if each not in mine]
            elsewhere = [each for each in unreadable if each not in torn]
            works += [partial(self._repair_elsewhere, step, theirs, elsewhere)] if theirs or elsewhere else []

        async def work() -> None:
            for each in works:
                try:
                    await each()
                except TieredCkptError as error:
                    _log.error("%s could not be repaired: %s", step, error)

        if works:
            task = asyncio.create_task(work(), name=f"tieredckpt repair of {step}")
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def repair(
        self, step: StepId, damage: Sequence[Damage], unreadable: Sequence[tuple[Tier, TieredCkptError]]
    ) -> None:
        """Repair the index and the chunks of a step. Raises the error of a tier that prevents it."""
        for tier, error in unreadable:
            if not isinstance(error, TierUnavailable):
                await repair_index(self._state, self._collector, step, tier, error)
        await repair_chunks(self._state, self._collector, step, damage)

    async def drained(self) -> None:
        """Return when nothing is being repaired."""
        while self._tasks:
            await asyncio.wait(set(self._tasks))

    async def stop(self) -> None:
        """Cancel the repairs that are under way."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
