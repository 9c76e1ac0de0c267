"""Messages for a rank that no call has received yet, and the calls that wait for messages."""

from __future__ import annotations

import asyncio

from tieredckpt.errors import Closed, Conflict, RanksUnavailable

__all__ = ["Inbox"]


class Inbox:
    """Messages by (source, topic), each of which arrives once and is received once. Belongs on one event loop."""

    def __init__(self) -> None:
        self._early: dict[tuple[int, str], bytes] = {}
        self._waiting: dict[tuple[int, str], asyncio.Future[bytes]] = {}
        self.closed = False
        self.trouble: Exception | None = None
        """Why no messages come, for the errors of the calls that wait."""

    @property
    def waits(self) -> bool:
        """Whether any call waits for a message."""
        return bool(self._waiting)

    def check_open(self) -> None:
        """Raise `Closed` after `close`."""
        if self.closed:
            raise Closed("the communicator of the ranks was closed, with the store it belonged to")

    def arrived(self, source: int, topic: str, data: bytes) -> None:
        """Give a message to the call that waits for it, or keep it."""
        waiting = self._waiting.pop((source, topic), None)
        if waiting is not None and not waiting.done():
            waiting.set_result(data)
        else:
            self._early[source, topic] = data

    async def recv(self, source: int, topic: str, timeout: float) -> bytes:
        """Wait for a message and return it. Raises as `Communicator.recv`; a cancelled call receives nothing."""
        self.check_open()
        key = source, topic
        if key in self._early:
            return self._early.pop(key)
        if key in self._waiting:
            raise Conflict(f"{topic!r} of rank {source} is being waited for already")
        waiting: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._waiting[key] = waiting
        try:
            await asyncio.wait([waiting], timeout=timeout)
        except asyncio.CancelledError:
            if waiting.done() and not waiting.exception():
                self._early[key] = waiting.result()
            raise
        finally:
            if self._waiting.get(key) is waiting:
                del self._waiting[key]
        if waiting.done():
            return waiting.result()
        raise RanksUnavailable(
            f"rank {source} has not sent {topic!r} within {timeout:.1f} s"
            + (f" ({self.trouble})" if self.trouble is not None else "")
            + "; it died, hangs or is slow: see its log, and raise `rank_deadline` if it is only slow",
            [source],
        ) from self.trouble

    def close(self) -> None:
        """End all waits with `Closed`, and drop the messages that no call has received."""
        self.closed = True
        self._early.clear()
        for (source, _), waiting in self._waiting.items():
            if not waiting.done():
                waiting.set_exception(Closed(f"the ranks' communicator was closed while rank {source} was waited for"))
        self._waiting.clear()
