"""The socket between a trainer and its agent: in the RAM tier's folder, for one user's processes alone.

A frame is its length in four bytes, little-endian, and that much msgpack.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

from tieredckpt.concurrency import in_thread
from tieredckpt.engine.tier.lease import Holder, holder_of, lives_here
from tieredckpt.engine.wire_types import decode, encode
from tieredckpt.errors import Conflict, Corrupt

__all__ = ["SOCKET", "Parted", "Silent", "Wire", "accept", "connect", "listen"]

M = TypeVar("M")

SOCKET = "agent.sock"
"""Name of the socket in the folder."""

_CONNECT = 5.0
"""Seconds that a connection may take: a trainer that hangs accepts none."""
_FRAME_MAX = 256 << 20
_BACKLOG_MAX = 256 << 20
"""Bytes that wait for a peer which does not read, before it counts as gone."""


class Parted(Exception):
    """The other process ended the connection, or sent a message that this version does not know."""


class Silent(Parted):
    """The other side is there, and says nothing."""


class Wire:
    """One end of a connection. Lives on one event loop."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, peer: int, holder: Holder) -> None:
        self.peer = peer
        """Number of the other process; 0 where the system does not tell."""
        self.holder = holder
        """The holder of a lease, should the process die."""
        self._reader, self._writer = reader, writer
        self._coming: int | None = None
        """Length of the next frame, if it has been read, and the frame has not."""

    async def read(self, kind: type[M] | object, within: float | None = None) -> M:
        """The next frame. Raises `Parted`; `Silent` when none comes ``within`` so many seconds, and may come yet."""
        try:
            async with asyncio.timeout(within):
                if self._coming is None:
                    self._coming = int.from_bytes(await self._reader.readexactly(4), "little")
                if self._coming > _FRAME_MAX:
                    raise Parted(f"a frame of {self._coming} bytes cannot be right")
                data = await self._reader.readexactly(self._coming)
                self._coming = None
        except TimeoutError:
            raise Silent(f"it has said nothing for {within:g} s") from None
        except (asyncio.IncompleteReadError, OSError) as error:
            raise Parted("it has ended") from error
        try:
            found: M = decode(data, kind)
        except Corrupt as error:
            raise Parted(str(error)) from error
        return found

    def send(self, message: object) -> None:
        """Send a frame; if the other side has gone, nothing is sent and the reader notices."""
        transport = self._writer.transport
        if transport.is_closing():
            return
        if transport.get_write_buffer_size() > _BACKLOG_MAX:
            transport.abort()
            return
        data = encode(message)
        self._writer.write(len(data).to_bytes(4, "little") + data)

    def peer_lives(self) -> bool:
        """Whether the other process lives, as far as the system tells: one forked from it may hold its socket."""
        return not self.peer or lives_here(self.holder)

    async def close(self) -> None:
        """Send the remaining frames, and end the connection."""
        with contextlib.suppress(OSError):
            self._writer.close()
            await self._writer.wait_closed()


def listen(folder: Path) -> socket.socket:
    """A new socket in the folder, in place of one that was left there. Blocking. Raises `OSError`."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        with _short(folder) as place:
            path = f"{place}/{SOCKET}"
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
            sock.bind(path)
            os.chmod(path, 0o600)  # before anybody may connect
        sock.listen()
    except BaseException:
        sock.close()
        raise
    return sock


async def accept(sock: socket.socket) -> Wire:
    """The next connection. Raises `Conflict` for one of another user, `OSError` when the call failed."""
    connection, _ = await asyncio.get_running_loop().sock_accept(sock)
    return await _wire(connection)


async def connect(folder: Path) -> Wire | None:
    """A connection to the process that listens in the folder; None if there is none.

    Raises `Conflict` for another user.
    """
    try:
        sock = await in_thread(_connected, folder)
    except OSError:
        return None
    return await _wire(sock)


def _connected(folder: Path) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.settimeout(_CONNECT)
        with _short(folder) as place:
            sock.connect(f"{place}/{SOCKET}")
        sock.setblocking(False)
    except BaseException:
        sock.close()
        raise
    return sock


async def _wire(sock: socket.socket) -> Wire:
    try:
        process, user = _peer(sock)
        if user != os.getuid():
            raise Conflict(f"process {process} of user {user} is at the agent's socket, which is not theirs")
        holder = await in_thread(holder_of, process, time.time())
        reader, writer = await asyncio.open_unix_connection(sock=sock)
    except BaseException:
        sock.close()
        raise
    return Wire(reader, writer, process, holder)


def _peer(sock: socket.socket) -> tuple[int, int]:
    """Process and user of the other side; where the system does not tell, the folder is this user's alone."""
    if not hasattr(socket, "SO_PEERCRED"):
        return 0, os.getuid()
    found = struct.Struct("3i")
    process, user, _ = found.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, found.size))
    return process, user


@contextlib.contextmanager
def _short(folder: Path) -> Iterator[str]:
    """Shorten a folder path to fit the 107-byte limit of socket paths."""
    if not os.path.isdir("/proc/self/fd"):
        yield str(folder)
        return
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{fd}"
    finally:
        os.close(fd)
