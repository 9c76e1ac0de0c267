"""Ranks of MPI, through mpi4py: messages and bulk on a communicator of their own.

The communicator is made of the group of all processes with a tag, which takes no place in the order of the
trainer's collectives. Nothing ever waits inside MPI: every request is polled, on one thread, so MPI must have been
initialised for several.
"""

from __future__ import annotations

import asyncio
import time
import zlib
from collections import deque
from collections.abc import Awaitable, Callable, Collection
from contextlib import suppress
from typing import Any, TypeAlias, TypeVar
from weakref import WeakValueDictionary

import msgspec
import numpy as np
import numpy.typing as npt
from mpi4py import MPI

from tieredckpt._decoders import from_msgpack
from tieredckpt.concurrency import in_thread, whole
from tieredckpt.engine.ranks.communicator import exchange, node_of_this_process
from tieredckpt.engine.ranks.inbox import Inbox
from tieredckpt.engine.transport.foreign_thread import ForeignThread
from tieredckpt.engine.transport.mailbox import Idle
from tieredckpt.errors import Corrupt, Invalid, RanksUnavailable

__all__ = ["MpiCommunicator"]

T = TypeVar("T")
Piece: TypeAlias = npt.NDArray[np.uint8]

_CALL_TIMEOUT = 60.0
_FASTEST = 0.0005
_SLOWEST = 0.25
_SLOWEST_BULK = 0.02
_BACK_OFF = 1.5
_LAST_POSTS = 1.0
"""Seconds that messages which are still leaving are given when the communicator is closed."""

_MESSAGE_TAG = 0
_FIRST_BULK_TAG = 1
_PIECE = 4 << 20
"""Bytes that a bulk transfer moves at a time, in memory of our own: MPI cannot give the caller's back early."""
_PIECES_AHEAD = 2


class _Message(msgspec.Struct, array_like=True, frozen=True):
    """A message in MPI, sent with the message tag; MPI names its source."""

    topic: str
    data: bytes


_encode = msgspec.msgpack.Encoder().encode


class MpiCommunicator:
    """A communicator for a training under MPI, over all its processes; raises `Invalid` elsewhere.

    Args:
        name: the ranks that use the same one meet.
        node: see `Communicator`.
    """

    def __init__(self, *, name: str = "tieredckpt", node: str | None = None) -> None:
        if not MPI.Is_initialized() or MPI.Is_finalized():
            raise Invalid("MPI is not initialised; import mpi4py.MPI before the store is opened")
        if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
            raise Invalid(
                "MPI was not initialised for several threads (MPI_THREAD_MULTIPLE), and the store works beside the "
                "training; set mpi4py.rc.thread_level = 'multiple' before mpi4py.MPI is imported, use an MPI that "
                "supports it, or open the store with ranks=SharedStore(...)"
            )
        self.rank, self.size = MPI.COMM_WORLD.Get_rank(), MPI.COMM_WORLD.Get_size()
        self.node = node or node_of_this_process()
        self.bulk = True
        self._tag = zlib.crc32(name.encode()) % 32767
        self._thread = ForeignThread("tieredckpt mpi")
        self._inbox = Inbox()
        self._comm: Any = None
        self._polling: asyncio.Task[None] | None = None
        self._stir = asyncio.Event()
        self._leaving: list[tuple[Any, bytes]] = []
        self._coming: list[tuple[Any, int, bytearray]] = []
        self._turns: WeakValueDictionary[tuple[str, int, int], asyncio.Lock] = WeakValueDictionary()
        self._pieces: list[Piece] = []
        """Memory for bulk that nothing is under way in."""
        self._broken: dict[int, list[Any]] = {}
        """Ranks with which a transfer failed, with requests and memory that MPI may still hold."""

    async def open(self, *, timeout: float) -> None:
        """Make the communicator, together with all other ranks."""
        loop = asyncio.get_running_loop()
        begin = loop.time()
        try:
            self._comm = await self._thread.call(self._make_communicator, timeout=timeout)
        except TimeoutError:
            raise RanksUnavailable(
                f"rank {self.rank} of {self.size} has not met the others within {timeout:.1f} s; do all ranks open "
                "the store with its tiers at the same paths?"
            ) from None
        except MPI.Exception as error:
            raise RanksUnavailable(f"the ranks' own communicator could not be made: {error}") from error
        await exchange(self, "tieredckpt/open", b"", timeout=max(0.0, timeout - (loop.time() - begin)))

    def _make_communicator(self) -> Any:
        comm = MPI.COMM_WORLD.Create_group(MPI.COMM_WORLD.Get_group(), self._tag)
        comm.Set_errhandler(MPI.ERRORS_RETURN)
        return comm

    async def close(self) -> None:
        """Finish sends under way, and free the communicator."""
        if self._inbox.closed:
            return
        self._inbox.close()
        self._stir.set()
        if self._comm is not None:
            with suppress(RanksUnavailable):
                await whole(self._free())
        self._thread.close()

    async def _free(self) -> None:
        if self._polling is not None:
            await asyncio.gather(self._polling, return_exceptions=True)
        deadline = time.monotonic() + _LAST_POSTS
        while self._leaving and time.monotonic() < deadline:
            await self._call(self._turn)
            await asyncio.sleep(_FASTEST)
        if not self._leaving and not self._broken:  # else MPI still needs it
            await self._call(self._comm.Free)

    # -- messages -----------------------------------------------------------------------------------------

    async def send(self, to: Collection[int], topic: str, data: bytes) -> None:
        """Begin to send the message; polling sees to the rest."""
        self._check_open()
        message = _encode(_Message(topic, data))
        if self.rank in to:
            self._inbox.arrived(self.rank, topic, bytes(data))
        await self._call(self._begin_posting, [rank for rank in to if rank != self.rank], message)
        self._poll()

    def _begin_posting(self, to: list[int], message: bytes) -> None:
        for rank in to:
            self._leaving.append((self._comm.Isend([message, MPI.BYTE], rank, _MESSAGE_TAG), message))

    async def recv(self, source: int, topic: str, *, timeout: float) -> bytes:
        """Poll until the message is there."""
        self._check_open()
        asyncio.get_running_loop().call_soon(self._poll)  # once it is waited for
        return await self._inbox.recv(source, topic, timeout)

    def _poll(self) -> None:
        self._stir.set()
        if self._polling is None or self._polling.done():
            self._polling = asyncio.create_task(self._poll_while_needed(), name="tieredckpt mpi")

    async def _poll_while_needed(self) -> None:
        idle = Idle(_FASTEST, _SLOWEST)
        while (self._inbox.waits or self._leaving) and not self._inbox.closed:
            try:
                messages = await self._call(self._turn)
            except RanksUnavailable as error:
                self._inbox.trouble = error
                messages = []
            for source, message in messages:
                with suppress(Corrupt):
                    said = from_msgpack(message, _Message, "no message")
                    self._inbox.arrived(source, said.topic, said.data)
            if messages:
                idle.over()
            with suppress(TimeoutError):
                async with asyncio.timeout(idle.pause):
                    await self._stir.wait()
                self._stir.clear()
                idle.over()

    def _turn(self) -> list[tuple[int, bytearray]]:
        """Poll sends and receives; returns the messages that have come."""
        self._leaving = [(request, message) for request, message in self._leaving if not request.Test()]
        status = MPI.Status()
        while (probed := self._comm.Improbe(MPI.ANY_SOURCE, _MESSAGE_TAG, status)) is not None:
            memory = bytearray(status.Get_count(MPI.BYTE))
            self._coming.append((probed.Irecv([memory, MPI.BYTE]), status.Get_source(), memory))
        came = [(source, memory) for request, source, memory in self._coming if request.Test()]
        self._coming = [each for each in self._coming if each[0] != MPI.REQUEST_NULL]
        return came

    # -- bulk ---------------------------------------------------------------------------------------------

    async def send_bulk(self, to: int, memory: memoryview, *, tag: int, timeout: float) -> None:
        """Send in pieces, each copied before it leaves."""

        async def begin(part: memoryview, piece: Piece) -> Any:
            await in_thread(_copy, part, piece)
            return await self._call(self._comm.Isend, [piece[: len(part)], MPI.BYTE], to, _FIRST_BULK_TAG + tag)

        async def end(part: memoryview, piece: Piece) -> None:
            """Does nothing: no resource is left to release."""

        await self._transfer("send", to, memory, begin, end, tag, timeout)

    async def recv_bulk(self, source: int, memory: memoryview, *, tag: int, timeout: float) -> None:
        """Receive in pieces, each copied after it has come."""

        async def begin(part: memoryview, piece: Piece) -> Any:
            return await self._call(self._comm.Irecv, [piece, MPI.BYTE], source, _FIRST_BULK_TAG + tag)

        async def end(part: memoryview, piece: Piece) -> None:
            await in_thread(_copy, piece[: len(part)], part)

        await self._transfer("receive", source, memory, begin, end, tag, timeout)

    async def _transfer(
        self,
        verb: str,
        peer: int,
        memory: memoryview,
        begin: Callable[[memoryview, Piece], Awaitable[Any]],
        end: Callable[[memoryview, Piece], Awaitable[None]],
        tag: int,
        timeout: float,
    ) -> None:
        self._check_open()
        if not 0 <= tag < MPI.COMM_WORLD.Get_attr(MPI.TAG_UB) - _FIRST_BULK_TAG:
            raise Invalid(f"{tag} is no tag that this MPI can send")
        under_way: deque[tuple[memoryview, Any]] = deque()
        pieces: deque[Piece] = deque()
        turn = self._turns.setdefault((verb, peer, tag), asyncio.Lock())

        async def end_one() -> None:
            part, request = under_way[0]
            await self._until_done(request)
            await end(part, pieces[0])
            under_way.popleft()
            self._pieces.append(pieces.popleft())

        try:
            async with asyncio.timeout(timeout), turn:
                if peer in self._broken:
                    raise RanksUnavailable(f"an earlier transfer with rank {peer} failed", [peer])
                for at in range(0, len(memory), _PIECE):
                    if len(under_way) == _PIECES_AHEAD:
                        await end_one()
                    part = memory[at : at + _PIECE]
                    pieces.append(self._pieces.pop() if self._pieces else np.empty(_PIECE, np.uint8))
                    under_way.append((part, await begin(part, pieces[-1])))
                while under_way:
                    await end_one()
        except BaseException as error:
            # MPI keeps what it has: to wait for the end of a request that was cancelled may be to wait for the dead.
            self._broken.setdefault(peer, []).extend([*(request for _, request in under_way), *pieces])
            if not isinstance(error, TimeoutError):
                raise
            raise RanksUnavailable(
                f"rank {self.rank} could not {verb} {len(memory)} bytes in bulk with rank {peer} within "
                f"{timeout:.1f} s",
                [peer],
            ) from None

    async def _until_done(self, request: Any) -> None:
        pause = _FASTEST / 4
        while not await self._call(request.Test):
            await asyncio.sleep(pause)
            pause = min(pause * _BACK_OFF, _SLOWEST_BULK)

    def _check_open(self) -> None:
        self._inbox.check_open()
        if self._comm is None:
            raise Invalid(f"the communicator of rank {self.rank} is not open")

    async def _call(self, function: Callable[..., T], *arguments: Any) -> T:
        try:
            return await self._thread.call(function, *arguments, timeout=_CALL_TIMEOUT)
        except TimeoutError:
            raise RanksUnavailable(f"MPI has not come back from a call within {_CALL_TIMEOUT:.0f} s") from None
        except MPI.Exception as error:
            raise RanksUnavailable(f"MPI failed: {error}") from error


def _copy(source: memoryview | Piece, to: memoryview | Piece) -> None:
    bytes_of_source = np.frombuffer(source, np.uint8)
    np.copyto(np.frombuffer(to, np.uint8)[: len(bytes_of_source)], bytes_of_source)  # without the interpreter's lock
