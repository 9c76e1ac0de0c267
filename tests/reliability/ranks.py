"""A training of several ranks in one process, whose ranks die, hang and lag by script.

::

    world = World(4, nodes=["a", "a", "b", "b"])
    stores = [CheckpointStore.open(config, ranks=communicator) for communicator in world.communicators()]
    world.kill(3, "send", topic="written/*", nth=2)     # at its second such call, rank 3 dies ...
    await world.died(3)
    held = world.hold(1, "recv")                        # rank 1 hangs there ...
    await held.reached()
    held.release()                                      # ... until now
    world.delay(2, 0.5)                                 # every call of rank 2 takes half a second longer
    world.restart()                                     # new processes: communicators made from now on

Each communicator is used from an event loop of its own, in any thread. A call of a dead rank never returns,
unless it is cancelled or its communicator is closed, and nothing it says leaves it. ``verb`` is the name of a
method or ``"*"``, ``topic`` a pattern of `fnmatch`; opening and bulk have the topics ``""`` and the tag.
Faults may be scripted from any thread; ``nth`` counts the matching calls from 1 on.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from tieredckpt.concurrency import shielded
from tieredckpt.engine.ranks.communicator import COORDINATOR, RanksMissing
from tieredckpt.engine.ranks.inbox import Inbox
from tieredckpt.errors import Closed, Invalid, RanksUnavailable
from tieredckpt.testing.faulty import Hold

__all__ = ["InProcess", "World"]


@dataclass(slots=True)
class _Fault:
    """One line of the script; ``left`` counts down to the call that it strikes, and stays at 1 if it repeats."""

    rank: int
    verb: str
    topic: str
    left: int
    repeats: bool
    effect: Hold | float | None
    """Where to stop, seconds to wait, or None to die."""

    def strikes(self, rank: int, verb: str, topic: str) -> bool:
        if self.left == 0 or self.rank != rank:
            return False
        if self.verb not in ("*", verb) or not fnmatchcase(topic, self.topic):
            return False
        if self.left > 1 or not self.repeats:
            self.left -= 1
            return self.left == 0
        return True


@dataclass(slots=True)
class _Parcel:
    """Bulk bytes on their way, and who is told when they were taken."""

    data: bytes
    taken: Callable[[], None]


@dataclass(slots=True)
class _End:
    """One rank's end of a session, with the loop that everything of it belongs on."""

    loop: asyncio.AbstractEventLoop
    inbox: Inbox = field(default_factory=Inbox)
    parcels: dict[tuple[int, int], asyncio.Queue[_Parcel]] = field(default_factory=dict)

    def soon(self, call: Callable[..., object], *arguments: object) -> None:
        with contextlib.suppress(RuntimeError):  # its loop has ended, as that of a dead process has
            self.loop.call_soon_threadsafe(call, *arguments)

    def queue(self, source: int, tag: int) -> asyncio.Queue[_Parcel]:
        return self.parcels.setdefault((source, tag), asyncio.Queue())


@dataclass(frozen=True, slots=True)
class _Session:
    """Ranks that have met."""

    ends: dict[int, _End]


class World:
    """The ranks of a training, and the script of their faults.

    Args:
        size: how many ranks.
        nodes: the node of each; without it each has one of its own.
        bulk: whether they can send in bulk.
    """

    def __init__(self, size: int, *, nodes: Sequence[str] | None = None, bulk: bool = True) -> None:
        if size < 1 or (nodes is not None and len(nodes) != size):
            raise Invalid(f"a world of {size} ranks has as many nodes, not {nodes}")
        self.size = size
        self.nodes = tuple(nodes) if nodes is not None else tuple(f"node-{rank}" for rank in range(size))
        self.bulk = bulk
        self._guards_world = threading.Lock()
        self._script: list[_Fault] = []
        self._calls: list[tuple[int, str, str]] = []
        self._coming: dict[int, tuple[_End, Future[_Session]]] = {}
        self._deaths: dict[int, Future[None]] = {rank: Future() for rank in range(size)}

    def communicator(self, rank: int) -> InProcess:
        """A new process of that rank."""
        if not 0 <= rank < self.size:
            raise Invalid(f"there is no rank {rank} in a world of {self.size}")
        with self._guards_world:
            return InProcess(self, rank, self._deaths[rank])

    def communicators(self) -> list[InProcess]:
        """A new process of every rank."""
        return [self.communicator(rank) for rank in range(self.size)]

    @property
    def calls(self) -> tuple[tuple[int, str, str], ...]:
        """Rank, verb and topic of every call so far, those that failed included."""
        with self._guards_world:
            return tuple(self._calls)

    def kill(self, rank: int, verb: str = "*", *, topic: str = "*", nth: int = 1) -> None:
        """Kill a rank at a call, before the call has done anything."""
        self._add(_Fault(rank, verb, topic, nth, repeats=False, effect=None))

    def kill_now(self, rank: int) -> None:
        """Kill a rank at once; its call under way stops waiting and never returns."""
        with self._guards_world:
            self._die(rank)

    async def died(self, rank: int) -> None:
        """Wait until the rank has died."""
        await shielded(asyncio.wrap_future(self._deaths[rank]))

    def hold(self, rank: int, verb: str = "*", *, topic: str = "*", nth: int = 1) -> Hold:
        """Make a rank hang at a call and all later calls, until it is released."""
        held = Hold(stubborn=False)
        self._add(_Fault(rank, verb, topic, nth, repeats=True, effect=held))
        return held

    def delay(self, rank: int, seconds: float, verb: str = "*", *, topic: str = "*", nth: int = 1) -> None:
        """Delay a call of a rank, and all later calls."""
        self._add(_Fault(rank, verb, topic, nth, repeats=True, effect=seconds))

    def restart(self) -> None:
        """Forget the script, and let every rank live again in the communicators that are made from now on."""
        with self._guards_world:
            self._script.clear()
            self._coming.clear()
            self._deaths = {rank: Future() for rank in range(self.size)}

    def _add(self, fault: _Fault) -> None:
        with self._guards_world:
            self._script.append(fault)

    def _die(self, rank: int) -> None:
        if not self._deaths[rank].done():
            self._deaths[rank].set_result(None)

    def strike(self, rank: int, verb: str, topic: str) -> list[Hold | float]:
        """Note a call; what it meets before it does anything."""
        with self._guards_world:
            self._calls.append((rank, verb, topic))
            effects = [fault.effect for fault in self._script if fault.strikes(rank, verb, topic)]
            if None in effects:
                self._die(rank)
            return [effect for effect in effects if effect is not None]

    def come(self, rank: int, end: _End) -> Future[_Session]:
        """Wait for the others; the last one that comes makes the session."""
        met: Future[_Session] = Future()
        with self._guards_world:
            self._coming[rank] = end, met
            if len(self._coming) == self.size:
                session = _Session({rank: end for rank, (end, _) in self._coming.items()})
                waiting = [met for _, met in self._coming.values()]
                self._coming.clear()
                for each in waiting:
                    each.set_result(session)
        return met

    def leave(self, rank: int, met: Future[_Session]) -> list[int]:
        """Wait no longer; returns who had not come."""
        with self._guards_world:
            if (waiting := self._coming.get(rank)) is not None and waiting[1] is met:
                missing = [other for other in range(self.size) if other not in self._coming]
                del self._coming[rank]
                return missing
            return []


class InProcess:
    """A communicator of a `World`."""

    def __init__(self, world: World, rank: int, death: Future[None]) -> None:
        self.rank = rank
        self.size = world.size
        self.node = world.nodes[rank]
        self.bulk = world.bulk
        self._world = world
        self._death = death
        self._closing = asyncio.Event()
        self._session: _Session | None = None

    async def open(self, *, timeout: float) -> None:
        """Meet the others, once all have come."""
        async with self._call("open", ""):
            end = _End(asyncio.get_running_loop())
            met = self._world.come(self.rank, end)
            try:
                async with asyncio.timeout(timeout):
                    self._session = await shielded(asyncio.wrap_future(met))
            except TimeoutError:
                missing = self._world.leave(self.rank, met)
                if self.rank == COORDINATOR:
                    raise RanksMissing(f"ranks {missing} have not come within {timeout:.1f} s", missing) from None
                raise RanksUnavailable(f"the ranks have not met within {timeout:.1f} s", [COORDINATOR]) from None
            except asyncio.CancelledError:
                self._world.leave(self.rank, met)
                raise

    async def close(self) -> None:
        """Leave the session."""
        self._closing.set()
        if self._session is not None:
            self._session.ends[self.rank].inbox.close()

    async def send(self, to: Collection[int], topic: str, data: bytes) -> None:
        """Hand the message to the loops of the receivers."""
        async with self._call("send", topic):
            for rank in to:
                end = self._ends[rank]
                end.soon(end.inbox.arrived, self.rank, topic, bytes(data))

    async def recv(self, source: int, topic: str, *, timeout: float) -> bytes:
        """A message that was sent."""
        async with self._call("recv", topic):
            return await self._ends[self.rank].inbox.recv(source, topic, timeout)

    async def send_bulk(self, to: int, memory: memoryview, *, tag: int, timeout: float) -> None:
        """Return when the receiver has taken the bytes, the strictest that an engine may be."""
        async with self._call("send_bulk", str(tag)):
            mine, theirs = self._ends[self.rank], self._ends[to]
            taken = asyncio.Event()
            parcel = _Parcel(bytes(memory), lambda: mine.soon(taken.set))
            theirs.soon(lambda: theirs.queue(self.rank, tag).put_nowait(parcel))
            try:
                async with asyncio.timeout(timeout):
                    await taken.wait()
            except TimeoutError:
                what = f"rank {to} has not received {len(memory)} bytes within {timeout:.1f} s"
                raise RanksUnavailable(what, [to]) from None

    async def recv_bulk(self, source: int, memory: memoryview, *, tag: int, timeout: float) -> None:
        """Fill the memory with the next bytes sent with this tag."""
        async with self._call("recv_bulk", str(tag)):
            queue = self._ends[self.rank].queue(source, tag)
            try:
                async with asyncio.timeout(timeout):
                    parcel = await queue.get()
            except TimeoutError:
                what = f"rank {source} has not sent {len(memory)} bytes within {timeout:.1f} s"
                raise RanksUnavailable(what, [source]) from None
            memory[:] = parcel.data
            parcel.taken()

    @property
    def _ends(self) -> dict[int, _End]:
        if self._session is None:
            raise Invalid(f"the communicator of rank {self.rank} is not open")
        return self._session.ends

    @asynccontextmanager
    async def _call(self, verb: str, topic: str) -> AsyncIterator[None]:
        """Meet the script, and let nothing come back to a rank that died meanwhile."""
        self._check_open()
        if verb in ("send_bulk", "recv_bulk") and not self.bulk:
            raise Invalid("this communicator sends nothing in bulk")
        if not self._death.done():
            for effect in self._world.strike(self.rank, verb, topic):
                await (effect.stop_here() if isinstance(effect, Hold) else asyncio.sleep(effect))
        await self._if_alive()
        try:
            yield
        except RanksUnavailable:
            await self._if_alive()
            raise
        await self._if_alive()

    async def _if_alive(self) -> None:
        if self._death.done():
            await self._closing.wait()
        self._check_open()

    def _check_open(self) -> None:
        if self._closing.is_set():
            raise Closed("the communicator of the ranks was closed, with the store it belonged to")
