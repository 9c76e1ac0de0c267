"""A communicator for ranks that can only leave small values for each other, in mailboxes.

A *carrier* puts messages into mailboxes and takes them out. Every rank has a mailbox, named by its *endpoint*: random
digits of this process and this session, so that no message to an earlier process is ever found. Ranks that open
exchange their endpoints through the mailbox ``hello``:

1. A rank puts its endpoint into ``hello``, again and again, until it is welcomed.
2. When rank 0 has heard every rank, it sends all of them a welcome with a new session. It also hears an endpoint that
   a dead process has left in ``hello``; the rank's next hello replaces it, and a new session begins.
3. A rank that is welcomed answers. When all have, rank 0 tells them to go: the session is open.

Messages of another session are dropped; those of this one that come before its "go" are kept. A long message goes as
several fragments: no store carries values of any size.

How often a rank looks into its mailbox depends on how long nothing has come: it waits a twentieth of that time, up to
a bound. So messages that follow each other are found at once, and a rank that waits for hours costs next to nothing.
A rank that sends something looks as if something had come: it may be answered soon.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
import time
from collections.abc import Collection, Coroutine
from contextlib import suppress
from typing import Any, Literal, Protocol, TypeVar

import msgspec

from tieredckpt._decoders import from_msgpack
from tieredckpt.concurrency import together
from tieredckpt.engine import limits
from tieredckpt.engine.ranks.communicator import COORDINATOR, RanksMissing, node_of_this_process
from tieredckpt.engine.ranks.inbox import Inbox
from tieredckpt.errors import Closed, Corrupt, Invalid, RanksUnavailable, TieredCkptError
from tieredckpt.format.merging import show_ranks

__all__ = ["Carrier", "Idle", "Mailbox"]

T = TypeVar("T")

_log = logging.getLogger("tieredckpt")

_HELLO = "hello"
_CARRIER_TIMEOUT = 30.0
"""Seconds that the carrier may take to put one message, or to look into a mailbox."""
_SENDS_AT_ONCE = 16
_PATIENCE = 0.05
"""The pause between two looks into a mailbox, as a share of the time in which nothing has come."""
_FRAGMENT = 1 << 20
"""Largest bytes of a fragment. The store of torch.distributed closes the connection at 8 MiB."""


class Carrier(Protocol):
    """Carries messages between the ranks of one training. All calls come from one event loop.

    Raises errors of this library alone; ``mailbox`` and ``name`` are of letters, digits, ``-`` and ``.``.
    """

    async def put(self, mailbox: str, name: str, message: bytes) -> None:
        """Leave a message, in place of one with the same name if that is still there."""

    async def take(self, mailbox: str) -> list[bytes]:
        """All messages in a mailbox that are there completely, the later of one name last.

        None of them is taken twice. What a call that fails or is cancelled has taken, the next one returns.
        """

    async def drop(self, mailbox: str) -> None:
        """Remove a mailbox that is no longer used, with what is in it."""

    async def close(self) -> None:
        """Release what it holds. Idempotent."""


class _Hello(msgspec.Struct, array_like=True, frozen=True):
    """A rank that wants to meet the others."""

    rank: int
    size: int
    endpoint: str


class _Message(msgspec.Struct, array_like=True, frozen=True):
    """A message in a rank's mailbox: a step of the opening, or a fragment of a message.

    A welcome and a go have ``endpoints``; a fragment has its number and how many there are.
    """

    kind: Literal["welcome", "here", "go", "post"]
    session: str
    source: int
    topic: str = ""
    data: bytes = b""
    endpoints: list[str] = msgspec.field(default_factory=list)
    fragment: int = 0
    fragments: int = 1


_encode = msgspec.msgpack.Encoder().encode


class Mailbox:
    """A communicator over a carrier.

    Args:
        carrier: takes the messages; it is closed with this.
        rank, size: this process among all.
        node: see `Communicator`.
        fastest, slowest: bounds of the seconds between two looks into the mailbox.
    """

    def __init__(
        self,
        carrier: Carrier,
        *,
        rank: int,
        size: int,
        node: str | None = None,
        fastest: float = 0.002,
        slowest: float = 0.25,
    ) -> None:
        if not 0 <= rank < size:
            raise Invalid(f"rank {rank} is none of {size} ranks: they are 0 to {size - 1}")
        self.rank, self.size = rank, size
        self.node = node or node_of_this_process()
        self.bulk = False
        self._carrier = carrier
        self._fastest = fastest
        # All ranks look at one place: their looks together stay below some thousand a second.
        self._slowest = max(slowest, size * 0.0005)
        self._endpoint = secrets.token_hex(8)
        self._endpoints: list[str] = []
        """By rank; while the ranks meet, a follower knows rank 0's alone."""
        self.session = ""
        """The session's random name, the same at every rank; empty before it is open."""
        self._inbox = Inbox()
        self._fragments: dict[tuple[int, str], dict[int, bytes]] = {}
        """Fragments that have come of incomplete messages, by source and topic."""
        self._numbers = itertools.count()
        self._guards_sending = asyncio.Semaphore(_SENDS_AT_ONCE)
        self._stir = asyncio.Event()
        self._looking: asyncio.Task[None] | None = None
        self._closed = False

    # -- the session --------------------------------------------------------------------------------------

    async def open(self, *, timeout: float) -> None:
        """Meet all other ranks; see the module."""
        early: list[_Message] = []
        heard: set[int] = {COORDINATOR}
        try:
            async with asyncio.timeout(timeout):
                self.session = await (self._lead(heard) if self.rank == COORDINATOR else self._follow(early))
        except TimeoutError:
            trouble = f" ({self._inbox.trouble})" if self._inbox.trouble is not None else ""
            if self.rank != COORDINATOR:
                raise RanksUnavailable(
                    f"rank {self.rank} of {self.size} was not told to go by rank {COORDINATOR} within {timeout:.1f} s"
                    f"{trouble}; was every rank started, and do all open the store with its tiers at the same paths?",
                    [COORDINATOR],
                ) from self._inbox.trouble
            missing = sorted(set(range(self.size)) - heard)
            raise RanksMissing(
                f"{len(missing)} of {self.size} ranks have not come within {timeout:.1f} s: {show_ranks(missing)}"
                f"{trouble}; was every rank started, and do all open the store with its tiers at the same paths?",
                missing,
            ) from self._inbox.trouble
        for message in early:
            self._deliver(message)

    async def _lead(self, heard: set[int]) -> str:
        """Open as rank 0: the other ranks send nothing but answers before rank 0 lets them go."""
        endpoints = {COORDINATOR: self._endpoint}
        session = ""
        idle = Idle(self._fastest, self._slowest)
        while True:
            news = [hello for hello in await self._hellos() if endpoints.get(hello.rank) != hello.endpoint]
            for hello in news:
                if (old := endpoints.get(hello.rank)) is not None:
                    await self._carried(self._carrier.drop(_mailbox_name(hello.rank, old)))
                endpoints[hello.rank] = hello.endpoint
            if len(endpoints) == self.size and (news or not session):
                session = secrets.token_hex(8)
                heard.intersection_update({COORDINATOR})
                self._endpoints = [endpoints[rank] for rank in range(self.size)]
                await self._put_all(_Message("welcome", session, COORDINATOR, endpoints=self._endpoints[:1]))
            answers = [message for message in await self._look() if message.session == session]
            heard.update(message.source for message in answers if message.kind == "here")
            if session and len(heard) == self.size:
                break
            if not session:
                heard.update(endpoints)
            if news or answers:
                idle.over()
            await asyncio.sleep(idle.pause)
        await self._carried(self._carrier.drop(_HELLO))
        await self._put_all(_Message("go", session, COORDINATOR, endpoints=self._endpoints))
        return session

    async def _follow(self, early: list[_Message]) -> str:
        """Open as another rank; what others send that were told to go earlier is added to ``early``."""
        hello = _encode(_Hello(self.rank, self.size, self._endpoint))
        hello_at = time.monotonic()
        idle = Idle(self._fastest, self._slowest)
        while True:
            if time.monotonic() >= hello_at:
                await self._carried(self._carrier.put(_HELLO, str(self.rank), hello))
                hello_at = time.monotonic() + limits.in_force.hello_again
            messages = await self._look()
            early += [message for message in messages if message.kind == "post"]
            for message in messages:
                if message.kind == "welcome" and message.endpoints:
                    self._endpoints = [message.endpoints[0]]
                    await self._put(COORDINATOR, _Message("here", message.session, self.rank))
                    hello_at = time.monotonic() + limits.in_force.go_within
                if message.kind == "go" and len(message.endpoints) == self.size:
                    self._endpoints = message.endpoints
                    return message.session
            if messages:
                idle.over()
            await asyncio.sleep(idle.pause)

    async def _hellos(self) -> list[_Hello]:
        found = []
        for message in await self._carried(self._carrier.take(_HELLO)):
            with suppress(Corrupt):
                hello = from_msgpack(message, _Hello, "no hello")
                if hello.size == self.size and 0 < hello.rank < self.size:
                    found.append(hello)
        return found

    async def close(self) -> None:
        """Leave the session, and remove this rank's mailbox."""
        if self._closed:
            return
        self._closed = True
        self._inbox.close()
        if self._looking is not None:
            self._looking.cancel()
            await asyncio.gather(self._looking, return_exceptions=True)
        with suppress(TieredCkptError):
            await self._carried(self._carrier.drop(_mailbox_name(self.rank, self._endpoint)))
        await self._carrier.close()

    @property
    def mailboxes(self) -> list[str]:
        """The mailboxes of all ranks of the session."""
        return [_mailbox_name(rank, endpoint) for rank, endpoint in enumerate(self._endpoints)]

    # -- messages -----------------------------------------------------------------------------------------

    async def send(self, to: Collection[int], topic: str, data: bytes) -> None:
        """Put messages into the mailbox of each."""
        self.check_open()
        if self.rank in to:
            self._inbox.arrived(self.rank, topic, data)
        others = [rank for rank in to if rank != self.rank]
        fragments = max(1, -(-len(data) // _FRAGMENT))
        for fragment in range(fragments):
            part = data[fragment * _FRAGMENT : (fragment + 1) * _FRAGMENT]
            message = _Message("post", self.session, self.rank, topic, part, fragment=fragment, fragments=fragments)
            await self._put_all(message, others)
        self._stir.set()

    async def recv(self, source: int, topic: str, *, timeout: float) -> bytes:
        """Look into the mailbox until the message is there."""
        self.check_open()
        self._stir.set()
        if self._looking is None or self._looking.done():
            self._looking = asyncio.create_task(self._look_while_somebody_waits(), name="tieredckpt mailbox")
        return await self._inbox.recv(source, topic, timeout)

    async def send_bulk(self, to: int, memory: memoryview, *, tag: int, timeout: float) -> None:
        """Refused: messages are small."""
        raise Invalid(f"this communicator sends nothing in bulk, and nothing to rank {to}: it sends messages alone")

    async def recv_bulk(self, source: int, memory: memoryview, *, tag: int, timeout: float) -> None:
        """Refused: messages are small."""
        raise Invalid(f"this communicator receives nothing in bulk, and nothing from rank {source}")

    def check_open(self) -> None:
        """Raise `Closed` after `close`, and `Invalid` before `open`."""
        self._inbox.check_open()
        if not self.session:
            raise Invalid(f"the communicator of rank {self.rank} is not open")

    async def _look_while_somebody_waits(self) -> None:
        await asyncio.sleep(0)  # who made this task waits from then on
        idle = Idle(self._fastest, self._slowest)
        while self._inbox.waits:
            messages = await self._look()
            for message in messages:
                self._deliver(message)
            if messages:
                idle.over()
            with suppress(TimeoutError):
                async with asyncio.timeout(idle.pause):
                    await self._stir.wait()
                self._stir.clear()
                idle.over()
                await asyncio.sleep(idle.pause)

    def _deliver(self, message: _Message) -> None:
        if message.kind != "post" or message.session != self.session or not 0 <= message.source < self.size:
            return
        if message.fragments == 1:
            self._inbox.arrived(message.source, message.topic, message.data)
            return
        key = message.source, message.topic
        fragments = self._fragments.setdefault(key, {})
        fragments[message.fragment] = message.data
        if len(fragments) == message.fragments:
            del self._fragments[key]
            self._inbox.arrived(*key, b"".join(fragments[number] for number in sorted(fragments)))

    async def _look(self) -> list[_Message]:
        """Take the messages in this rank's mailbox; if the carrier fails, its error is kept, and the look repeated."""
        try:
            messages = await self._carried(self._carrier.take(_mailbox_name(self.rank, self._endpoint)))
        except RanksUnavailable as error:
            if self._inbox.trouble is None:
                _log.warning("rank %d: %s", self.rank, error)
            self._inbox.trouble = error
            return []
        except Exception as error:
            _log.exception("rank %d: unexpected failure to look for messages", self.rank)
            self._inbox.trouble = error
            return []
        self._inbox.trouble = None
        found = []
        for message in messages:
            try:
                found.append(from_msgpack(message, _Message, "a message in its mailbox cannot be read"))
            except Corrupt as error:
                _log.warning("rank %d: %s", self.rank, error)
        return found

    async def _put_all(self, message: _Message, to: Collection[int] | None = None) -> None:
        to = [rank for rank in range(self.size) if rank != self.rank] if to is None else to
        encoded = _encode(message)
        await together(self._put_encoded(rank, encoded) for rank in to)

    async def _put(self, to: int, message: _Message) -> None:
        await self._put_encoded(to, _encode(message))

    async def _put_encoded(self, to: int, message: bytes) -> None:
        async with self._guards_sending:
            name = f"{self.rank}-{next(self._numbers)}"
            await self._carried(self._carrier.put(_mailbox_name(to, self._endpoints[to]), name, message))

    async def _carried(self, call: Coroutine[Any, Any, T]) -> T:
        try:
            async with asyncio.timeout(_CARRIER_TIMEOUT):
                return await call
        except TimeoutError:
            what = f"what carries messages between the ranks has not answered within {_CARRIER_TIMEOUT:.0f} s"
            raise RanksUnavailable(what) from None
        except (Closed, RanksUnavailable):
            raise
        except TieredCkptError as error:
            self._inbox.check_open()  # else it was closed with this
            raise RanksUnavailable(f"what carries messages between the ranks failed: {error}") from error


class Idle:
    """How long nothing has come, and how long to wait before the next look."""

    def __init__(self, fastest: float, slowest: float) -> None:
        self._fastest, self._slowest = fastest, slowest
        self._since = time.monotonic()

    def over(self) -> None:
        """Note that something has come, or will soon."""
        self._since = time.monotonic()

    @property
    def pause(self) -> float:
        """Seconds."""
        return min(max(self._fastest, _PATIENCE * (time.monotonic() - self._since)), self._slowest)


def _mailbox_name(rank: int, endpoint: str) -> str:
    return f"{rank}-{endpoint}"
