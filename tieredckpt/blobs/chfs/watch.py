"""Finds out early that a server does not answer, and which: by a worker of its own that waits for less.

A call to a server that was killed, or hangs, takes libchfs the whole RPC timeout, which has to be long, since busy
servers that do not answer in time are lost from the ring. A second connection to the same servers may be impatient:
what it loses, it loses alone.
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
"""Of the second connection. A server that answers none of its calls for so long is taken to be silent."""

_LOOK = 0.25
_AGAIN = 5.0
"""Seconds until the servers are asked again that have all answered, though a call has not ended."""
_STARTED_WITHIN = 20.0
"""Seconds in which nothing is concluded from a second worker that does not come up: the machine may be loaded."""


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
    """Who does not answer; empty where all do, or it cannot be told."""
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
    except (TieredCkptError, OSError):  # a time that ran out is one: the second worker tells nothing then
        return ""


def _changed(link: Link, now: Link, where: str) -> str:
    left = [address for address in link.addresses if address not in now.addresses]
    if not left:
        return ""
    return (
        f"{where}: CHFS: {', '.join(left)} left the ring of {link.servers} servers, which now has {now.servers}; see "
        f"that all servers run"
    )
