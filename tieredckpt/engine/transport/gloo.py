"""Bytes in bulk between two ranks, over gloo: every pair that speaks has a group of its own.

When a wait in gloo runs out of time, gloo closes all connections of that group. In a group of all ranks, one that
hangs would cut off the living from each other; in a group of two it cuts off itself. There is no other way to end a
wait early, so this module does it that way. The end may come late, so gloo sees only memory of this module.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any
from weakref import WeakSet, WeakValueDictionary

import numpy as np
import torch
import torch.distributed as dist

from tieredckpt.concurrency import in_thread, shielded, whole
from tieredckpt.engine.ranks.communicator import Communicator
from tieredckpt.engine.transport.foreign_thread import ForeignThread
from tieredckpt.errors import Closed, RanksUnavailable

__all__ = ["GlooBulk"]

_TOPIC = "tieredckpt/gloo"
_PIECE = 4 << 20
_PIECES_AHEAD = 2
_GROUP_TIMEOUT = 30.0
_END_TIMEOUT = 5.0
_END_TAG = (1 << 31) - 1
"""Tag of messages that are never sent."""


class _Lane:
    """Resources of a transfer: a thread that waits in gloo, and the memory that gloo sees.

    One that failed is not used again, for gloo may still hold the memory.
    """

    def __init__(self) -> None:
        self._thread = ForeignThread("tieredckpt gloo")
        self._pieces: list[torch.Tensor] = []
        self._number = 0

    def piece(self) -> torch.Tensor:
        """Memory for a piece: at most `_PIECES_AHEAD` are under way, so the last piece in it is not."""
        if len(self._pieces) < _PIECES_AHEAD:
            self._pieces.append(torch.empty(_PIECE, dtype=torch.uint8))
        self._number += 1
        return self._pieces[self._number % len(self._pieces)]

    async def call(self, deadline: float, function: Callable[..., Any], *arguments: Any) -> Any:
        return await self._thread.call(function, *arguments, timeout=max(0.0, deadline - time.monotonic()))

    async def wait(self, deadline: float, work: Any) -> None:
        await self.call(deadline, self._wait, work, deadline)

    def _wait(self, work: Any, deadline: float) -> None:
        """A method, so that a thread that is left behind keeps the memory."""
        work.wait(timedelta(seconds=max(0.001, deadline - time.monotonic())))

    def close(self) -> None:
        self._thread.close()


class GlooBulk:
    """`Communicator.send_bulk` and `Communicator.recv_bulk` for a communicator that has messages alone.

    Args:
        messages: the communicator. Two ranks tell each other by it that both are there, before gloo lets them wait
            for each other.
        connect: gives a store of torch.distributed in which only groups of this session meet; called on threads.
        device: from `find_device`.
    """

    def __init__(self, messages: Communicator, connect: Callable[[], Any], device: Any) -> None:
        self._messages = messages
        self._connect = connect
        self._device = device
        self._groups: dict[int, asyncio.Task[Any]] = {}
        self._broken: set[int] = set()
        self._idle: list[_Lane] = []
        self._turns: WeakValueDictionary[tuple[str, int, int], asyncio.Lock] = WeakValueDictionary()
        self._running: set[asyncio.Task[None]] = set()
        self._ending = ForeignThread("tieredckpt gloo's end")
        self._closed = False
        _living.add(self)

    @staticmethod
    def find_device() -> Any:
        """The network interface that gloo takes, with a thread that serves it. Looks up names; may raise."""
        return dist.ProcessGroupGloo.create_default_device()

    async def meet(self, peer: int, *, timeout: float) -> None:
        """Make the group with a rank before it is needed. Raises `RanksUnavailable`."""
        deadline = time.monotonic() + timeout

        async def meet() -> None:
            await self._group(peer, deadline)

        await self._whole(meet, "meet", 0, peer, timeout)

    async def send_bulk(self, to: int, memory: memoryview, *, tag: int, timeout: float) -> None:
        """Send in pieces, each copied before it leaves."""
        deadline = time.monotonic() + timeout

        async def send() -> None:
            group = await self._group(to, deadline)
            under_way: deque[Any] = deque()
            with self._lane() as lane:
                for at in range(0, len(memory), _PIECE):
                    if len(under_way) == _PIECES_AHEAD:
                        await lane.wait(deadline, under_way.popleft())
                    part = memory[at : at + _PIECE]
                    piece = lane.piece()[: len(part)]
                    await in_thread(_copy, part, _bytes_of(piece))
                    under_way.append(await lane.call(deadline, group.send, [piece], _place(to, self.rank), tag))
                while under_way:
                    await lane.wait(deadline, under_way.popleft())

        await self._whole(self._in_turn("send", to, tag, send), "send", len(memory), to, timeout)

    async def recv_bulk(self, source: int, memory: memoryview, *, tag: int, timeout: float) -> None:
        """Receive in pieces, each copied after it has come."""
        deadline = time.monotonic() + timeout

        async def receive() -> None:
            group = await self._group(source, deadline)
            under_way: deque[tuple[Any, torch.Tensor, memoryview]] = deque()
            with self._lane() as lane:

                async def take_one() -> None:
                    work, piece, part = under_way.popleft()
                    await lane.wait(deadline, work)
                    await in_thread(_copy, _bytes_of(piece)[: len(part)], part)

                for at in range(0, len(memory), _PIECE):
                    if len(under_way) == _PIECES_AHEAD:
                        await take_one()
                    piece = lane.piece()  # all of it: gloo ends the process if more comes than there is room for
                    work = await lane.call(deadline, group.recv, [piece], _place(source, self.rank), tag)
                    under_way.append((work, piece, memory[at : at + _PIECE]))
                while under_way:
                    await take_one()

        await self._whole(self._in_turn("receive", source, tag, receive), "receive", len(memory), source, timeout)

    async def close(self) -> None:
        """End what is under way with `Closed`."""
        self._closed = True
        running = [*self._running, *self._groups.values()]
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        for lane in self._idle:
            lane.close()
        del running[:], self._idle[:]
        with suppress(TimeoutError, Closed):
            await self._ending.call(self._groups.clear, timeout=_END_TIMEOUT)  # which waits for threads of gloo's
        self._ending.close()

    def end_waits(self) -> None:
        """End every wait in gloo and every transfer. May be called on any thread."""
        for peer, making in list(self._groups.items()):
            if making.done() and not making.cancelled() and making.exception() is None:
                self._end_waits(making.result(), peer)

    def _end_waits(self, group: Any, peer: int) -> None:
        """Time out a wait in the group: gloo then closes the connection, and every wait for it fails."""
        with suppress(RuntimeError):
            nothing = torch.empty(1, dtype=torch.uint8)
            group.recv([nothing], _place(peer, self.rank), _END_TAG).wait(timedelta(milliseconds=1))

    @property
    def rank(self) -> int:
        """The rank of the communicator."""
        return self._messages.rank

    # -- one transfer -------------------------------------------------------------------------------------

    async def _whole(
        self, work: Callable[[], Coroutine[Any, Any, None]], verb: str, nbytes: int, peer: int, timeout: float
    ) -> None:
        """Run the work until its deadline; if it fails or is cancelled, the two ranks transfer nothing any more."""
        if self._closed:
            raise _closed()
        if peer in self._broken:
            raise RanksUnavailable(f"an earlier transfer with rank {peer} failed", [peer])
        running = asyncio.ensure_future(work())
        self._running.add(running)
        try:
            async with asyncio.timeout(timeout):
                await running
        except BaseException as error:
            self._broken.add(peer)
            await whole(self._part_with(peer))
            me = asyncio.current_task()
            if self._closed and me is not None and not me.cancelling():
                raise _closed() from None
            if not isinstance(error, RuntimeError | TimeoutError | RanksUnavailable):
                raise
            raise RanksUnavailable(
                f"rank {self.rank} could not {verb} {nbytes} bytes in bulk with rank {peer} within {timeout:.1f} s"
                + (f": {error}" if str(error) else ""),
                [peer],
            ) from error
        finally:
            self._running.discard(running)

    async def _part_with(self, peer: int) -> None:
        making = self._groups.get(peer)
        if making is not None and making.done() and not making.cancelled() and making.exception() is None:
            with suppress(TimeoutError, Closed):
                await self._ending.call(self._end_waits, making.result(), peer, timeout=_END_TIMEOUT)

    def _in_turn(
        self, verb: str, peer: int, tag: int, work: Callable[[], Coroutine[Any, Any, None]]
    ) -> Callable[[], Coroutine[Any, Any, None]]:
        async def in_turn() -> None:
            async with self._turns.setdefault((verb, peer, tag), asyncio.Lock()):
                if peer in self._broken:
                    raise RanksUnavailable("an earlier transfer failed", [peer])
                await work()

        return in_turn

    @contextmanager
    def _lane(self) -> Iterator[_Lane]:
        lane = self._idle.pop() if self._idle else _Lane()
        try:
            yield lane
        except BaseException:
            lane.close()
            raise
        self._idle.append(lane)

    async def _group(self, peer: int, deadline: float) -> Any:
        """The group with a rank; all who ask for it wait for the same one."""
        if peer not in self._groups:
            self._groups[peer] = asyncio.create_task(self._make_group(peer, deadline), name="tieredckpt gloo group")
        return await shielded(self._groups[peer])

    async def _make_group(self, peer: int, deadline: float) -> Any:
        await self._messages.send([peer], _TOPIC, b"")
        await self._messages.recv(peer, _TOPIC, timeout=max(0.0, deadline - time.monotonic()))
        with self._lane() as lane:
            return await lane.call(deadline, self._connect_to, peer, deadline)

    def _connect_to(self, peer: int, deadline: float) -> Any:
        options = dist.ProcessGroupGloo._Options()
        options._devices = [self._device]
        options._threads = 1
        options._timeout = timedelta(seconds=max(0.001, min(_GROUP_TIMEOUT, deadline - time.monotonic())))
        pair = "-".join(map(str, sorted([self.rank, peer])))
        return dist.ProcessGroupGloo(dist.PrefixStore(pair, self._connect()), _place(self.rank, peer), 2, options)


def _place(rank: int, other: int) -> int:
    """The rank of one of two in their group."""
    return int(rank > other)


def _bytes_of(piece: torch.Tensor) -> memoryview:
    return memoryview(piece.numpy())


def _copy(source: memoryview, to: memoryview) -> None:
    np.copyto(np.frombuffer(to, np.uint8), np.frombuffer(source, np.uint8))  # without the interpreter's lock


def _closed() -> Closed:
    return Closed("the communicator of the ranks was closed, with the store it belonged to")


_living: WeakSet[GlooBulk] = WeakSet()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_living.clear)  # they are the parent's


@atexit.register
def _end_all() -> None:
    """End all waits at exit: a thread that returns from gloo after the interpreter has gone would abort the process."""
    for bulk in list(_living):
        bulk.end_waits()
