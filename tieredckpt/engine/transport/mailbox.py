"""Messages between ranks that can do no more than leave small values for each other.

A *carrier* puts letters into boxes and takes them out. Every rank has a box, whose name ends in a *card*: random
digits of this process and this session, so that nothing a process of the past was sent is ever found. To learn each
other's cards, ranks that open say hello in the one box with a fixed name:

1. A rank puts its card into ``hello``, again and again, until it is welcomed.
2. When rank 0 has heard every rank, it sends all of them a welcome with a new session. A card that a dead
   process left in ``hello`` is heard as well; the rank's next hello replaces it, and a new session begins.
3. A rank that is welcomed answers. When all have, rank 0 tells them to go: the session is open.

Letters of another session are dropped, those of this one that come before its "go" are kept. A long message goes as
several letters: no store carries values of any size.

How often a rank looks into its box depends on how long nothing has come: it waits a twentieth of that time, up to a
bound. What comes soon is found at once, and a rank that waits for hours costs next to nothing.
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

from tieredckpt.concurrency import together
from tieredckpt.engine.ranks.communicator import COORDINATOR, RanksMissing, node_of_this_process
from tieredckpt.engine.ranks.inbox import Inbox
from tieredckpt.errors import Closed, Invalid, RanksUnavailable, TieredCkptError
from tieredckpt.format.merging import show_ranks

__all__ = ["Carrier", "Mailbox"]

T = TypeVar("T")

_log = logging.getLogger("tieredckpt")

_HELLO = "hello"
_HELLO_AGAIN = 1.0
"""Seconds after which a rank that nobody welcomed says hello once more."""
_GO_WITHIN = 5.0
"""Seconds after which one that was welcomed and not told to go does: rank 0 may be dead."""
_CARRIER_TIMEOUT = 30.0
"""Seconds that the carrier may take for one letter, or for a look into a box."""
_POSTS_AT_ONCE = 16
_PATIENCE = 0.05
"""The pause between two looks into a box, as a share of the time in which nothing has come."""
_LETTER = 1 << 20
"""Bytes of a message in one letter. The store of torch.distributed closes the connection at 8 MiB."""


class Carrier(Protocol):
    """Carries letters between the ranks of one training. All calls come from one event loop.

    Raises errors of this library alone; ``box`` and ``name`` are of letters, digits, ``-`` and ``.``.
    """

    async def put(self, box: str, name: str, letter: bytes) -> None:
        """Leave a letter, in place of one with the same name if that is still there."""

    async def take(self, box: str) -> list[bytes]:
        """All letters in a box that are there completely, the later of one name last.

        None of them is taken twice. What a call that fails or is cancelled has taken, the next one returns.
        """

    async def drop(self, box: str) -> None:
        """Remove a box that nobody uses any more, with what is in it."""

    async def close(self) -> None:
        """Let go of what it holds. Idempotent."""


class _Hello(msgspec.Struct, array_like=True, frozen=True):
    """A rank that wants to meet the others."""

    rank: int
    size: int
    card: str


class _Letter(msgspec.Struct, array_like=True, frozen=True):
    """Anything that is put into a rank's box. ``cards`` is filled in a welcome and a go.

    A post is ``sheet`` of so many ``sheets`` of a message.
    """

    kind: Literal["welcome", "here", "go", "post"]
    session: str
    source: int
    topic: str = ""
    data: bytes = b""
    cards: list[str] = msgspec.field(default_factory=list)
    sheet: int = 0
    sheets: int = 1


_encode = msgspec.msgpack.Encoder().encode
_read_hello = msgspec.msgpack.Decoder(_Hello).decode
_read_letter = msgspec.msgpack.Decoder(_Letter).decode


class Mailbox:
    """A communicator over a carrier.

    Args:
        carrier: takes the letters; it is closed with this.
        rank, size: this process among all.
        node: see `Communicator`.
        fastest, slowest: bounds of the seconds between two looks into the box.
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
        self._card = secrets.token_hex(8)
        self._cards: list[str] = []
        """By rank; while the ranks meet, a follower knows rank 0's alone."""
        self.session = ""
        """The session's random name, the same at every rank; empty before it is open."""
        self._inbox = Inbox()
        self._sheets: dict[tuple[int, str], dict[int, bytes]] = {}
        """What has come of messages of several letters, by source and topic."""
        self._numbers = itertools.count()
        self._guards_posting = asyncio.Semaphore(_POSTS_AT_ONCE)
        self._stir = asyncio.Event()
        self._looking: asyncio.Task[None] | None = None
        self._closed = False

    # -- the session --------------------------------------------------------------------------------------

    async def open(self, *, timeout: float) -> None:
        """Meet all other ranks; see the module."""
        early: list[_Letter] = []
        heard: set[int] = {COORDINATOR}
        try:
            async with asyncio.timeout(timeout):
                self.session = await (self._lead(heard) if self.rank == COORDINATOR else self._follow(early))
        except TimeoutError:
            trouble = f" ({self._inbox.trouble})" if self._inbox.trouble is not None else ""
            if self.rank != COORDINATOR:
                raise RanksUnavailable(
                    f"rank {self.rank} of {self.size} was not told to go by rank {COORDINATOR} within {timeout:.1f} s"
                    f"{trouble}; do all ranks open the store, and was every one started?",
                    [COORDINATOR],
                ) from self._inbox.trouble
            missing = sorted(set(range(self.size)) - heard)
            raise RanksMissing(
                f"{len(missing)} of {self.size} ranks have not come within {timeout:.1f} s: {show_ranks(missing)}"
                f"{trouble}; do all ranks open the store, and was every one started?",
                missing,
            ) from self._inbox.trouble
        for letter in early:
            self._deliver(letter)

    async def _lead(self, heard: set[int]) -> str:
        """Nobody posts before it is told to go, so nothing but answers comes meanwhile."""
        cards = {COORDINATOR: self._card}
        session = ""
        idle = _Idle(self._fastest, self._slowest)
        while True:
            news = [hello for hello in await self._hellos() if cards.get(hello.rank) != hello.card]
            for hello in news:
                if (old := cards.get(hello.rank)) is not None:
                    await self._carried(self._carrier.drop(_box(hello.rank, old)))
                cards[hello.rank] = hello.card
            if len(cards) == self.size and (news or not session):
                session = secrets.token_hex(8)
                heard.intersection_update({COORDINATOR})
                self._cards = [cards[rank] for rank in range(self.size)]
                await self._put_all(_Letter("welcome", session, COORDINATOR, cards=self._cards[:1]))
            answers = [letter for letter in await self._look() if letter.session == session]
            heard.update(letter.source for letter in answers if letter.kind == "here")
            if session and len(heard) == self.size:
                break
            if not session:
                heard.update(cards)
            if news or answers:
                idle.over()
            await asyncio.sleep(idle.pause)
        await self._carried(self._carrier.drop(_HELLO))
        await self._put_all(_Letter("go", session, COORDINATOR, cards=self._cards))
        return session

    async def _follow(self, early: list[_Letter]) -> str:
        """Others may have been told to go before this one, and have posted: ``early``."""
        hello = _encode(_Hello(self.rank, self.size, self._card))
        hello_at = time.monotonic()
        idle = _Idle(self._fastest, self._slowest)
        while True:
            if time.monotonic() >= hello_at:
                await self._carried(self._carrier.put(_HELLO, str(self.rank), hello))
                hello_at = time.monotonic() + _HELLO_AGAIN
            letters = await self._look()
            early += [letter for letter in letters if letter.kind == "post"]
            for letter in letters:
                if letter.kind == "welcome" and letter.cards:
                    self._cards = [letter.cards[0]]
                    await self._put(COORDINATOR, _Letter("here", letter.session, self.rank))
                    hello_at = time.monotonic() + _GO_WITHIN
                if letter.kind == "go" and len(letter.cards) == self.size:
                    self._cards = letter.cards
                    return letter.session
            if letters:
                idle.over()
            await asyncio.sleep(idle.pause)

    async def _hellos(self) -> list[_Hello]:
        found = []
        for letter in await self._carried(self._carrier.take(_HELLO)):
            with suppress(msgspec.DecodeError):
                hello = _read_hello(letter)
                if hello.size == self.size and 0 < hello.rank < self.size:
                    found.append(hello)
        return found

    async def close(self) -> None:
        """Leave the session, and remove this rank's box."""
        if self._closed:
            return
        self._closed = True
        self._inbox.close()
        if self._looking is not None:
            self._looking.cancel()
            await asyncio.gather(self._looking, return_exceptions=True)
        with suppress(TieredCkptError):
            await self._carried(self._carrier.drop(_box(self.rank, self._card)))
        await self._carrier.close()

    @property
    def boxes(self) -> list[str]:
        """Of all ranks of the session."""
        return [_box(rank, card) for rank, card in enumerate(self._cards)]

    # -- messages -----------------------------------------------------------------------------------------

    async def post(self, to: Collection[int], topic: str, data: bytes) -> None:
        """Put letters into the box of each."""
        self.check_open()
        if self.rank in to:
            self._inbox.arrived(self.rank, topic, data)
        others = [rank for rank in to if rank != self.rank]
        sheets = max(1, -(-len(data) // _LETTER))
        for sheet in range(sheets):
            part = data[sheet * _LETTER : (sheet + 1) * _LETTER]
            letter = _Letter("post", self.session, self.rank, topic, part, sheet=sheet, sheets=sheets)
            await self._put_all(letter, others)

    async def take(self, source: int, topic: str, *, timeout: float) -> bytes:
        """Look into the box until the letter is there."""
        self.check_open()
        self._stir.set()
        if self._looking is None or self._looking.done():
            self._looking = asyncio.create_task(self._look_while_somebody_waits(), name="tieredckpt mailbox")
        return await self._inbox.take(source, topic, timeout)

    async def send(self, to: int, memory: memoryview, *, tag: int, timeout: float) -> None:
        """Refused: letters are small."""
        raise Invalid(f"this communicator sends nothing in bulk, and nothing to rank {to}: it can only post")

    async def receive(self, source: int, memory: memoryview, *, tag: int, timeout: float) -> None:
        """Refused: letters are small."""
        raise Invalid(f"this communicator receives nothing in bulk, and nothing from rank {source}")

    def check_open(self) -> None:
        """Raise `Closed` after `close`, and `Invalid` before `open`."""
        self._inbox.check_open()
        if not self.session:
            raise Invalid(f"the communicator of rank {self.rank} is not open")

    async def _look_while_somebody_waits(self) -> None:
        await asyncio.sleep(0)  # who made this task waits from then on
        idle = _Idle(self._fastest, self._slowest)
        while self._inbox.waits:
            letters = await self._look()
            for letter in letters:
                self._deliver(letter)
            if letters:
                idle.over()
            with suppress(TimeoutError):
                async with asyncio.timeout(idle.pause):
                    await self._stir.wait()
                self._stir.clear()
                idle.over()
                await asyncio.sleep(idle.pause)

    def _deliver(self, letter: _Letter) -> None:
        if letter.kind != "post" or letter.session != self.session or not 0 <= letter.source < self.size:
            return
        if letter.sheets == 1:
            self._inbox.arrived(letter.source, letter.topic, letter.data)
            return
        key = letter.source, letter.topic
        sheets = self._sheets.setdefault(key, {})
        sheets[letter.sheet] = letter.data
        if len(sheets) == letter.sheets:
            del self._sheets[key]
            self._inbox.arrived(*key, b"".join(sheets[number] for number in sorted(sheets)))

    async def _look(self) -> list[_Letter]:
        """What is in this rank's box; what keeps the carrier from looking is remembered, and tried again."""
        try:
            letters = await self._carried(self._carrier.take(_box(self.rank, self._card)))
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
        for letter in letters:
            try:
                found.append(_read_letter(letter))
            except msgspec.DecodeError as error:
                _log.warning("rank %d: a letter in its box cannot be read: %s", self.rank, error)
        return found

    async def _put_all(self, letter: _Letter, to: Collection[int] | None = None) -> None:
        to = [rank for rank in range(self.size) if rank != self.rank] if to is None else to
        encoded = _encode(letter)
        await together(self._put_encoded(rank, encoded) for rank in to)

    async def _put(self, to: int, letter: _Letter) -> None:
        await self._put_encoded(to, _encode(letter))

    async def _put_encoded(self, to: int, letter: bytes) -> None:
        async with self._guards_posting:
            name = f"{self.rank}-{next(self._numbers)}"
            await self._carried(self._carrier.put(_box(to, self._cards[to]), name, letter))

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
            raise RanksUnavailable(f"what carries messages between the ranks failed: {error}") from error


class _Idle:
    """How long nothing has come, and how long to wait before the next look."""

    def __init__(self, fastest: float, slowest: float) -> None:
        self._fastest, self._slowest = fastest, slowest
        self._since = time.monotonic()

    def over(self) -> None:
        """Something has come, or will soon."""
        self._since = time.monotonic()

    @property
    def pause(self) -> float:
        """Seconds."""
        return min(max(self._fastest, _PATIENCE * (time.monotonic() - self._since)), self._slowest)


def _box(rank: int, card: str) -> str:
    return f"{rank}-{card}"
