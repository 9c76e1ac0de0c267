"""Messages between the ranks of a training: small ones with deadlines and, where the transport can, bulk bytes.

A *communicator* is one rank's endpoint; its implementations are in `tieredckpt.engine.transport`. The collective
functions `gather`, `broadcast`, `exchange` and `barrier` stand here once, for any communicator; rank 0 coordinates.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Collection, Mapping, Sequence
from typing import Protocol, runtime_checkable

import msgspec

from tieredckpt._decoders import from_msgpack
from tieredckpt.blobs.boot import boot_id
from tieredckpt.engine import limits
from tieredckpt.errors import Invalid, RanksUnavailable
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
"""The rank that decides for all."""


class RanksMissing(RanksUnavailable):
    """Raised when ranks did not answer; ``came`` has the answers of the others."""

    def __init__(self, message: str, ranks: Collection[int], came: Mapping[int, bytes] | None = None) -> None:
        super().__init__(message, sorted(ranks))
        self.came = dict(came or {})
        """By rank, at rank 0 of a gather; empty elsewhere."""


@runtime_checkable
class Communicator(Protocol):
    """One rank's endpoint of the messages between ranks. Every call belongs on the event loop that opened it.

    Blocking calls of other libraries run on the communicator's own threads. It does not touch the trainer's groups,
    communicators and devices; the trainer may run its collectives meanwhile.
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
        """Connect to all other ranks in a new session: no message that was sent before is ever received.

        Raises `RanksMissing` (at rank 0; where it is missing itself, `RanksUnavailable`) after ``timeout``
        seconds, `Invalid` where the engine below cannot be used, with what to do.
        """

    async def close(self) -> None:
        """Leave the session and remove its remains. Idempotent; afterwards every other call raises `Closed`.

        Does not wait for the others. A message that was not received by then may be lost.
        """

    async def send(self, to: Collection[int], topic: str, data: bytes) -> None:
        """Send a small message (up to some MiB) to some ranks, which may include this one.

        In a session, one rank sends a topic to another one once. Never waits for the receivers, whether they live
        or not. Raises `RanksUnavailable` when the engine below does not answer.
        """

    async def recv(self, source: int, topic: str, *, timeout: float) -> bytes:
        """Wait for the message of a rank and return it; each message is received once.

        Raises `RanksUnavailable` after ``timeout`` seconds; a later call may still receive it.
        A call that is cancelled has received nothing.
        """

    async def send_bulk(self, to: int, memory: memoryview, *, tag: int, timeout: float) -> None:
        """Send bytes that `recv_bulk` receives with the same tag, in the order of the calls for each pair and tag.

        May wait for the receiver. On return the memory is free. After an error, `RanksUnavailable`, the two ranks
        exchange no more bulk bytes; messages still work.
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
    """The data of every rank, by rank, at rank 0; the other ranks send theirs and get an empty dict.

    With ``among``, rank 0 waits for those ranks alone. It raises `RanksMissing`, with the data that came, when some
    have sent nothing within ``timeout`` seconds.
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
    """The data of rank 0, at every rank; ``data`` counts at rank 0 alone, which does not wait for the others."""
    if communicator.rank != COORDINATOR:
        return await communicator.recv(COORDINATOR, topic, timeout=timeout)
    if data is None:
        raise Invalid(f"rank 0 broadcasts {topic!r} and was given nothing to say")
    await communicator.send(range(1, communicator.size), topic, data)
    return data


class _Gathered(msgspec.Struct, array_like=True):
    """Rank 0's answer in an exchange: the data of all ranks, or which ranks were missing."""

    answers: list[bytes]
    missing: list[int]


async def exchange(communicator: Communicator, topic: str, data: bytes, *, timeout: float) -> list[bytes]:
    """The data of every rank, in the order of the ranks, at every rank.

    Rank 0 waits ``timeout`` seconds for the others, and tells them when some are missing: then all raise
    `RanksMissing`. Where rank 0 is missing itself, the others raise `RanksUnavailable` a little later.
    """
    if communicator.rank == COORDINATOR:
        try:
            came = await gather(communicator, topic, data, timeout=timeout)
        except RanksMissing as error:
            gathered = msgspec.msgpack.encode(_Gathered([], list(error.ranks)))
            await communicator.send(range(1, communicator.size), topic, gathered)
            raise
        answers = [came[rank] for rank in range(communicator.size)]
        await communicator.send(range(1, communicator.size), topic, msgspec.msgpack.encode(_Gathered(answers, [])))
        return answers
    await communicator.send([COORDINATOR], topic, data)
    answer = await communicator.recv(COORDINATOR, topic, timeout=timeout + limits.in_force.wait_longer)
    everyone = from_msgpack(answer, _Gathered, f"the answer of rank 0 in {topic!r} cannot be read")
    if everyone.missing:
        raise RanksMissing(_missing(everyone.missing, topic, timeout), everyone.missing)
    return everyone.answers


async def barrier(communicator: Communicator, topic: str, *, timeout: float) -> None:
    """Wait until every rank has called this. Raises as `exchange`."""
    await exchange(communicator, topic, b"", timeout=timeout)
