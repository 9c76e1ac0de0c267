"""What a restore does with the other ranks: nothing, for a store of one rank; or by `Ranked`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, TypeVar

from tieredckpt.engine.ranks.ranked import Ranked
from tieredckpt.engine.restoring.lookup import Wanted, look_up
from tieredckpt.engine.restoring.source import Damage
from tieredckpt.engine.state.state import State
from tieredckpt.engine.tier.tier import Tier
from tieredckpt.errors import TieredCkptError
from tieredckpt.format.manifest import StepId, StepRecord

__all__ = ["Alone", "AmongRanks"]

T = TypeVar("T")

Work = Callable[[], Coroutine[Any, Any, T]]
Unreadable = Sequence[tuple[Tier, TieredCkptError]]


class Alone:
    """See `Together`; ``looking`` runs work that reads what the store holds now."""

    def __init__(self, state: State, looking: Callable[[Work[Any]], Awaitable[Any]]) -> None:
        self._state, self._looking = state, looking

    async def restoring(self, work: Work[T]) -> T:
        found: T = await self._looking(work)
        return found

    async def look_up(self, wanted: Wanted) -> tuple[StepId, StepRecord] | None:
        return await look_up(self._state, wanted.step)

    async def begin_reading(self) -> bool:
        return False

    def damaged(self, step: StepId, damage: Sequence[Damage], unreadable: Unreadable) -> None:
        pass

    def restored(self) -> None:
        pass


class AmongRanks:
    """See `Together`."""

    def __init__(self, ranked: Ranked) -> None:
        self._ranked = ranked

    async def restoring(self, work: Work[T]) -> T:
        return await self._ranked.restores.together(work)

    async def look_up(self, wanted: Wanted) -> tuple[StepId, StepRecord] | None:
        return await self._ranked.restores.look_up(wanted)

    async def begin_reading(self) -> bool:
        await self._ranked.restores.begin()
        return True

    def damaged(self, step: StepId, damage: Sequence[Damage], unreadable: Unreadable) -> None:
        self._ranked.reports.damaged(step, damage, unreadable)

    def restored(self) -> None:
        self._ranked.plan.reset()
