"""The mode of one rank of several: saves, restores and promotions are the ranks' together."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack
from functools import partial
from typing import Any, TypeVar

from tieredckpt.concurrency import in_thread
from tieredckpt.config import TierConfig
from tieredckpt.config.kinds import kind_of
from tieredckpt.engine import limits
from tieredckpt.engine.keeping.collector import Collector
from tieredckpt.engine.mode.alone import Alone, Changed
from tieredckpt.engine.ranks.commit.dedupe import Dedupe
from tieredckpt.engine.ranks.group import Group
from tieredckpt.engine.ranks.ranked import Ranked
from tieredckpt.engine.restoring.lookup import Wanted, look_up
from tieredckpt.engine.restoring.restore import Unreadable
from tieredckpt.engine.restoring.source import ChosenStep, Damage
from tieredckpt.engine.saving.call import SaveCall
from tieredckpt.engine.saving.save import Saved
from tieredckpt.engine.saving.slower_tiers import OwnTiers, SlowerTiers
from tieredckpt.engine.state.membership import Membership, Streamed
from tieredckpt.engine.state.state import State
from tieredckpt.engine.tier.index_cache import packs_of
from tieredckpt.engine.tier.packs import WrittenPacks
from tieredckpt.engine.tier.tier import Tier
from tieredckpt.errors import Invalid
from tieredckpt.format.manifest import StepId, StepIndex, StepRecord
from tieredckpt.format.ocdbt import Extent
from tieredckpt.tree.flatten import Flat

__all__ = ["AmongRanks"]

T = TypeVar("T")


class SharedTiers(OwnTiers):
    """Slower tiers that rank 0 manages for all ranks. Lives on the engine's loop."""

    def __init__(self, state: State, collector: Collector, dedupe: Dedupe) -> None:
        super().__init__(state, collector)
        self._dedupe = dedupe

    async def hold_packs(self, tier: Tier, until_committed: AsyncExitStack) -> None:
        """Hold no lock: a commit holds it while it waits for a silent rank, and a save must not wait for that.

        ``tier.packs.streamed_to`` lists the packs that the save refers to, and so keeps them from collection.
        """

    async def find(self, tier: Tier, sizes: Mapping[bytes, int]) -> dict[bytes, Extent]:
        """See `SlowerTiers.find`; rank 0 alone knows what a shared tier has."""
        if self._state.manages(tier):
            return await super().find(tier, sizes)
        return await self._dedupe.find(tier, sizes)

    def add_packs(self, tier: Tier, written: WrittenPacks) -> None:
        """See `SlowerTiers.add_packs`; rank 0 records those of other ranks when it commits."""
        if self._state.manages(tier):
            tier.packs.add(written)

    async def commit(self, tier: Tier, index: StepIndex, packs: Mapping[str, int]) -> None:
        """Keep this rank's part, which rank 0 commits with those of the others."""
        referred = await in_thread(packs_of, index.arrays, pool=self._state.pool)
        self._state.membership.streamed[index.record.id] = Streamed(tier, index, referred, frozenset(packs))


class AmongRanks(Alone):
    """One rank of several, see `Alone`; `ranked` acts together with the other ranks."""

    def __init__(
        self,
        state: State,
        collector: Collector,
        group: Group,
        open_tiers: Callable[..., Awaitable[None]],
        promote_at_once: Callable[[StepId, Tier], Awaitable[object]],
    ) -> None:
        if not state.read_only:
            _check_derived(state.config.tiers)
        state.membership = Membership(
            group.rank, group.size, tuple(group.local_ranks), state.membership.role, group.run
        )
        self.ranked = Ranked(state, collector, group, open_tiers, partial(look_up, state), promote_at_once)
        self.report_stuck = self.ranked.report_stuck
        self._refused: tuple[int, BaseException, asyncio.TimerHandle] | None = None
        """The save that this rank could not begin, the error, and the timer that tells the others; None once told."""
        super().__init__(state, collector)

    def _make_slower_tiers(self) -> SlowerTiers:
        return SharedTiers(self.state, self.collector, self.ranked.votes.dedupe)

    async def open(self, open_tiers: Callable[[], Awaitable[None]]) -> None:
        await self.ranked.open()

    async def leave(self, *, done: bool, in_order: bool) -> None:
        self._refuse()
        if in_order:
            await self.ranked.group.part()
        if not self.ranked.group.ended:  # rank 0 may still commit what this rank has voted for: its parts stay in RAM
            self.state.membership.undecided.update(self.ranked.votes.attempts.voted_for.values())

    async def close(self, *, may_remove: Callable[[], bool]) -> None:
        await self.ranked.close()
        if self.ranked.replicas is not None:
            await self.ranked.replicas.close(remove=may_remove())

    async def save(self, call: SaveCall, flat: Flat, save: Callable[..., Awaitable[Saved]]) -> Saved:
        self._refuse(but=call.step)
        return await self.ranked.save(call, flat, save)

    def not_begun(self, step: int, error: BaseException) -> None:
        self._refuse(but=step)
        # Not at once: who is told what cannot be stored may leave it out and save the step again.
        timer = asyncio.get_running_loop().call_later(limits.in_force.save_again, self._refuse)
        self._refused = step, error, timer

    def _refuse(self, *, but: int | None = None) -> None:
        """Vote no on the save that could not begin, unless it is of the step ``but``, which is made after all."""
        if self._refused is None:
            return
        (step, error, timer), self._refused = self._refused, None
        timer.cancel()
        if step != but:
            self.ranked.count_as_saved(step, self.state.branch.origin)
            self.ranked.give_up(step, error)

    def is_due(self, step: int) -> bool:
        return self.ranked.schedule.due(step)

    def signalled(self, name: str, *, on: bool) -> None:
        self.ranked.reports.signalled(name, on=on)

    async def promote(self, step: StepId, tier: Tier) -> int:
        return await self.ranked.commits.promote(step, tier)

    async def ask_to_promote(self, step: StepId, tier: Tier) -> None:
        if self.state.manages(tier):
            await super().ask_to_promote(step, tier)
        else:
            await self.ranked.reports.promote(step, tier)

    async def reached(self, step: StepId, name: str, wait: Callable[[Changed | None], Awaitable[None]]) -> None:
        await wait(partial(self.ranked.heard_more, step, since=asyncio.get_running_loop().time()))

    async def drained(self) -> None:
        self._refuse()
        await self.ranked.drained()

    async def told(self) -> None:
        await self.ranked.group.all_sent()

    async def restoring(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        self._refuse()  # after the restore it would count as another save
        return await self.ranked.restores.together(work)

    async def look_up(self, wanted: Wanted) -> tuple[StepId, StepRecord] | None:
        return await self.ranked.restores.look_up(wanted)

    @property
    def chosen(self) -> ChosenStep | None:
        return self.ranked.restores.chosen

    async def begin_reading(self) -> bool:
        await self.ranked.restores.begin()
        return True

    def damaged(self, step: StepId, damage: Sequence[Damage], unreadable: Unreadable) -> None:
        self.ranked.reports.damaged(step, damage, unreadable)

    def restored(self) -> None:
        self.ranked.schedule.reset()


def _check_derived(tiers: Sequence[TierConfig]) -> None:
    """Raise `Invalid` for a tier with lossy rules that could get no step: in RAM no rank has more than its part."""
    shared = False
    for tier in tiers:
        if tier.lossy and not shared:
            raise Invalid(
                f"tier {tier.name!r} has `lossy` rules, and before it is no tier that all ranks see, from which rank 0 "
                f"could derive whole steps: put one without `lossy` rules before it, such as a shared folder"
            )
        shared = shared or "all" in kind_of(tier).scopes
