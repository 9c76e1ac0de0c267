"""The modes of a process that works alone: one that saves, and one that only reads."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, TypeVar

from tieredckpt.engine.admin import Admin
from tieredckpt.engine.keeping.collector import Collector
from tieredckpt.engine.keeping.policies import save_is_due
from tieredckpt.engine.promoting.copy_step import copy_step
from tieredckpt.engine.promoting.promoter import ReportStuck
from tieredckpt.engine.ranks.ram_of_ranks import RamOfRanks
from tieredckpt.engine.refresh import Refresh
from tieredckpt.engine.repairing.background import RepairElsewhere
from tieredckpt.engine.restoring.lookup import Wanted, look_up
from tieredckpt.engine.restoring.restore import Unreadable
from tieredckpt.engine.restoring.source import ChosenStep, Damage
from tieredckpt.engine.saving.call import SaveCall
from tieredckpt.engine.saving.save import Saved
from tieredckpt.engine.saving.slower_tiers import OwnTiers, SlowerTiers
from tieredckpt.engine.state.adoption import adopt_newest
from tieredckpt.engine.state.state import State
from tieredckpt.engine.tier.tier import Tier
from tieredckpt.format.manifest import StepId, StepRecord
from tieredckpt.tree.flatten import Flat

__all__ = ["Alone", "Changed", "Reader"]

T = TypeVar("T")

Work = Callable[[], Coroutine[Any, Any, T]]
Changed = Callable[[Tier], Awaitable[None]]
"""Waits until something changed that may bring a step to a tier; raises when nothing will."""


class Alone:
    """One process that saves, promotes and restores by itself. Lives on the engine's loop.

    The other modes override what they do differently; a method that does nothing here is there for them.
    """

    report_stuck: ReportStuck | None = None
    """Tells others that a step cannot come to a tier for now."""
    repair_elsewhere: RepairElsewhere | None = None
    """Asks another process to repair damage on the tiers that it manages."""

    def __init__(self, state: State, collector: Collector) -> None:
        self.state = state
        self.collector = collector
        self.ram_of_ranks = RamOfRanks(state, collector.evictor)
        self.admin = self._make_admin()
        """The verbs for people."""
        self.slower_tiers = self._make_slower_tiers()
        """The tiers for a save that RAM cannot hold."""

    def _make_admin(self) -> Admin:
        return Admin(self.state, self.collector, self.promote)

    def _make_slower_tiers(self) -> SlowerTiers:
        return OwnTiers(self.state, self.collector)

    # -- life ---------------------------------------------------------------------------------------------

    async def open(self, open_tiers: Callable[[], Awaitable[None]]) -> None:
        """Open the tiers, and continue the newest branch."""
        await open_tiers()
        await self.ram_of_ranks.look()
        adopt_newest(self.state)

    async def reopened(self) -> None:
        """Called after the first tier was connected again."""
        await self.ram_of_ranks.look()

    async def leave(self, *, done: bool, in_order: bool) -> None:
        """Tell the others that this process ends; ``done``: all that was due is done; ``in_order``: it was tried."""

    async def close(self, *, may_remove: Callable[[], bool]) -> None:
        """Release everything; ``may_remove`` says whether RAM may be freed with all that it holds."""

    # -- saves and promotions -----------------------------------------------------------------------------

    async def save(self, call: SaveCall, flat: Flat, save: Callable[[Flat], Awaitable[Saved]]) -> Saved:
        """Save this process's part of a tree, by ``save``."""
        return await save(flat)

    def not_begun(self, step: int, error: BaseException) -> None:
        """Called when a save of ``step`` has failed before it came to `save`."""

    def is_due(self, step: int) -> bool:
        """Whether the schedule wants a save after ``step``; from any thread."""
        return save_is_due(self.state, step)

    def signalled(self, name: str, *, on: bool) -> None:
        """Called when a signal was raised or withdrawn."""

    async def promote(self, step: StepId, tier: Tier) -> int:
        """Copy a step to a tier that this process manages; the bytes written."""
        return await copy_step(self.state, self.collector, step, tier)

    async def ask_to_promote(self, step: StepId, tier: Tier) -> None:
        """Ask for the promotion of a step before older ones, in whichever process does it."""
        await self.admin.promote(step.step, tier.name)

    async def give_way(self, step: StepId, name: str) -> None:
        """Ask the process that manages a tier to interrupt the promotion of an older step."""

    async def reached(self, step: StepId, name: str, wait: Callable[[Changed | None], Awaitable[None]]) -> None:
        """Return when a tier holds a step; ``wait`` waits for changes that this process learns of."""
        await wait(None)

    async def drained(self) -> None:
        """Return when other processes have finished their work for this one. Raises their error."""

    async def told(self) -> None:
        """Return when the other processes have received the changes that this one made."""

    # -- restores -----------------------------------------------------------------------------------------

    async def looking(self, work: Work[T], *, packs: bool = False) -> T:
        """Run work that only looks up what the store holds, and return its result."""
        return await work()

    async def restoring(self, work: Work[T]) -> T:
        """Run the work of a restore and return its result; with several ranks, all succeed or none does."""
        return await self.looking(work)

    async def look_up(self, wanted: Wanted) -> tuple[StepId, StepRecord] | None:
        """See `tieredckpt.engine.restoring.lookup.look_up`."""
        return await look_up(self.state, wanted.step)

    @property
    def chosen(self) -> ChosenStep | None:
        """The step that all ranks restore at present."""
        return None

    async def begin_reading(self) -> bool:
        """Wait until all ranks can read; returns whether other ranks read as well."""
        return False

    def damaged(self, step: StepId, damage: Sequence[Damage], unreadable: Unreadable) -> None:
        """Called when a restore has found damage."""

    def restored(self) -> None:
        """Called when a step was restored to train on."""


class Reader(Alone):
    """A process that changes nothing, and looks again at every call, because another process changes the store."""

    def __init__(self, state: State, collector: Collector) -> None:
        super().__init__(state, collector)
        self._refresh = Refresh(state, self.ram_of_ranks)

    async def looking(self, work: Work[T], *, packs: bool = False) -> T:
        return await self._refresh.looking(work, packs=packs)

    async def close(self, *, may_remove: Callable[[], bool]) -> None:
        await self._refresh.close()
