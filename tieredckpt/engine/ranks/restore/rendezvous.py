"""The rendezvous of ranks before a restore: it begins once all ranks have called `restore`.

A rank that calls `restore` tells rank 0, and waits; a rank that gives up tells rank 0 as well. When rank 0 calls
`restore` itself, it waits until all have asked. Then it asks each to confirm that it still waits, as some may have
given up meanwhile. When all have confirmed, it sends them the *epoch* of the restore, a number that names everything
that belongs to it. So the next restore that all ranks call is the same for all, however earlier ones ended.
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
    """Brings one rank together with the others for a restore. Lives on the engine's loop.

    ``met`` is called on every rank with the epoch of a restore that begins. ``absent`` is called with it on a rank that
    has given up meanwhile: the others must not wait for it.
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
        """Ranks that are to confirm, and the request that each is to confirm."""
        self._here: set[int] = set()
        """Ranks that have confirmed."""
        self._came = Notification()
        self._epoch = 0

    async def meet(self) -> int:
        """Wait until all ranks are here; returns the epoch of the restore that begins.

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
        self._group.publish(met)
        return met

    def _ask_who_waits(self) -> None:
        """When all ranks have asked, request a confirmation of those that asked again."""
        if len(self._asking) == len(self._group.others):
            asks = {rank: ask for rank, ask in self._asking.items() if self._called.get(rank) != ask}
            if asks:
                self._called |= asks
                self._group.publish(RendezvousOpened(asks))

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

    def apply_report(self, rank: int, message: RestoreRequested | RestoreJoined | RestoreWithdrawn) -> None:
        """At rank 0: a rank asks for a restore, confirms its ask, or has given up."""
        match message:
            case RestoreRequested():
                self._asking[rank] = message.number
                self._here.discard(rank)
            case RestoreJoined() if self._asking.get(rank) == message.number:
                self._here.add(rank)
            case RestoreWithdrawn() if self._asking.get(rank) == message.number:
                del self._asking[rank]
                self._here.discard(rank)
        self._came.notify()

    def apply(self, message: RendezvousOpened | RendezvousComplete) -> None:
        """At other ranks: rank 0 asks this rank to confirm, or answers it."""
        if isinstance(message, RendezvousComplete) and not message.missing:
            self._met(message.epoch)
        if self._group.rank not in message.asks:
            return
        waiting = self._waiting if message.asks[self._group.rank] == self._asked else None
        if waiting is not None and not waiting.done():
            if isinstance(message, RendezvousComplete):
                waiting.set_result(message)
            else:
                self._group.report(RestoreJoined(self._asked))
        elif isinstance(message, RendezvousComplete) and not message.missing:  # given up after it confirmed
            self._absent(message.epoch)
