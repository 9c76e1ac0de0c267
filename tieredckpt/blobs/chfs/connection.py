"""The connection of a store: its worker, which is replaced when it dies, and its place in the ring of servers."""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import replace

import msgspec

from tieredckpt.blobs.base import Outgrown, Unanswered
from tieredckpt.blobs.chfs import frames, record
from tieredckpt.blobs.chfs.link import Link
from tieredckpt.concurrency import note, outlast, shielded
from tieredckpt.errors import Closed, TieredCkptError

__all__ = ["Connection"]

_log = logging.getLogger("tieredckpt")


class Connection:
    """Starts the worker of a store, replaces it when it dies, and finds where the store lies. Used on one event loop.

    Args:
        root: of the store in CHFS, without a slash at the end.
        connect: the first command to a worker.
        threads: of a worker.
        servers: how many there must be; None for as many as are recorded.
        stable_for: seconds without a change of the servers before their number is recorded; without ``servers``.
        writes: whether the store may continue with more servers than are recorded.
        grace: seconds that a cancelled command may go on before its worker is killed.
    """

    def __init__(
        self,
        root: str,
        connect: frames.Connect,
        *,
        threads: int,
        servers: int | None,
        stable_for: float,
        writes: bool,
        grace: float,
    ) -> None:
        self._root, self._connect, self._threads = root, connect, threads
        self._servers, self._stable_for, self._writes, self._grace = servers, stable_for, writes, grace
        self.within = connect.rpc_timeout_ms / 1000 + 5.0
        """Seconds in which a worker has to connect."""
        self.closed = False
        self.link: Link | None = None
        """Link to the current worker."""
        self._starting: asyncio.Task[Link] | None = None
        self._placement: record.Placement | None = None
        """Set at the first connection; from then on the store lies there, or has to be opened again."""
        self._placed_at = 0.0
        self._guards_record = asyncio.Lock()
        self._watched: Link | None = None
        self._watching: set[asyncio.Task[None]] = set()

    @property
    def location(self) -> str:
        return f"chfs:{(self._root if self._placement is None else self.folder) or '/'}"

    @property
    def folder(self) -> str:
        """Folder of the objects; known after `connect`."""
        assert self._placement is not None, "a verb connects first"
        return self._placement.folder

    @property
    def responsive(self) -> bool:
        """Whether no call has waited for so long that a server may be lost."""
        return self._watched is None or self._watched.waits < LOST

    def advice(self) -> dict[str, str]:
        """Advice for people: the number of `servers` to set for a tier that has none."""
        if self._servers is not None or self._placement is None or self.link is None or self._stable_for == 0:
            return {}
        servers = self.link.servers
        return {
            "advice": f"if these servers are all, let the tier say `servers = {servers}`, or it waits for more to join"
        }

    async def linked(self) -> Link:
        """A link to a worker that has connected. Raises `TierUnavailable`, `Invalid`, `Closed`."""
        if self.link is not None and not self.link.broken:
            return self.link
        if self._starting is None:
            self._starting = asyncio.ensure_future(self._start())
        starting = self._starting
        try:
            return await shielded(starting)
        except asyncio.CancelledError:
            if self.closed and starting.cancelled():
                raise Closed(f"the store at {self.location} was closed") from None
            raise

    async def ensure_recorded(self, link: Link) -> None:
        """Record how many servers there are. Raises `TierUnavailable`.

        Called at the first put: looking at a store that is not there does not create it.
        """
        async with self._guards_record:
            assert self._placement is not None
            if self._placement.record != "complete":
                if self._placement.record == "none" and self._servers is None:
                    await self._until_stable(link)
                await record.write(link, self._root, self._placement)
                self._placement = replace(self._placement, record="complete")

    async def ensure_kept(self, link: Link) -> None:
        """Check that no server has lost what it held, by the record. Raises `Outgrown`, `TierUnavailable`.

        Servers that were started again in the same places look as before, and each call that they answer succeeds.
        """
        assert self._placement is not None
        if not await record.is_whole(link, self._root, self._placement):
            await link.ask(frames.CheckRing())  # beside servers that joined, others own the entries
            await link.end("servers have lost what they held")
            raise self._emptied()

    def _emptied(self) -> Outgrown:
        return Outgrown(
            f"{self.location}: servers of CHFS have come back without what they held; the tier has to be opened anew, "
            f"and its steps have to be promoted again"
        )

    async def end(self) -> bool:
        """End the worker, running or starting. Returns whether there was one."""
        if self._starting is not None:
            self._starting.cancel()
            await outlast(self._starting)
        link, self.link = self.link, None
        if link is not None:
            await link.close()
        for task in self._watching:
            task.cancel()
        if self._watching:
            await asyncio.wait(self._watching)
        return link is not None

    async def _start(self) -> Link:
        try:
            if self.link is not None:
                old, self.link = self.link, None
                await old.end("a new one takes its place")
            link = Link(self.location, self._threads, self._grace)
            self._watch(link)
            await link.connect(self._connect, self.within)
            try:
                await self._place(link)
            except BaseException:
                await link.end("the ring is not what it was")
                raise
            self.link = link
            return link
        finally:
            self._starting = None

    def _watch(self, link: Link) -> None:
        self._watched = link
        task = asyncio.ensure_future(watch(link, self.location, self._connect))
        self._watching.add(task)
        task.add_done_callback(self._watching.discard)
        task.add_done_callback(note)

    async def _place(self, link: Link) -> None:
        """Find where the store lies on the current servers. Raises `Unanswered`."""
        found = await record.place(link, self._root, self.location, self._servers, writes=self._writes)
        if self._placement is not None and self._placement.folder != found.folder:
            raise Outgrown(
                f"{self.location}: CHFS has another number of servers than when the store was opened, {link.servers}, "
                f"and what it holds lies elsewhere now; it has to be opened anew"
            )
        if self._placement is not None and self._placement.record == "complete" != found.record:
            raise self._emptied()
        self._placement, self._placed_at = found, time.monotonic()

    async def _until_stable(self, link: Link) -> None:
        if self._stable_for:
            _log.info(
                "%s: CHFS has %d servers; nothing is written before their number was the same for %.0f s, as the tier "
                "has no `servers` that says how many there are to be",
                *(self.location, link.servers, self._stable_for),
            )
        await link.ask(frames.CheckRing())
        while (left := self._placed_at + self._stable_for - time.monotonic()) > 0:
            await asyncio.sleep(min(1.0, left))
            await link.ask(frames.CheckRing())


LOST = 1.0
"""Seconds after which a call that was not answered may be lost: a piece takes milliseconds."""

_IMPATIENT_MS = 1500
"""RPC timeout of the second connection: a server that does not answer for so long counts as silent."""

_LOOK = 0.25
_AGAIN = 5.0
"""Seconds until the servers are asked again, if all have answered and the call has not ended."""
_STARTED_WITHIN = 20.0
"""Seconds for the second worker to start and ask. One that takes longer proves nothing: the machine may be loaded."""


async def watch(link: Link, where: str, connect: frames.Connect) -> None:
    """End a link whose calls wait for a server that does not answer; return when it has ended."""
    if connect.rpc_timeout_ms <= 1000 * LOST + _IMPATIENT_MS:
        return  # the calls themselves time out as early
    while not link.dead:
        await asyncio.sleep(_LOOK)
        if link.waits < LOST:
            continue
        silence = await _silence(link, where, connect)
        if silence and not link.dead:
            await link.end("a server does not answer", silence=silence)
            return
        await asyncio.sleep(_AGAIN)


async def _silence(link: Link, where: str, connect: frames.Connect) -> str:
    """A message that names the servers that do not answer; empty if all do, or nothing is known."""
    impatient = msgspec.structs.replace(connect, rpc_timeout_ms=_IMPATIENT_MS)
    try:
        async with asyncio.timeout(_STARTED_WITHIN):
            other = Link(where, threads=1, grace=0.0)
            await other.connect(impatient, within=2 * _STARTED_WITHIN)
            try:
                await other.ask(frames.CheckRing())
                return _changed(link, other, where)
            finally:
                await other.end("it has told what it found")
    except Unanswered as error:
        return str(error)
    except (TieredCkptError, OSError):  # a TimeoutError too
        return ""


def _changed(link: Link, now: Link, where: str) -> str:
    left = [address for address in link.addresses if address not in now.addresses]
    if not left:
        return ""
    return (
        f"{where}: CHFS: {', '.join(left)} left the ring of {link.servers} servers, which now has {now.servers}; see "
        f"that all servers run"
    )
