"""Reports of ranks to rank 0, which acts for all: damage on shared tiers, signals, promotions that they ask for.

Any rank may find damage on a shared tier, and the rank whose machine will be taken away may be the only one that is
warned. But rank 0 alone writes to shared tiers and asks the policies.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable

from tieredckpt.blobs.ram.slab import page_aligned
from tieredckpt.concurrency import in_thread
from tieredckpt.engine import limits
from tieredckpt.engine.keeping.collector import Collector
from tieredckpt.engine.ranks.communicator import COORDINATOR
from tieredckpt.engine.ranks.group import Group
from tieredckpt.engine.ranks.messages import Damaged, Signalled, Wanted
from tieredckpt.engine.repairing.repair import repair_chunks, repair_index
from tieredckpt.engine.restoring.source import Damage, StepSource
from tieredckpt.engine.state.state import State
from tieredckpt.engine.tier import step_index
from tieredckpt.engine.tier.chunk_reader import read_chunk
from tieredckpt.engine.tier.tier import Tier
from tieredckpt.errors import Corrupt, NotFound, RanksUnavailable, TieredCkptError, TierUnavailable
from tieredckpt.format import layout
from tieredckpt.format.manifest import StepId, decode_step

__all__ = ["Reports"]

_log = logging.getLogger("tieredckpt")


class Reports:
    """Sends reports to rank 0, and carries them out there. Lives on the engine's loop.

    ``promote_at_once`` promotes a step to a tier before all other steps.
    """

    def __init__(
        self,
        state: State,
        collector: Collector,
        group: Group,
        promote_at_once: Callable[[StepId, Tier], Awaitable[object]],
    ) -> None:
        self._state = state
        self._collector = collector
        self._group = group
        self._promote_at_once = promote_at_once
        self._guards_repairing = asyncio.Lock()
        self._promoting: set[tuple[StepId, str]] = set()

    # -- every other rank ---------------------------------------------------------------------------------

    def signalled(self, name: str, *, on: bool) -> None:
        """Report that this rank's trainer has raised a signal, or withdrawn it."""
        if not self._group.coordinates:
            self._group.report(Signalled(name, on))

    def damaged(
        self, step: StepId, damage: Iterable[Damage], unreadable: Iterable[tuple[Tier, TieredCkptError]]
    ) -> None:
        """Report damage that this rank has found on tiers that rank 0 manages."""
        found: dict[str, set[bytes]] = {}
        for each in damage:
            if not self._state.manages(each.tier):
                found.setdefault(each.tier.name, set()).add(each.digest)
        for name, digests in found.items():
            self._group.report(Damaged(step.step, step.serial, name, tuple(digests)))
        for tier, error in unreadable:
            if not self._state.manages(tier) and not isinstance(error, TierUnavailable):
                self._group.report(Damaged(step.step, step.serial, tier.name, ()))

    async def promote(self, step: StepId, tier: Tier) -> None:
        """Ask rank 0 to promote a step to a shared tier at once.

        Raises `RanksUnavailable` when it is not there soon; rank 0 may still be copying it, and can be asked again.
        """
        self._group.report(Wanted(step.step, step.serial, tier.name))
        try:
            async with asyncio.timeout(limits.in_force.ask_rank_0_again):
                await self._state.changed.until(lambda: step in tier.steps.held)
        except TimeoutError:
            patience = limits.in_force.ask_rank_0_again
            what = f"rank {COORDINATOR} has not brought {step} to tier {tier.name!r} within {patience:.0f} s"
            raise RanksUnavailable(what, [COORDINATOR]) from None

    # -- rank 0 ---------------------------------------------------------------------------------------

    def apply(self, rank: int, report: Damaged | Signalled | Wanted) -> None:
        """Act on a report of a rank; long work runs in a task of its own."""
        match report:
            case Signalled():
                _log.info("rank %d: signal %r is %s", rank, report.name, "raised" if report.on else "withdrawn")
                self._state.observation.signal(report.name, on=report.on)
                self._state.changed.notify()
            case Damaged():
                self._group.start(self._repair(rank, report), f"repair of damage that rank {rank} found")
            case Wanted():
                self._group.start(self._promote(report), f"promotion that rank {rank} asked for")

    async def _promote(self, wanted: Wanted) -> None:
        step, tier = StepId(wanted.serial, wanted.step), self._state.tier(wanted.tier)
        if (step, tier.name) in self._promoting or step in tier.steps.held:  # all ranks may have been warned
            return
        self._promoting.add((step, tier.name))
        try:
            await self._promote_at_once(step, tier)
        except TieredCkptError as error:  # that rank asks again while there is time
            _log.warning("%s could not be brought to tier %r at once: %s", step, tier.name, error)
        finally:
            self._promoting.discard((step, tier.name))

    async def _repair(self, rank: int, report: Damaged) -> None:
        """Repair damage that rank 0 finds too; of many reports of one damage, the first starts the repair."""
        step, tier = StepId(report.serial, report.step), self._state.tier(report.tier)
        async with self._guards_repairing:
            if step not in tier.steps.held:
                return
            _log.warning("rank %d found damage of %s on tier %r", rank, step, tier.name)
            try:
                if report.digests:
                    await repair_chunks(
                        self._state, self._collector, step, await self._look_at(step, tier, set(report.digests))
                    )
                else:
                    await self._look_at_index(step, tier)
            except TieredCkptError as error:
                _log.error("%s could not be repaired on tier %r: %s", step, tier.name, error)

    async def _look_at(self, step: StepId, tier: Tier, digests: set[bytes]) -> list[Damage]:
        """Read the chunks on the tier; those that are damaged or missing there."""
        found: list[Damage] = []
        async with StepSource.open(self._state, step, only=tier) as source:
            for key, array in source.index.arrays.items():
                nbytes = array.grid.cell_nbytes
                for chunk in array.chunks:
                    if chunk.digest not in digests:
                        continue
                    digests.discard(chunk.digest)
                    async with self._state.scratch.lend(page_aligned(nbytes)) as memory:
                        try:
                            await read_chunk(tier, chunk.where, chunk.digest, memory[:nbytes], self._state.pool)
                        except (Corrupt, NotFound) as error:
                            found.append(Damage(tier, chunk.digest, layout.array_key(key), error, chunk.where))
        return found

    async def _look_at_index(self, step: StepId, tier: Tier) -> None:
        try:
            await in_thread(decode_step, *await step_index.read(tier, step), pool=self._state.pool)
        except (Corrupt, NotFound) as error:
            await repair_index(self._state, self._collector, step, tier, error, tier.steps.indexes.get(step))
