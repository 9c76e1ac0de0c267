"""How the ranks of a training speak: small messages with deadlines and, where it can be, bulk bytes.

A *communicator* is one rank's end of that; those over the engines of a training are in `tieredckpt.engine.transport`.
What several ranks do together is written here once, as functions over any communicator: `gather`, `broadcast`,
`exchange`, `barrier`. In all of them rank 0 leads.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Collection, Mapping, Sequence
from typing import Protocol, runtime_checkable

import msgspec

from tieredckpt.blobs.boot import boot_id
from tieredckpt.engine import limits
from tieredckpt.errors import Corrupt, Invalid, RanksUnavailable
from tieredckpt.format.merging import show_ranks

__all__ = [
    "COORDINATOR",
    "Communicator",
    "RanksMissing",
    "barrier",
    "broadcast",
    "exchange",
    "gather",
    "node_of_this_process",
]

COORDINATOR = 0
"""The rank that decides where one must."""


class RanksMissing(RanksUnavailable):
    """Some ranks did not answer; what the others said is kept."""

    def __init__(self, message: str, ranks: Collection[int], came: Mapping[int, bytes] | None = None) -> None:
        super().__init__(message, sorted(ranks))
        self.came = dict(came or {})
        """By rank, at rank 0 of a gather; empty elsewhere."""


@runtime_checkable
class Communicator(Protocol):
    """One rank's end of what connects the ranks. Everything belongs on the event loop that opened it.

    What foreign libraries block on, they block on threads of the communicator's own. The trainer's groups,
    communicators and devices are not touched; it may run its collectives meanwhile.
    """

    @property
    def rank(self) -> int:
        """This process, from 0 to ``size - 1``."""

    @property
    def size(self) -> int:
        """How many processes there are."""

    @property
    def node(self) -> str:
        """Identity of this machine: ranks with the same one share its memory, and are lost with it together."""

    @property
    def bulk(self) -> bool:
        """Whether `send_bulk` and `recv_bulk` work."""

    async def open(self, *, timeout: float) -> None:
        """Meet all other ranks, in a session of their own: no message that was sent before is ever received.

        Raises `RanksMissing` (at rank 0; where it is missing itself, `RanksUnavailable`) after ``timeout``
        seconds, `Invalid` where the engine below cannot be used, with what to do.
        """

    async def close(self) -> None:
        """Leave the session and remove what is left of it. Idempotent; every other call raises `Closed` then.

        Does not wait for the others. A message that was not received by then may be lost.
        """

    async def send(self, to: Collection[int], topic: str, data: bytes) -> None:
        """Send a small message (up to some MiB) to some ranks, which may include this one.

        A topic is sent once for each pair of ranks in a session. Never waits for the receivers, dead ones
        included. Raises `RanksUnavailable` when the engine below does not answer.
        """

    async def recv(self, source: int, topic: str, *, timeout: float) -> bytes:
        """The message of a rank, once it is there; it is received once.

        Raises `RanksUnavailable` after ``timeout`` seconds; a later call may still receive it.
        Cancelled, it has received nothing.
        """

    async def send_bulk(self, to: int, memory: memoryview, *, tag: int, timeout: float) -> None:
        """Send bytes that `recv_bulk` receives with the same tag, in the order of the calls for each pair and tag.

        May wait for the receiver. On return the memory is free. After an error, `RanksUnavailable`, no more
        bulk goes between the two; messages do.
        """

    async def recv_bulk(self, source: int, memory: memoryview, *, tag: int, timeout: float) -> None:
        """Fill ``memory``, whose length is that of the bytes sent.

        Errors as `send_bulk`; what was filled is undefined then.
        """


def node_of_this_process() -> str:
    """``TIEREDCKPT_NODE`` where that is set, else host name and boot id."""
    return os.environ.get("TIEREDCKPT_NODE") or f"{socket.gethostname()}/{boot_id()}"


async def gather(
    communicator: Communicator, topic: str, data: bytes, *, timeout: float, among: Sequence[int] | None = None
) -> dict[int, bytes]:
    """What every rank says, by rank, at rank 0; the others send theirs and get an empty dict.

    With ``among``, rank 0 waits for those ranks alone. Raises `RanksMissing` there, with what came, when some have
    said nothing within ``timeout`` seconds.
    """
    if communicator.rank != COORDINATOR:
        await communicator.send([COORDINATOR], topic, data)
        return {}
    sources = range(1, communicator.size) if among is None else among
    answers = await asyncio.gather(*(_answer(communicator, source, topic, timeout) for source in sources))
    came = {COORDINATOR: data}
    missing = []
    for source, answer in zip(sources, answers, strict=True):
        if answer is None:
            missing.append(source)
        else:
            came[source] = answer
    if missing:
        raise RanksMissing(_missing(missing, topic, timeout), missing, came)
    return came


async def _answer(communicator: Communicator, source: int, topic: str, timeout: float) -> bytes | None:
    try:
        return await communicator.recv(source, topic, timeout=timeout)
    except RanksUnavailable:
        return None


def _missing(ranks: Sequence[int], topic: str, timeout: float) -> str:
    return (
        f"{len(ranks)} of the ranks have not sent {topic!r} within {timeout:.1f} s: {show_ranks(ranks)}; they died, "
        "hang or are slow: see their logs, and raise `rank_deadline` if they are only slow"
    )


async def broadcast(communicator: Communicator, topic: str, data: bytes | None, *, timeout: float) -> bytes:
    """What rank 0 says, at every rank; ``data`` counts at rank 0 alone, which waits for nobody."""
    if communicator.rank != COORDINATOR:
        return await communicator.recv(COORDINATOR, topic, timeout=timeout)
    if data is None:
        raise Invalid(f"rank 0 broadcasts {topic!r} and was given nothing to say")
    await communicator.send(range(1, communicator.size), topic, data)
    return data


class _Told(msgspec.Struct, array_like=True):
    """What rank 0 tells at the end of an exchange: everything, or who was missing."""

    said: list[bytes]
    missing: list[int]


async def exchange(communicator: Communicator, topic: str, data: bytes, *, timeout: float) -> list[bytes]:
    """What every rank says, in the order of the ranks, at every rank.

    rank 0 waits ``timeout`` seconds for the others, and tells them when some are missing: then all raise
    `RanksMissing`. Where rank 0 is missing itself, the others raise `RanksUnavailable` a little later.
    """
    if communicator.rank == COORDINATOR:
        try:
            came = await gather(communicator, topic, data, timeout=timeout)
        except RanksMissing as error:
            told = msgspec.msgpack.encode(_Told([], list(error.ranks)))
            await communicator.send(range(1, communicator.size), topic, told)
            raise
        said = [came[rank] for rank in range(communicator.size)]
        await communicator.send(range(1, communicator.size), topic, msgspec.msgpack.encode(_Told(said, [])))
        return said
    await communicator.send([COORDINATOR], topic, data)
    answer = await communicator.recv(COORDINATOR, topic, timeout=timeout + limits.in_force.wait_longer)
    try:
        told_by_leader = msgspec.msgpack.decode(answer, type=_Told)
    except msgspec.DecodeError as error:
        raise Corrupt(f"what rank 0 told in {topic!r} cannot be read: {error}") from error
    if told_by_leader.missing:
        raise RanksMissing(_missing(told_by_leader.missing, topic, timeout), told_by_leader.missing)
    return told_by_leader.said


async def barrier(communicator: Communicator, topic: str, *, timeout: float) -> None:
    """Return when every rank has come here. Raises as `exchange`."""
    await exchange(communicator, topic, b"", timeout=timeout)
