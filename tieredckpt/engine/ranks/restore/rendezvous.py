"""The rendezvous of ranks before a restore: it begins once all ranks have called `restore`.

A rank that calls `restore` tells rank 0, and waits; one that gives up says so. Rank 0, when it restores itself, waits
until all have asked. Then it asks each whether it still waits, for some may have given up meanwhile. Once all are
there it tells them the *epoch* of the restore, a number by which everything that belongs to it is named. So the next
restore that all ranks call is the same for all, whatever became of earlier ones.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress

from tieredckpt.engine.notify import Notification
from tieredckpt.engine.ranks.communicator import COORDINATOR
from tieredckpt.engine.ranks.group import Group
from tieredckpt.engine.ranks.messages import (
    RendezvousComplete,
    RendezvousOpened,
    RestoreJoined,
    RestoreRequested,
    RestoreWithdrawn,
)
from tieredckpt.errors import RanksUnavailable
from tieredckpt.format.merging import show_ranks

__all__ = ["Rendezvous"]


class Rendezvous:
    """One rank's way to the others when it restores. Lives on the engine's loop.

    ``met`` is called on every rank, with the epoch of a restore, once all ranks have asked for it; ``absent``
    where this rank has given up meanwhile, and the others are not to wait for it.
    """

    def __init__(self, group: Group, met: Callable[[int], None], absent: Callable[[int], None]) -> None:
        self._group = group
        self._met = met
        self._absent = absent
        self._asked = 0
        """How often this rank has asked."""
        self._waiting: asyncio.Future[RendezvousComplete] | None = None
        self._asking: dict[int, int] = {}
        """At rank 0: the ranks that wait, and how often each has asked."""
        self._called: dict[int, int] = {}
        """Those of them that were called, by the ask that was meant."""
        self._here: set[int] = set()
        """Those that have answered."""
        self._came = Notification()
        self._epoch = 0

    async def meet(self) -> int:
        """Return once all ranks are here: the epoch of the restore that begins.

        Raises `RanksUnavailable` when some do not come within the deadline; then it begins on none.
        """
        met = await (self._gather() if self._group.coordinates else self._ask())
        if met.missing:
            raise RanksUnavailable(
                f"{show_ranks(met.missing)} did not call restore within {self._group.deadline:g} s, so none has "
                "restored; it is a call of all ranks: make it on all of them again",
                met.missing,
            )
        return met.epoch

    async def _gather(self) -> RendezvousComplete:
        self._called.clear()
        self._here.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(self._group.deadline):
                while len(self._here) < len(self._group.others):
                    self._ask_who_waits()
                    await self._came.wait()
        missing = tuple(rank for rank in self._group.others if rank not in self._here)
        if not missing:
            self._epoch += 1
            self._met(self._epoch)
        met = RendezvousComplete(self._epoch, dict(self._asking), missing)
        self._asking.clear()
        self._group.tell(met)
        return met

    def _ask_who_waits(self) -> None:
        """Once all have asked, ask those back whose ask is new whether they still wait."""
        if len(self._asking) == len(self._group.others):
            asks = {rank: ask for rank, ask in self._asking.items() if self._called.get(rank) != ask}
            if asks:
                self._called |= asks
                self._group.tell(RendezvousOpened(asks))

    async def _ask(self) -> RendezvousComplete:
        self._asked += 1
        waiting: asyncio.Future[RendezvousComplete] = asyncio.get_running_loop().create_future()
        self._waiting = waiting
        self._group.report(RestoreRequested(self._asked))
        try:
            async with asyncio.timeout(self._group.patience):
                return await waiting
        except BaseException as error:
            if waiting.cancelled():
                self._group.report(RestoreWithdrawn(self._asked))
            elif not waiting.result().missing:
                self._absent(waiting.result().epoch)
            if not isinstance(error, TimeoutError):
                raise
            raise RanksUnavailable(
                f"rank {COORDINATOR} did not call restore within {self._group.deadline:g} s, or has died; it is a call "
                "of all ranks: make it on all of them again",
                [COORDINATOR],
            ) from None
        finally:
            self._waiting = None

    def heard(self, rank: int, said: RestoreRequested | RestoreJoined | RestoreWithdrawn) -> None:
        """At rank 0: a rank asks for a restore, is still there when it was called, or asks no more."""
        match said:
            case RestoreRequested():
                self._asking[rank] = said.number
                self._here.discard(rank)
            case RestoreJoined() if self._asking.get(rank) == said.number:
                self._here.add(rank)
            case RestoreWithdrawn() if self._asking.get(rank) == said.number:
                del self._asking[rank]
                self._here.discard(rank)
        self._came.notify()

    def apply(self, said: RendezvousOpened | RendezvousComplete) -> None:
        """At other ranks: rank 0 has waited for all, and calls or answers who has asked."""
        if isinstance(said, RendezvousComplete) and not said.missing:
            self._met(said.epoch)
        if self._group.rank not in said.asks:
            return
        waiting = self._waiting if said.asks[self._group.rank] == self._asked else None
        if waiting is not None and not waiting.done():
            if isinstance(said, RendezvousComplete):
                waiting.set_result(said)
            else:
                self._group.report(RestoreJoined(self._asked))
        elif isinstance(said, RendezvousComplete) and not said.missing:  # given up after it was called
            self._absent(said.epoch)
