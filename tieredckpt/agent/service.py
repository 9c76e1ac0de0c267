"""The agent's end of a connection: sends state deltas and events to the trainer, and executes its requests."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from tieredckpt.concurrency import in_thread
from tieredckpt.engine.agent import messages
from tieredckpt.engine.agent.deltas import adopt_ram, happened, tier_deltas
from tieredckpt.engine.agent.wire import Silent, Wire
from tieredckpt.engine.engine import Engine
from tieredckpt.engine.keeping.collector import Collector
from tieredckpt.engine.keeping.full_tier import make_room
from tieredckpt.engine.keeping.retention import after_commit
from tieredckpt.engine.promoting.dedupe import refer_to_intact
from tieredckpt.engine.ranks.commit.parts import check_found
from tieredckpt.engine.restoring.source import Damage
from tieredckpt.engine.state.state import State
from tieredckpt.engine.tier import commit_file
from tieredckpt.engine.tier.index_cache import unique_extents
from tieredckpt.engine.tier.lease import Holder
from tieredckpt.engine.tier.packs import WrittenPacks
from tieredckpt.engine.tier.tier import Tier
from tieredckpt.engine.wire_types import Failure, encode
from tieredckpt.errors import Conflict, TieredCkptError
from tieredckpt.events import Event
from tieredckpt.format import layout
from tieredckpt.format.manifest import StepId, decode_step

__all__ = ["Service"]

_log = logging.getLogger("tieredckpt")

_HEARTBEAT = 5.0
_LOOK_AT_TRAINER = 1.0
"""Seconds of silence after which to check the trainer's process; a fork of it may keep the connection open."""
_PROGRESS = 0.1
"""Seconds for which read bytes are added up before they are sent."""


class Service:
    """The agent's end of one connection. Lives on the engine's loop."""

    def __init__(self, engine: Engine, wire: Wire) -> None:
        self._engine, self._state, self._wire = engine, engine.state, wire
        self._deltas = [tier_deltas(self._state, tier) for tier in self._state.every_tier if self._state.manages(tier)]
        self._work: dict[int, asyncio.Task[None]] = {}
        self._reads: Counter[tuple[str, StepId]] = Counter()
        self._lent = LentTiers(self._state, engine.collector)

    async def run(self, dead: tuple[Holder, ...]) -> messages.Goodbye:
        """Serve until the trainer sends `Goodbye`. Raises `Parted` if it ends without."""
        unsubscribe = self._engine.events.subscribe(self._forward)
        tasks = [
            asyncio.create_task(self._keep_sending(), name="tieredckpt state deltas"),
            asyncio.create_task(self._keep_alive(), name="tieredckpt heartbeat"),
        ]
        try:
            self._send_deltas()
            self._wire.send(messages.Ready(dead))
            while True:
                try:
                    message: messages.FromTrainer = await self._wire.read(messages.FromTrainer, _LOOK_AT_TRAINER)
                except Silent:
                    if await in_thread(self._wire.peer_lives):
                        continue
                    raise
                match message:
                    case messages.InRam():
                        adopt_ram(self._state, message)
                        self._engine.prepare_memory()  # the slab may have grown
                    case messages.Request():
                        task = asyncio.create_task(self._answer(message), name=f"tieredckpt request {message.number}")
                        self._work[message.number] = task
                        # Not in the task itself: one that is cancelled before it begins runs none of its lines.
                        task.add_done_callback(partial(self._ended, message.number))
                    case messages.Cancel():
                        if (cancelled := self._work.get(message.number)) is not None:
                            cancelled.cancel()
                    case messages.Goodbye():
                        return message
        finally:
            unsubscribe()
            tasks += self._work.values()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._lent.give_all_back()
            for name, step in self._reads.elements():
                self._state.any_tier(name).steps.end_read(step)
            self._state.changed.notify()

    # -- deltas -------------------------------------------------------------------------------------------

    def _forward(self, event: Event) -> None:
        if (message := happened(event)) is not None:
            self._send_deltas()  # before the event, so that a listener finds what it looks up
            self._wire.send(message)

    def _send_deltas(self) -> None:
        for each in self._deltas:
            if (delta := each.take()) is not None:
                self._wire.send(delta)

    async def _keep_sending(self) -> None:
        while True:
            await self._state.changed.wait()
            self._send_deltas()

    async def _keep_alive(self) -> None:
        while True:
            await asyncio.sleep(_HEARTBEAT)
            self._wire.send(messages.Heartbeat())

    # -- requests -----------------------------------------------------------------------------------------

    async def _answer(self, request: messages.Request) -> None:
        failure, value = None, b""
        progress = _Progress(self._wire, request.number)
        try:
            value = encode(await self._execute(request.operation, progress.add))
        except TieredCkptError as error:
            failure = Failure.of(error)
        except Exception as error:
            _log.exception("request %s failed", type(request.operation).__name__)
            failure = Failure.of(error)
        finally:
            progress.send()
        self._send_deltas()  # so that the caller finds it done
        self._wire.send(messages.Response(request.number, value, failure))

    def _ended(self, number: int, _: asyncio.Task[None]) -> None:
        del self._work[number]

    async def _execute(self, operation: messages.Operation, progress: Callable[[int], None]) -> object:
        engine, state, admin = self._engine, self._state, self._engine.admin
        match operation:
            case messages.Promote(number, tier):
                return await admin.promote(number, tier)
            case messages.Evict(number, tier):
                await admin.evict(number, tier)
            case messages.Pin(number, tier, on):
                return await admin.pin(number, tier, on=on)
            case messages.Delete(steps, force):
                with self._state.being_deleted(steps):
                    await admin.delete_copies(steps, force=force)
            case messages.Collect():
                managed = {tier.name for tier in state.every_tier if state.manages(tier)}
                return [each for each in await admin.collect() if each.tier in managed]
            case messages.Verify(number, serial, tier, repair):
                return await admin.verify(number, serial, tier, repair=repair, progress=progress)
            case messages.Scrub(tier, repair, rate):
                return await admin.scrub(tier, repair=repair, rate=rate, progress=progress)
            case messages.Flush():
                await engine.flush()
            case messages.Reach(step, tier):
                await engine.reached(step, tier)
            case messages.GiveWay(step, tier):
                await engine.give_way(step, tier)
            case messages.Repair(step, damage, unreadable):
                found = [Damage(state.tier(bad.tier), bad.digest, bad.key, bad.failure.error()) for bad in damage]
                await engine.background_repair.repair(
                    step, found, [(state.tier(tier), failure.error()) for tier, failure in unreadable]
                )
            case messages.BeginRead(step, tier):
                state.any_tier(tier).steps.begin_read(step)
                self._reads[tier, step] += 1
            case messages.EndRead(step, tier):
                if self._reads[tier, step]:
                    self._reads[tier, step] -= 1
                    state.any_tier(tier).steps.end_read(step)
            case messages.MakeRoom():
                return await self._lent.make_room(operation)
            case messages.Lend():
                await self._lent.lend(operation)
            case messages.Find():
                return await self._lent.find(operation)
            case messages.Commit(tier):
                async with self._lent.guards_commit:
                    await self._lent.commit(operation)
                self._lent.give_back(tier)
                await after_commit(state, engine.collector, state.tier(tier))
            case messages.GiveBack(tier):
                async with self._lent.guards_commit:  # one that was cancelled may be putting the manifest yet
                    self._lent.give_back(tier)
        return None


class _Progress:
    """Adds up the bytes read on any thread, and sends the sum now and then on the loop."""

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
            self._due = self._loop.call_later(_PROGRESS, self.send)

    def send(self) -> None:
        if self._due is not None:
            self._due.cancel()
            self._due = None
        if self._nbytes:
            self._wire.send(messages.Progress(self._number, self._nbytes))
            self._nbytes = 0


class LentTiers:
    """At the agent: tiers that the trainer of one connection streams to. Runs on the engine's loop."""

    def __init__(self, state: State, collector: Collector) -> None:
        self._state = state
        self._collector = collector
        self._lent: set[str] = set()
        self.guards_commit = asyncio.Lock()
        """Held while a step is committed."""

    async def make_room(self, operation: messages.MakeRoom) -> bool:
        """Whether so many bytes fit, after evictions if needed."""
        tier = self._state.tier(operation.tier)
        return await make_room(self._state, self._collector, None, tier, operation.nbytes)

    async def lend(self, operation: messages.Lend) -> None:
        """Protect the tier's packs until the tier is given back."""
        tier = self._state.tier(operation.tier)
        tier.check_known()
        await tier.packs.guard.acquire()
        self._lent.add(tier.name)

    def give_back(self, name: str) -> None:
        """Release the packs; uncommitted ones are collected, as after a crash."""
        if name in self._lent:
            self._lent.remove(name)
            self._state.tier(name).packs.guard.release()

    def give_all_back(self) -> None:
        for name in tuple(self._lent):
            self.give_back(name)

    async def find(self, operation: messages.Find) -> list[tuple[bytes, str, int, int]]:
        """Locate intact copies of chunks on a lent tier."""
        tier = self._lent_one(operation.tier)
        await refer_to_intact(self._state, tier, None, operation.sizes)
        packs = tier.packs
        there = {digest: packs.index[digest] for digest, nbytes in operation.sizes.items() if packs.has(digest, nbytes)}
        return [(digest, extent.path, extent.offset, extent.length) for digest, extent in there.items()]

    async def commit(self, operation: messages.Commit) -> None:
        """Commit a step whose packs the trainer has written."""
        tier = self._lent_one(operation.tier)
        index = await in_thread(decode_step, operation.manifest, operation.btree, operation.key, pool=self._state.pool)
        for key, size in operation.packs.items():
            if layout.parse_pack_key(key) is None or (await tier.store.stat(key)).size != size:
                raise Conflict(f"tier {tier.name!r}: pack {key} is not as the trainer has written it; save again")
        found = unique_extents(index.arrays)
        new = {digest: extent for digest, extent in found.items() if extent.path in operation.packs}
        tier.packs.add(WrittenPacks(new, operation.packs))
        check_found(index, tier.packs.sizes)
        await commit_file.commit(tier, index.record, index.arrays)
        self._state.branch.committed(index.record)  # or the step would be off-branch until the trainer tells
        self._state.changed.notify()

    def _lent_one(self, name: str) -> Tier:
        if name not in self._lent:
            raise Conflict(f"tier {name!r} was not lent to this trainer; save again")
        return self._state.tier(name)
