"""What the agent does for the trainer that it is connected to: tells what happens, and carries out what is asked."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable
from contextlib import suppress

from tieredckpt.agent.lent_tiers import LentTiers
from tieredckpt.concurrency import in_thread
from tieredckpt.engine.agent import messages as said
from tieredckpt.engine.agent.deltas import TierNews, adopt_ram, happened
from tieredckpt.engine.agent.wire import Silent, Wire
from tieredckpt.engine.engine import Engine
from tieredckpt.engine.restoring.source import Damage
from tieredckpt.engine.tier.lease import Holder
from tieredckpt.engine.tier.tier import Tier
from tieredckpt.engine.wire_types import Failure, encode
from tieredckpt.errors import TieredCkptError
from tieredckpt.events import Event
from tieredckpt.format.manifest import StepId

__all__ = ["Service"]

_log = logging.getLogger("tieredckpt")

_SIGN_OF_LIFE = 5.0
_LOOK_AT_TRAINER = 1.0
"""Seconds after which it is seen whether a silent trainer lives: what it forked may keep the connection open."""
_PROGRESS = 0.1
"""Seconds for which the bytes that were read are added up before they are told."""


class Service:
    """The agent's end of one connection. Lives on the engine's loop."""

    def __init__(self, engine: Engine, wire: Wire) -> None:
        self._engine, self._state, self._wire = engine, engine.state, wire
        self._news = [TierNews(self._state, tier) for tier in self._state.every_tier if self._state.manages(tier)]
        self._work: dict[int, asyncio.Task[None]] = {}
        self._pinned: Counter[tuple[str, StepId]] = Counter()
        self._lent = LentTiers(self._state, engine.collector)

    async def run(self, dead: tuple[Holder, ...]) -> said.Goodbye:
        """Serve until the trainer sends `Goodbye`. Raises `Parted` if it ends without."""
        unsubscribe = self._engine.events.subscribe(self._hear)
        tasks = [
            asyncio.create_task(self._keep_telling(), name="tieredckpt news for the trainer"),
            asyncio.create_task(self._keep_alive(), name="tieredckpt sign of life"),
        ]
        try:
            self._tell()
            self._wire.send(said.Ready(dead))
            while True:
                try:
                    word: said.FromTrainer = await self._wire.read(said.FromTrainer, _LOOK_AT_TRAINER)
                except Silent:
                    if await in_thread(self._wire.peer_lives):
                        continue
                    raise
                match word:
                    case said.InRam():
                        adopt_ram(self._state, word)
                        self._engine.prepare_memory()  # of a slab that has grown
                    case said.Request():
                        task = asyncio.create_task(self._answer(word), name=f"tieredckpt order {word.number}")
                        self._work[word.number] = task
                    case said.Cancel():
                        if (withdrawn := self._work.get(word.number)) is not None:
                            withdrawn.cancel()
                    case said.Goodbye():
                        return word
                    case said.Hello():
                        pass  # it was the first word
        finally:
            unsubscribe()
            tasks += self._work.values()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._lent.give_all_back()
            for name, step in self._pinned.elements():
                _unpin(self._state.any_tier(name), step)
            self._state.changed.notify()

    # -- telling ------------------------------------------------------------------------------------------

    def _hear(self, event: Event) -> None:
        if (news := happened(event)) is not None:
            self._tell()  # what the trainer's listeners look up is there when they hear of it
            self._wire.send(news)

    def _tell(self) -> None:
        for each in self._news:
            if (news := each.take()) is not None:
                self._wire.send(news)

    async def _keep_telling(self) -> None:
        while True:
            await self._state.changed.wait()
            self._tell()

    async def _keep_alive(self) -> None:
        while True:
            await asyncio.sleep(_SIGN_OF_LIFE)
            self._wire.send(said.Heartbeat())

    # -- orders -------------------------------------------------------------------------------------------

    async def _answer(self, ask: said.Request) -> None:
        failure, value = None, b""
        progress = _Progress(self._wire, ask.number)
        try:
            value = encode(await self._carry_out(ask.order, progress.add))
        except TieredCkptError as error:
            failure = Failure.of(error)
        except Exception as error:
            _log.exception("order %s failed", type(ask.order).__name__)
            failure = Failure.of(error)
        finally:
            progress.tell()
            self._work.pop(ask.number, None)
        self._tell()  # so that the caller finds it done
        self._wire.send(said.Response(ask.number, value, failure))

    async def _carry_out(self, order: said.Order, progress: Callable[[int], None]) -> object:
        engine, state, admin = self._engine, self._state, self._engine.admin
        match order:
            case said.Promote(number, tier):
                return await admin.promote(number, tier)
            case said.Evict(number, tier):
                await admin.evict(number, tier)
            case said.Delete(steps, force):
                with self._state.being_deleted(steps):
                    await admin.delete_copies(steps, force=force)
            case said.Collect():
                managed = {tier.name for tier in state.every_tier if state.manages(tier)}
                return [each for each in await admin.collect() if each.tier in managed]
            case said.Verify(number, serial, tier, repair):
                return await admin.verify(number, serial, tier, repair=repair, progress=progress)
            case said.Scrub(tier, repair, rate):
                return await admin.scrub(tier, repair=repair, rate=rate, progress=progress)
            case said.Flush():
                await engine.flush()
            case said.Reach(step, tier):
                await engine.reached(step, tier)
            case said.GiveWay(step, tier):
                await engine.give_way(step, tier)
            case said.Mend(step, damage, unreadable):
                found = [Damage(state.tier(bad.tier), bad.digest, bad.key, bad.failure.error()) for bad in damage]
                await engine.mending.mend(
                    step, found, [(state.tier(tier), failure.error()) for tier, failure in unreadable]
                )
            case said.Pin(step, tier):
                pinned = state.any_tier(tier)
                pinned.steps.pins[step] = pinned.steps.pins.get(step, 0) + 1
                self._pinned[tier, step] += 1
            case said.Unpin(step, tier):
                if self._pinned[tier, step]:
                    self._pinned[tier, step] -= 1
                    _unpin(state.any_tier(tier), step)
            case said.MakeRoom():
                return await self._lent.make_room(order)
            case said.Lend():
                await self._lent.lend(order)
            case said.Find():
                return await self._lent.find(order)
            case said.Commit(tier):
                await self._lent.commit(order)
                self._lent.give_back(tier)
                await engine.collector.after_commit(state.tier(tier))
            case said.GiveBack(tier):
                self._lent.give_back(tier)
        return None


def _unpin(tier: Tier, step: StepId) -> None:
    tier.steps.pins[step] -= 1
    if not tier.steps.pins[step]:
        del tier.steps.pins[step]


class _Progress:
    """Adds up what is read on any thread, and tells it now and then on the loop."""

    def __init__(self, wire: Wire, number: int) -> None:
        self._wire, self._number = wire, number
        self._loop = asyncio.get_running_loop()
        self._nbytes = 0
        self._due: asyncio.TimerHandle | None = None

    def add(self, nbytes: int) -> None:
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._add, nbytes)

    def _add(self, nbytes: int) -> None:
        self._nbytes += nbytes
        if self._due is None:
            self._due = self._loop.call_later(_PROGRESS, self.tell)

    def tell(self) -> None:
        if self._due is not None:
            self._due.cancel()
            self._due = None
        if self._nbytes:
            self._wire.send(said.Progress(self._number, self._nbytes))
            self._nbytes = 0
