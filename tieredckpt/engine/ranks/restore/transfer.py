"""Carries out the plan of an exchange: ranks read, send and receive chunks, and verify each one that arrives.

Failures cost only time: the caller reads a chunk that does not arrive, or arrives damaged, from a tier. See
`tieredckpt.engine.ranks.restore.plan` for the order that prevents deadlock.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from tieredckpt.concurrency import in_thread
from tieredckpt.engine.ranks.communicator import COORDINATOR, Communicator, RanksMissing, gather
from tieredckpt.engine.ranks.restore.plan import (
    Stock,
    Task,
    decode_stock,
    decode_tasks,
    encode_stock,
    encode_tasks,
    plan,
)
from tieredckpt.engine.scratch import Scratch
from tieredckpt.errors import Corrupt, RanksUnavailable, TieredCkptError
from tieredckpt.format.digest import digest_array

__all__ = ["PEERS", "Bulk", "ChunkTransfer", "Terms", "agree_on_tasks", "decline"]

_log = logging.getLogger("tieredckpt")

Bytes = npt.NDArray[np.uint8]

PEERS = "peers"
"""The source of bytes that another rank sent, in place of a tier's name."""

_IN_FLIGHT = 32
"""Chunks in flight at a time, if there is memory for them."""


class Bulk(Protocol):
    """Carries bytes between ranks: a `Communicator` with bulk, or a `MessageBulk`."""

    async def send_bulk(self, to: int, memory: memoryview, *, tag: int, timeout: float) -> None:
        """See `Communicator.send_bulk`."""

    async def recv_bulk(self, source: int, memory: memoryview, *, tag: int, timeout: float) -> None:
        """See `Communicator.recv_bulk`."""


@dataclass(frozen=True, slots=True)
class Terms:
    """Rank 0's settings for the plan of an exchange; those of other ranks do not count."""

    group: int | None = None
    reads: bool = True
    """Both as `tieredckpt.engine.ranks.restore.plan.plan` takes them."""
    worth: bool = True
    """Whether there is an exchange at all."""


async def agree_on_tasks(
    communicator: Communicator, number: int, stock: Stock, terms: Terms, *, timeout: float
) -> list[Task] | None:
    """Plan an exchange with all ranks, and return this rank's tasks; all call it with the same new ``number``.

    Ranks that do not answer in time take no part. None if no rank has a task, or rank 0 does not answer.
    """
    topic = f"exchange/{number}/stock"
    if communicator.rank == COORDINATOR:
        try:
            came = await gather(communicator, topic, encode_stock(stock), timeout=timeout)
        except RanksMissing as error:
            _log.warning("%s; they take no part in the exchange of chunks", error)
            came = error.came
        messages = await in_thread(_plan, came, terms) if terms.worth else dict.fromkeys(came, b"")
        for rank in range(1, communicator.size):
            await communicator.send([rank], f"exchange/{number}/tasks", messages.get(rank, b""))
        return _tasks(messages[COORDINATOR])
    try:
        await gather(communicator, topic, encode_stock(stock), timeout=timeout)
        return _tasks(await communicator.recv(COORDINATOR, f"exchange/{number}/tasks", timeout=2 * timeout))
    except (RanksUnavailable, Corrupt) as error:
        _log.warning("chunks are not exchanged among the ranks, but read: %s", error)
        return None


async def decline(communicator: Communicator, number: int) -> None:
    """Take no part in an exchange that others may wait for; if rank 0 declines, there is none."""
    if communicator.rank == COORDINATOR:
        await communicator.send(range(1, communicator.size), f"exchange/{number}/tasks", b"")
    else:
        await communicator.send([COORDINATOR], f"exchange/{number}/stock", encode_stock(Stock({})))


def _tasks(message: bytes) -> list[Task] | None:
    return decode_tasks(message) if message else None


def _plan(stocks: dict[int, bytes], terms: Terms) -> dict[int, bytes]:
    sound: dict[int, Stock] = {}
    for rank, data in stocks.items():
        try:
            sound[rank] = decode_stock(data)
        except Corrupt as error:
            _log.warning("rank %d takes no part in the exchange of chunks: %s", rank, error)
            sound[rank] = Stock({})
    planned = plan(sound, group=terms.group, reads=terms.reads)
    return {rank: encode_tasks(tasks) if any(planned.values()) else b"" for rank, tasks in planned.items()}


@dataclass(slots=True)
class _Lane:
    """The transfers to or from one rank: one at a time, in the order of the tasks."""

    last: asyncio.Event | None = None
    """Set when the last transfer in the lane has ended."""
    broken: bool = False

    def line_up(self) -> _Turn:
        turn = _Turn(self, self.last, asyncio.Event())
        self.last = turn.ended
        return turn

    def end(self, rank: int, error: TieredCkptError) -> None:
        self.broken = True
        _log.warning("no more chunks are exchanged with rank %d: %s", rank, error)


@dataclass(frozen=True, slots=True)
class _Turn:
    """A place in a lane."""

    lane: _Lane
    before: asyncio.Event | None
    ended: asyncio.Event

    async def comes(self) -> bool:
        """Wait for it; False if the lane has ended before."""
        if self.before is not None:
            await self.before.wait()
        return not self.lane.broken


@dataclass
class ChunkTransfer:
    """One rank's side of an exchange. Lives on the engine's loop."""

    rank: int
    """This one."""
    bulk: Bulk
    tag: int
    """New for every exchange, and the same on all ranks."""
    timeout: float
    """Seconds to wait for another rank, in every single transfer."""
    scratch: Scratch
    pool: Executor
    held: Callable[[bytes], Bytes | None]
    """The memory of a chunk in this rank's RAM, which does not change meanwhile; None if the chunk is not there."""
    read: Callable[[bytes, Bytes], Awaitable[str]]
    """Reads a chunk from a slower tier, verified, into page-aligned memory; returns the tier's name."""
    place: Callable[[bytes, Bytes], Any]
    """Copies a chunk's verified bytes to where they are wanted; runs on the pool."""
    came: dict[bytes, str] = field(default_factory=dict)
    """Origin of each chunk that was placed: the name of a tier, or `PEERS`."""
    corrupt: set[bytes] = field(default_factory=set)
    """Chunks that this rank was to send, and that are missing or damaged in its RAM."""
    _lanes: dict[tuple[int, bool], _Lane] = field(default_factory=dict)

    async def run(self, tasks: Sequence[Task]) -> dict[bytes, str]:
        """Do the tasks in their order, several at a time; returns `came`. The caller reads the rest."""
        try:
            await self._run(tasks)
        except BaseExceptionGroup as errors:
            raise _first(errors) from errors
        return self.came

    async def _run(self, tasks: Sequence[Task]) -> None:
        window = asyncio.Semaphore(_IN_FLIGHT)
        async with asyncio.TaskGroup() as group:
            for task in tasks:
                # Taken in the common order, so that no task holds what an earlier one needs.
                await window.acquire()
                memory, give_back = None, None
                if task.source != self.rank:
                    memory, give_back = await self.scratch.take(task.nbytes)
                turns = self._line_up(task)
                doing = group.create_task(self._do(task, memory, turns))
                # Not in the task itself: one that is cancelled before it begins runs none of its lines.
                doing.add_done_callback(partial(_release, turns, window, give_back))

    def _line_up(self, task: Task) -> dict[int, _Turn]:
        outwards = task.source in (None, self.rank)
        ranks = task.to if outwards else (task.source,)
        return {rank: self._lanes.setdefault((rank, outwards), _Lane()).line_up() for rank in ranks if rank is not None}

    async def _do(self, task: Task, memory: Bytes | None, turns: Mapping[int, _Turn]) -> None:
        if memory is None:
            await self._send(await in_thread(self._memory_of, task, pool=self.pool), turns)
        elif task.source is None:
            await self._read_and_send(task, memory[: task.nbytes], memory, turns)
        else:
            await self._receive(task, memory[: task.nbytes], turns[task.source])

    def _memory_of(self, task: Task) -> Bytes:
        held = self.held(task.digest)
        if held is not None and held.size == task.nbytes and digest_array(held) == task.digest:
            return held
        self.corrupt.add(task.digest)
        # Send bytes that the receivers will refuse, so that they do not wait.
        return np.zeros(task.nbytes, np.uint8)

    async def _read_and_send(self, task: Task, chunk: Bytes, memory: Bytes, turns: Mapping[int, _Turn]) -> None:
        name = None
        try:
            name = await self.read(task.digest, memory)
        except TieredCkptError as error:
            _log.warning("a chunk could not be read for this rank and %d others: %s", len(task.to), error)
        async with asyncio.TaskGroup() as group:
            group.create_task(self._send(chunk, turns))
            if name is not None:
                await in_thread(self.place, task.digest, chunk, pool=self.pool)
                self.came[task.digest] = name

    async def _send(self, chunk: Bytes, turns: Mapping[int, _Turn]) -> None:
        async def send(to: int, turn: _Turn) -> None:
            if await turn.comes():
                try:
                    await self.bulk.send_bulk(to, memoryview(chunk), tag=self.tag, timeout=self.timeout)
                except TieredCkptError as error:
                    turn.lane.end(to, error)
            turn.ended.set()

        async with asyncio.TaskGroup() as group:
            for to, turn in turns.items():
                group.create_task(send(to, turn))

    async def _receive(self, task: Task, chunk: Bytes, turn: _Turn) -> None:
        assert task.source is not None
        if not await turn.comes():
            return
        try:
            await self.bulk.recv_bulk(task.source, memoryview(chunk), tag=self.tag, timeout=self.timeout)
        except TieredCkptError as error:
            turn.lane.end(task.source, error)
            return
        turn.ended.set()
        if await in_thread(self._place_if_intact, task.digest, chunk, pool=self.pool):
            self.came[task.digest] = PEERS
        else:
            _log.warning("rank %d gave a chunk that is not what was saved; it is read instead", task.source)

    def _place_if_intact(self, digest: bytes, memory: Bytes) -> bool:
        if digest_array(memory) != digest:
            return False
        self.place(digest, memory)
        return True


def _first(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    error = errors.exceptions[0]
    return _first(error) if isinstance(error, BaseExceptionGroup) else error


def _release(
    turns: Mapping[int, _Turn], window: asyncio.Semaphore, give_back: Callable[[], None] | None, _: asyncio.Task[None]
) -> None:
    if give_back is not None:
        give_back()
    for turn in turns.values():
        turn.ended.set()
    window.release()
