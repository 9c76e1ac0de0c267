"""The link to one worker process: commands, replies, the memory that both share, and the worker's death.

A link belongs to one event loop. It is never repaired: a link whose worker died, or lost servers, is replaced.
"""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import msgspec

from tieredckpt._decoders import UNREADABLE, msgpack_decoder
from tieredckpt.blobs.base import Buffer, Unanswered
from tieredckpt.blobs.chfs import frames
from tieredckpt.blobs.chfs.process import Process
from tieredckpt.blobs.ram.regions import Region, locate
from tieredckpt.concurrency import note, outlast, shielded
from tieredckpt.errors import Conflict, Invalid, NoSpace, NotFound, ShortRead, TieredCkptError, TierUnavailable

__all__ = ["Link"]

_END = 2.0
"""Seconds that a worker without work may take to end by itself."""

_NO_SERVER = 2
"""The exit status with which libchfs ends a process that it cannot connect."""

_ERRORS: dict[str, type[TieredCkptError]] = {
    "exists": Conflict,
    "full": NoSpace,
    "invalid": Invalid,
    "missing": NotFound,
    "short": ShortRead,
    "silent": Unanswered,
    "unavailable": TierUnavailable,
}


@dataclass(slots=True)
class _Pending:
    """A command that the worker has not answered yet."""

    answer: asyncio.Future[Any]
    heard_at: float
    """When it was sent, or the last part of its answer came."""
    parts: list[Any] = field(default_factory=list)
    """Of an answer that comes in several replies."""


class Link:
    """One worker, started here and connected to CHFS by `connect`.

    Args:
        where: the store's place, for messages.
        threads: how many calls of libchfs the worker makes at a time.
        grace: seconds that a command may go on after it was cancelled, before the worker is killed.
    """

    def __init__(self, where: str, threads: int, grace: float) -> None:
        self._where, self._grace = where, grace
        self._loop = asyncio.get_running_loop()
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.setblocking(False)
        self._decoder = msgpack_decoder(frames.Reply)
        self._pending: dict[int, _Pending] = {}
        self._last = 0
        self._outgoing: deque[tuple[bytes, Sequence[int]]] = deque()
        self._mapped: dict[int, tuple[Region, asyncio.Task[None]]] = {}
        self._dead = asyncio.Event()
        self._ending: asyncio.TimerHandle | None = None
        self._silence = ""
        self.broken = False
        """Whether it must be replaced: the worker died, or lost a call, or the servers changed."""
        self.servers = 0
        self.version = self.library = ""
        self.addresses: list[str] = []
        self._loop.add_reader(self._socket, self._receive)
        self.process = Process(theirs, threads, self._ended)

    async def connect(self, command: frames.Connect, within: float) -> None:
        """Connect to CHFS within so many seconds, or end the worker. Raises `TierUnavailable`, `Invalid`.

        `Unanswered` if libchfs ends the worker, as it does if the server that it asks for the others is silent.
        """
        try:
            async with asyncio.timeout(within):
                self.version, self.library, self.servers, self.addresses = await self.ask(command)
        except TimeoutError:
            await self.end("connecting took too long")
            raise TierUnavailable(
                f"{self._where}: the CHFS worker had not connected after {within:g} s, and was ended; see that all "
                f"servers answer, or raise `rpc_timeout`"
            ) from None
        except BaseException as error:
            if isinstance(error, TierUnavailable) and self.process.exit_status == _NO_SERVER:
                server = command.server or os.environ.get("CHFS_SERVER", "")
                raise Unanswered(
                    f"{self._where}: CHFS: libchfs could not connect to {server}; see that all servers run; the worker "
                    f"{self.process.what_happened()}"
                ) from None
            await self.end("connecting failed")
            raise

    async def ask(self, command: frames.Command, *, fds: Sequence[int] = ()) -> Any:
        """Send a command and return the worker's answer. ``fds`` are sent with it, and closed here.

        A cancellation is raised when the worker has ended the command or, after a time of grace, is dead: from then
        on it touches no memory that the command names. Raises the error that the code of the answer stands for, and
        `TierUnavailable` if the worker is dead or dies: `Unanswered` where a silent server is known.
        """
        self._last += 1
        number, answer = self._last, self._loop.create_future()
        if self._dead.is_set():
            answer.set_exception(self._death())
        else:
            self._pending[number] = _Pending(answer, time.monotonic())
        self._send(msgspec.msgpack.encode(frames.Request(number, command)), fds)
        try:
            return await shielded(answer)
        except asyncio.CancelledError:
            await outlast(asyncio.ensure_future(self._end_cancelled(answer, type(command).__name__)))
            raise

    async def _end_cancelled(self, answer: asyncio.Future[Any], command: str) -> None:
        """Wait until the worker has ended a cancelled command; end a worker that does not."""
        await asyncio.wait([answer], timeout=self._grace)
        if not answer.done():
            await self.end(f"{command} was cancelled and had not ended {self._grace:g} s later")
        note(answer)

    async def span(self, memory: Buffer, *, to_fill: bool = False) -> frames.Span | None:
        """The span by which the worker reaches ``memory`` in place; None where it cannot. Raises `TierUnavailable`."""
        found = locate(memory)
        if found is None or (to_fill and not found[0].writable):
            return None
        region, offset = found
        if region.number not in self._mapped:
            await self._unmap_closed()
        if region.number not in self._mapped:
            self._mapped[region.number] = region, asyncio.ensure_future(self._map(region))
        await shielded(self._mapped[region.number][1])
        return region.number, offset, memoryview(memory).nbytes

    async def _map(self, region: Region) -> None:
        try:
            fd = region.duplicate()
            if fd is None:
                raise TierUnavailable(f"{self._where}: the memory was closed while its bytes were on their way")
            await self.ask(frames.MapRegion(region.number, region.size, region.writable), fds=[fd])
        except BaseException:
            del self._mapped[region.number]
            raise

    async def _unmap_closed(self) -> None:
        closed = [number for number, (region, task) in self._mapped.items() if region.closed and task.done()]
        for number in closed:
            del self._mapped[number]
        for number in closed:
            await self.ask(frames.UnmapRegion(number))

    async def close(self) -> None:
        """Close the socket, which ends the worker, and kill a worker that does not end soon."""
        self._socket_ends()
        try:
            async with asyncio.timeout(_END):
                await self._dead.wait()
        except TimeoutError:
            await self.end("it had not ended when its store was closed")

    @property
    def dead(self) -> bool:
        return self._dead.is_set()

    @property
    def waits(self) -> float:
        """Seconds for which the oldest command has been waiting for a part of its answer."""
        now = time.monotonic()
        return now - min((pending.heard_at for pending in self._pending.values()), default=now)

    async def end(self, reason: str, *, silence: str = "") -> None:
        """Kill the worker and wait for its end, even if this is cancelled.

        ``silence`` names a server that does not answer; the commands under way fail with it.
        """
        self.broken = True
        self._silence = self._silence or silence
        self.process.kill(reason)
        await outlast(asyncio.ensure_future(self._dead.wait()))

    # -- the socket ---------------------------------------------------------------------------------------

    def _send(self, data: bytes, fds: Sequence[int] = ()) -> None:
        self._outgoing.append((data, fds))
        if len(self._outgoing) == 1:
            self._flush()

    def _flush(self) -> None:
        """Send the outgoing messages, until the socket is full."""
        while self._outgoing:
            data, fds = self._outgoing[0]
            try:
                socket.send_fds(self._socket, [data], fds)
            except BlockingIOError:
                self._loop.add_writer(self._socket, self._flush)
                return
            except (BrokenPipeError, ConnectionResetError):
                pass  # its end is noticed where it is reaped
            except OSError as error:
                if self._socket.fileno() >= 0:
                    self.process.kill(f"nothing could be sent to it: {error}")  # or its callers would wait for ever
            self._outgoing.popleft()
            for fd in fds:
                os.close(fd)
        if self._socket.fileno() >= 0:
            self._loop.remove_writer(self._socket)

    def _receive(self) -> None:
        try:
            data = self._socket.recv(frames.PACKET)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._socket_ends()
            # It is ending, and how is worth knowing. Otherwise something closed the socket under it.
            self._ending = self._loop.call_later(_END, self.process.kill, "it closed its socket")
            return
        try:
            reply = self._decoder.decode(data)
            pending = self._pending[reply.number]
            if reply.code == frames.MORE:
                pending.parts += reply.value
                pending.heard_at = time.monotonic()
                return
            del self._pending[reply.number]
        except (*UNREADABLE, LookupError, TypeError) as error:
            # libchfs may have written over the worker's memory, and callers would wait for ever.
            self.broken = True
            self.process.kill(f"what it sent is no answer: {error!r:.200}")
            return
        if pending.answer.done():
            return
        if reply.code:
            pending.answer.set_exception(self._error(reply))
        else:
            pending.answer.set_result(pending.parts or reply.value)

    def _error(self, reply: frames.Reply) -> TieredCkptError:
        if reply.code in ("silent", "unavailable"):
            self.broken = True  # a client keeps the ring that it has seen
        return _ERRORS.get(reply.code, TierUnavailable)(f"{self._where}: {reply.message}")

    def _socket_ends(self) -> None:
        if self._socket.fileno() < 0:
            return
        self._loop.remove_reader(self._socket)
        self._loop.remove_writer(self._socket)
        with suppress(OSError):  # it has gone already
            self._socket.shutdown(socket.SHUT_RDWR)  # a process that was forked from this one may hold the socket too
        self._socket.close()
        while self._outgoing:
            for fd in self._outgoing.popleft()[1]:
                os.close(fd)

    # -- the end ------------------------------------------------------------------------------------------

    def _ended(self) -> None:
        with suppress(RuntimeError):  # the loop is closed, and so no caller waits
            self._loop.call_soon_threadsafe(self._died)

    def _died(self) -> None:
        self.broken = True
        self._dead.set()
        if self._ending is not None:
            self._ending.cancel()
        self._socket_ends()
        for pending in self._pending.values():
            if not pending.answer.done():
                pending.answer.set_exception(self._death())
        self._pending.clear()

    def _death(self) -> TierUnavailable:
        if self._silence:
            return Unanswered(self._silence)
        return TierUnavailable(
            f"{self._where}: the CHFS worker {self.process.what_happened()}; the next operation starts a new one"
        )
