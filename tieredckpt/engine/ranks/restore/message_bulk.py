"""Bulk transfers as messages, piece by piece, for communicators without bulk of their own.

Far slower than a transport with bulk, so it is used only for chunks that lie in the RAM of other machines and nowhere
else.
"""

from __future__ import annotations

import time
from collections import Counter

from tieredckpt.engine import limits
from tieredckpt.engine.ranks.communicator import Communicator
from tieredckpt.errors import RanksUnavailable

__all__ = ["MessageBulk"]


class MessageBulk:
    """Sends and receives bulk bytes through a `Communicator` that has only messages."""

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator
        self._sent: Counter[tuple[int, int]] = Counter()
        """Pieces so far, by the receiver and the tag."""
        self._received: Counter[tuple[int, int]] = Counter()

    async def send_bulk(self, to: int, memory: memoryview, *, tag: int, timeout: float) -> None:
        """Return when the receiver has taken everything. Raises `RanksUnavailable`."""
        deadline = time.monotonic() + timeout
        for start in range(0, len(memory), limits.in_force.message_size):
            self._sent[to, tag] += 1
            topic = f"bulk/{tag}/{self._sent[to, tag]}"
            await self._communicator.send([to], topic, bytes(memory[start : start + limits.in_force.message_size]))
            await self._communicator.recv(to, f"{topic}/taken", timeout=max(0.0, deadline - time.monotonic()))

    async def recv_bulk(self, source: int, memory: memoryview, *, tag: int, timeout: float) -> None:
        """Fill the memory. Raises `RanksUnavailable`."""
        deadline = time.monotonic() + timeout
        for start in range(0, len(memory), limits.in_force.message_size):
            self._received[source, tag] += 1
            topic = f"bulk/{tag}/{self._received[source, tag]}"
            piece = await self._communicator.recv(source, topic, timeout=max(0.0, deadline - time.monotonic()))
            into = memory[start : start + limits.in_force.message_size]
            if len(piece) != len(into):
                raise RanksUnavailable(f"rank {source} has sent {len(piece)} bytes instead of {len(into)}", [source])
            into[:] = piece
            await self._communicator.send([source], f"{topic}/taken", b"")
