"""Refreshes what a reader knows of a store at each call: another process changes it.

The reader lists steps, and reads only those that are new or were committed anew. It attaches RAM again that a trainer
gave back, took anew or made; and it connects again to a tier that was not there, or was replaced.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

from tieredckpt.blobs.base import BlobStore
from tieredckpt.blobs.ram.slab_meta import read_note
from tieredckpt.blobs.ram.store import RamStore
from tieredckpt.concurrency import in_thread, whole
from tieredckpt.engine.opening.connect import connect, reopen
from tieredckpt.engine.opening.identify import identify
from tieredckpt.engine.opening.scan import scan_tier_again
from tieredckpt.engine.opening.stale import set_stale_apart
from tieredckpt.engine.ranks.ram_of_ranks import RamOfRanks
from tieredckpt.engine.restoring.moved import Moved
from tieredckpt.engine.state.adoption import adopt_newest
from tieredckpt.engine.state.state import State
from tieredckpt.engine.tier.tier import Tier
from tieredckpt.errors import Conflict, Corrupt, NotFound, TieredCkptError, TierUnavailable
from tieredckpt.format.manifest import StepId

__all__ = ["Refresh"]

T = TypeVar("T")

_log = logging.getLogger("tieredckpt")

_TRIES = 30
"""How often a read is tried whose step is evicted each time before it has been read."""


class Refresh:
    """Keeps a reader's knowledge fresh. Lives on the engine's loop."""

    def __init__(self, state: State, ram_of_ranks: RamOfRanks) -> None:
        self._state = state
        self._ram_of_ranks = ram_of_ranks
        state.reader.refresh = self.refresh
        self._guards_refresh = asyncio.Lock()
        self._begun = -1.0
        """When the last refresh began that ended well (monotonic seconds)."""
        self._in_flight: set[object] = set()
        """One for each call under way."""
        self._aside: list[tuple[BlobStore, set[object]]] = []
        """Stores that tiers use no more, each with the calls that may still read it."""
        self._left_behind: set[StepId] = set()
        """Stale steps in RAM: the training has gone on elsewhere from an older step."""

    async def looking(self, work: Callable[[], Awaitable[T]], *, packs: bool = False) -> T:
        """Run work that looks at the store as it is now; run it again if a step moves while it is read.

        Damage counts only if it is still there at a second look. ``packs``: the work asks what space packs take.
        """
        call = object()
        self._in_flight.add(call)
        try:
            await self.refresh(packs=packs)
            damaged = False
            for tries in range(_TRIES):
                try:
                    return await work()
                except Moved:
                    if tries == _TRIES - 1:
                        raise
                except Corrupt:
                    if damaged or tries == _TRIES - 1:
                        raise
                    damaged = True
                    for tier in self._state.every_tier:
                        tier.steps.indexes.clear()
                    await self.refresh()
            raise AssertionError("the last try returns or raises")
        finally:
            self._in_flight.discard(call)
            await whole(self._close_unused())

    async def close(self) -> None:
        """Close the blob stores that no tier uses any more."""
        for blobs, _ in self._aside:
            await blobs.close()
        self._aside.clear()

    async def _close_unused(self) -> None:
        used = [(blobs, readers & self._in_flight) for blobs, readers in self._aside]
        self._aside = [(blobs, readers) for blobs, readers in used if readers]
        for blobs, readers in used:
            if not readers:
                await blobs.close()

    # -- looking ------------------------------------------------------------------------------------------

    async def refresh(self, *, packs: bool = False) -> None:
        """Find out what the tiers hold, at some moment after this call. A tier that fails is reported."""
        asked = time.monotonic()
        async with self._guards_refresh:
            if self._begun > asked and not packs:
                return  # for another call
            begun = time.monotonic()
            await self._refresh(packs=packs)
            self._begun = begun

    async def _refresh(self, *, packs: bool) -> None:
        state, first = self._state, self._state.tiers[0]
        if state.identity.marker is not None:
            for tier in state.every_tier:  # in turn: a step comes to the next tier before it leaves this one
                await self._look_at(tier, packs=packs)
        if state.identity.marker is None or all(tier.marker is None for tier in state.tiers):
            await self._identify()  # only the stored files tell which store it is
        before = set(first.steps.held)
        await set_stale_apart(state)
        self._left_behind |= before - set(first.steps.held)
        try:
            await self._ram_of_ranks.look()
        except TierUnavailable as error:
            _log.warning("the RAM of ranks on this machine cannot be looked at: %s", error)
        adopt_newest(state)
        state.changed.notify()

    async def _look_at(self, tier: Tier, *, packs: bool) -> None:
        if tier.ram is not None and not await in_thread(_is_there, tier.ram.store):
            await self._set_aside(tier)
        if tier.marker is None:
            await self._connect(tier)
            return
        if tier.health.error is not None and time.monotonic() < tier.health.retry_at:
            return
        try:
            foreign = await scan_tier_again(tier, packs=packs, but=self._left_behind if tier.in_memory else ())
        except TierUnavailable as error:
            await self._reopen(tier, error)
        else:
            tier.health.recover()
            if foreign:
                await self._set_aside(tier)
                await self._connect(tier)

    async def _reopen(self, tier: Tier, error: TierUnavailable) -> None:
        """Look at a tier that fails through a new store: its file system may have been mounted anew."""
        try:
            if await reopen(self._state, tier):
                await scan_tier_again(tier)
                tier.health.recover()
                return
        except TieredCkptError:
            self._note(tier, error)  # what it holds is known, and cannot be read for now
            return
        await self._set_aside(tier)
        await self._connect(tier)

    async def _connect(self, tier: Tier) -> None:
        """Open a tier that was not there, or not to be read, unless it is too early to try that again."""
        silent = tier.health.error is not None and not isinstance(tier.health.error, NotFound)
        if silent and time.monotonic() < tier.health.retry_at:
            return
        state = self._state
        try:
            await connect(state, tier)
            tier.health.recover()
        except TieredCkptError as error:
            known = any(other.marker is not None for other in state.tiers if not other.in_memory and other is not tier)
            if isinstance(error, Conflict) and not tier.in_memory and not known:
                await self._start_over()  # another store has taken the place of the one that was looked at
                return
            tier.clear()
            tier.marker = None
            self._note(tier, error)

    async def _start_over(self) -> None:
        for tier in self._state.every_tier:
            await self._set_aside(tier)
            tier.health.error = None
        await self._identify()

    async def _identify(self) -> None:
        self._state.identity.marker = None
        failures = await identify(self._state)
        failed = {tier.name for tier, _ in failures}
        for tier in self._state.every_tier:
            if tier.name not in failed:
                tier.health.recover()
        for tier, error in failures:
            self._note(tier, error)

    def _note(self, tier: Tier, error: TieredCkptError) -> None:
        """Remember why a tier cannot be looked at; that it is not there is not worth telling each time."""
        if isinstance(error, NotFound):
            tier.health.error = error
        else:
            self._state.report(tier, error)

    async def _set_aside(self, tier: Tier) -> None:
        """Forget what a tier holds; its blob store is closed once the calls that may read it have ended."""
        if tier.blobs is not None:
            self._aside.append((tier.blobs, set(self._in_flight)))
        tier.blobs = None
        await tier.disconnect()
        if tier.in_memory:
            self._left_behind.clear()


def _is_there(ram: RamStore) -> bool:
    """Whether RAM is still the one that the note in its folder names."""
    note = read_note(Path(ram.location))
    return note is not None and ram.is_of(note)
