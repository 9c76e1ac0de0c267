"""A server of S3's protocol that throws away what is put, and serves ranges of one object from memory.

``python null_store.py PORT`` serves on loopback until it is ended. What a client reaches here is its own limit.
"""

from __future__ import annotations

import asyncio
import re
import sys

__all__ = ["SIZE"]

SIZE = 64 << 20
"""Bytes of every object."""

_CONTENT = memoryview(bytes(range(256)) * (SIZE // 256))
_AT_A_TIME = 1 << 20
_LENGTH = re.compile(r"content-length: (\d+)", re.IGNORECASE)
_RANGE = re.compile(r"range: bytes=(\d+)-(\d+)", re.IGNORECASE)


class _Connection(asyncio.BufferedProtocol):
    """One client: each request is answered when its body has come, which lands in the same memory each time."""

    def __init__(self) -> None:
        self._memory = memoryview(bytearray(_AT_A_TIME))
        self._head = bytearray()
        self._left = 0
        """Bytes of a body that are still to come."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._memory

    def buffer_updated(self, nbytes: int) -> None:
        data = self._memory[:nbytes]
        while len(data):
            if self._left:
                taken = min(self._left, len(data))
                self._left -= taken
                data = data[taken:]
                if not self._left:
                    self._answer()
                continue
            at = len(self._head)
            self._head += data
            end = self._head.find(b"\r\n\r\n")
            if end < 0:
                return
            data = data[end + 4 - at :]
            del self._head[end:]
            found = _LENGTH.search(self._head.decode("latin-1"))
            self._left = int(found[1]) if found else 0
            if not self._left:
                self._answer()

    def _answer(self) -> None:
        head = self._head.decode("latin-1")
        self._head.clear()
        common = 'ETag: "x"\r\nLast-Modified: Sun, 22 Nov 2026 10:00:00 GMT\r\n'
        if not head.startswith(("GET", "HEAD")):
            self._transport.write(f"HTTP/1.1 200 OK\r\n{common}Content-Length: 0\r\n\r\n".encode())
            return
        start, end, status = 0, SIZE, "200 OK"
        if asked := _RANGE.search(head):
            start, end, status = int(asked[1]), min(int(asked[2]) + 1, SIZE), "206 Partial Content"
            common += f"Content-Range: bytes {start}-{end - 1}/{SIZE}\r\n"
        self._transport.write(f"HTTP/1.1 {status}\r\n{common}Content-Length: {end - start}\r\n\r\n".encode())
        if head.startswith("GET"):
            self._transport.write(_CONTENT[start:end])


async def _serve(port: int) -> None:
    server = await asyncio.get_running_loop().create_server(_Connection, "127.0.0.1", port)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(_serve(int(sys.argv[1])))
