"""Detects a silent server early, by a second worker with a short RPC timeout.

A call to a server that was killed, or hangs, takes libchfs the whole RPC timeout. That has to be long, since a busy
server that does not answer in time is lost from the ring. The second connection may lose servers: it is used for
nothing else.
"""

from __future__ import annotations

import asyncio

import msgspec

from tieredckpt.blobs.base import Unanswered
from tieredckpt.blobs.chfs import frames
from tieredckpt.blobs.chfs.link import Link
from tieredckpt.errors import TieredCkptError

__all__ = ["LOST", "watch"]

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
        return  # the calls themselves end as early
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
            other = await Link.start(where, impatient, threads=1, grace=0.0, within=2 * _STARTED_WITHIN)
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
