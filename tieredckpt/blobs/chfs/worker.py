"""The process that hosts libchfs: takes commands from a socket until that closes.

libchfs may end, hang or crash its process in any call, so the process keeps no state that its replacement would need.
It loads neither the engine nor numpy.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import msgspec

from tieredckpt._decoders import msgpack_decoder
from tieredckpt.blobs.chfs import frames

if TYPE_CHECKING:
    from tieredckpt._chfs import Client, File

__all__ = ["main"]

_PR_SET_PDEATHSIG = 1
_NAMES_PER_REPLY = 128
"""Names are at most 255 bytes, or three times that if they are not UTF-8, so such a reply fits in a packet."""


def main(fd: int, threads: int, parent: int) -> None:
    """Serve the socket ``fd`` with so many threads, for as long as the process ``parent`` lives."""
    _end_with(parent)
    connection = socket.socket(fileno=fd)
    worker = _Worker(connection, threads)
    with suppress(OSError):  # the store has gone
        worker.serve()
    # At once: a thread may hang in libchfs for ever, and its destructors are not to be trusted.
    os._exit(0)


def _end_with(parent: int) -> None:
    """Ask the kernel to end this process when its parent dies. On other systems the end of the socket does."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(0)


class _Worker:
    def __init__(self, connection: socket.socket, threads: int) -> None:
        self._connection = connection
        self._pool = ThreadPoolExecutor(threads)
        self._client: Client | None = None
        self._regions: dict[int, memoryview] = {}
        self._files: dict[int, File] = {}
        self._guards_sending = threading.Lock()

    def serve(self) -> None:
        decoder = msgpack_decoder(frames.Request)
        while True:
            data, fds, _, _ = socket.recv_fds(self._connection, frames.PACKET, 1)
            if not data:
                return
            request = decoder.decode(data)
            match request.command:
                case frames.MapRegion() | frames.UnmapRegion():
                    # Before the next command is looked at, since that may name the region.
                    self._answer(request, fds)
                case frames.Close():
                    # Asks no server, so it does not wait for the threads that wait for one.
                    self._answer(request, fds)
                case _:
                    self._pool.submit(self._answer, request, fds)

    def _answer(self, request: frames.Request, fds: list[int]) -> None:
        try:
            reply = frames.Reply(request.number, value=self._run(request, fds))
        except Exception as error:
            code, message = error.args if type(error).__name__ == "ChfsError" else ("failed", repr(error))
            reply = frames.Reply(request.number, code, message)
        finally:
            for fd in fds:
                os.close(fd)
        self._send(reply)

    def _run(self, request: frames.Request, fds: list[int]) -> Any:
        command = request.command
        match command:
            case frames.Connect():
                return self._connect(command)
            case frames.MapRegion():
                access = mmap.ACCESS_WRITE if command.writable else mmap.ACCESS_READ
                self._regions[command.region] = memoryview(mmap.mmap(fds[0], command.size, access=access))
            case frames.UnmapRegion():
                del self._regions[command.region]  # the mapping goes with its last view
            case frames.Write():
                file, offset = self._files[command.file], command.offset
                for memory in self._memory(command.spans):
                    file.write(memory, offset)
                    offset += len(memory)
            case frames.Read():
                file, offset = self._files[command.file], command.offset
                for memory in self._memory(command.spans):
                    file.read_into(memory, offset)
                    offset += len(memory)
            case frames.Close():
                if command.file in self._files:
                    self._files.pop(command.file).close()
            case _:
                return self._ask(request.number, command)
        return None

    def _ask(self, number: int, command: frames.Command) -> Any:
        client = self._client
        assert client is not None, "the first command connects"
        match command:
            case frames.CheckRing():
                client.check_ring()
            case frames.Create():
                self._files[command.file] = client.create(command.path, command.chunk_size)
            case frames.Open():
                self._files[command.file] = client.open_object(command.path)
            case frames.Stat():
                return client.stat(command.path)
            case frames.ListFolder():
                entries = client.list(command.path, command.replicas)
                for first in range(0, len(entries), _NAMES_PER_REPLY):
                    self._send(frames.Reply(number, frames.MORE, value=entries[first : first + _NAMES_PER_REPLY]))
                return []
            case frames.Remove():
                client.remove(command.path)
            case frames.RemoveFolder():
                client.remove_folder(command.path)
            case frames.MakeFolder():
                client.make_folder(command.path)
        return None

    def _connect(self, command: frames.Connect) -> tuple[str, str, int, list[str]]:
        from tieredckpt._chfs import Client

        client = Client(command.library, command.server, command.rpc_timeout_ms)
        self._client = client
        return client.version, client.library, client.servers, client.addresses

    def _memory(self, spans: list[frames.Span]) -> Iterator[memoryview]:
        for region, offset, length in spans:
            yield self._regions[region][offset : offset + length]

    def _send(self, reply: frames.Reply) -> None:
        data = msgspec.msgpack.encode(reply)
        try:
            with self._guards_sending:
                self._connection.send(data)
        except OSError:
            os._exit(0)  # the store has gone
