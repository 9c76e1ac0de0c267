"""The ranks of a store as a group, with a log of messages from each rank.

Rank 0 coordinates. It sends its decisions as numbered messages, which every other rank applies in order; work that
takes long runs beside the log, so that it delays no message. The other ranks send their reports to rank 0 in logs of
their own. An answer has a topic that both sides know, and rank 0 waits for it at most the store's ``rank_deadline``.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, TypeVar

from tieredckpt.concurrency import outlast
from tieredckpt.engine import limits
from tieredckpt.engine.notify import Notification
from tieredckpt.engine.ranks import messages
from tieredckpt.engine.ranks.communicator import COORDINATOR, Communicator, RanksMissing, exchange, gather
from tieredckpt.engine.ranks.messages import Closing, Logged, Reported
from tieredckpt.engine.wire_types import Failure, decode, encode
from tieredckpt.errors import Closed, RanksUnavailable, TieredCkptError

__all__ = ["Group", "bow_out", "vote"]

_log = logging.getLogger("tieredckpt")

M = TypeVar("M")


class Group:
    """The group of ranks, as one of them sees it. Lives on the engine's loop."""

    def __init__(self, communicator: Communicator, *, deadline: float) -> None:
        self.communicator = communicator
        self.rank = communicator.rank
        self.size = communicator.size
        self.coordinates = communicator.rank == COORDINATOR
        self.deadline = deadline
        """Seconds that the ranks wait for each other."""
        self.nodes: tuple[str, ...] = ()
        """The machine of every rank, by rank."""
        self.run = ""
        """Random name of what these processes do together until they close."""
        self._silent: set[int] = set()
        """Ranks that have timed out, and from which nothing has come since."""
        self.ended = False
        """Whether rank 0 has closed, and decides on nothing any more."""
        self._left = False
        self._sent = 0
        self._outbox: asyncio.Queue[tuple[str, bytes]] = asyncio.Queue()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._posting: asyncio.Task[None] | None = None
        self._listening: asyncio.Task[None] | None = None

    @property
    def patience(self) -> float:
        """Seconds that a rank waits for a decision of rank 0."""
        return self.deadline + limits.in_force.wait_longer

    @property
    def others(self) -> range:
        """All ranks but rank 0."""
        return range(1, self.size)

    @property
    def local_ranks(self) -> list[int]:
        """The ranks of this machine, this one included."""
        return [rank for rank, node in enumerate(self.nodes) if node == self.nodes[self.rank]]

    # -- life ---------------------------------------------------------------------------------------------

    async def open(self) -> None:
        """Connect to all other ranks. Raises as `Communicator.open`."""
        await self.communicator.open(timeout=self.deadline)
        mine = encode((self.communicator.node, secrets.token_hex(8)))
        said = await exchange(self.communicator, "nodes", mine, timeout=self.deadline)
        self.nodes, runs = zip(*(decode(each, tuple[str, str]) for each in said), strict=True)
        self.run = runs[COORDINATOR]

    def begin(
        self, apply: Callable[[Logged], Awaitable[None]], hear: Callable[[int, Reported], Awaitable[None]]
    ) -> None:
        """Begin to send, and to ``apply`` every message of rank 0, one after another.

        Rank 0 begins to ``hear`` every message of each other rank, one after another.
        """
        self._posting = asyncio.create_task(self._post(), name="tieredckpt log of the ranks")
        if self.coordinates:
            for rank in self.others:
                self.start(self._listen(rank, Reported, partial(hear, rank)), f"log of rank {rank}")
        else:
            self._listening = asyncio.create_task(
                self._listen(COORDINATOR, Logged, apply), name=f"tieredckpt log of rank {COORDINATOR}"
            )

    async def part(self) -> None:
        """Wait until all other ranks close too: work that rank 0 has ordered may still need this rank.

        Waits at most the deadline, and not for ranks that have timed out before. Raises nothing.
        """
        try:
            await (self._let_all_go() if self.coordinates else self._ask_to_go())
        except (TieredCkptError, TimeoutError) as error:
            _log.warning("the ranks did not close together: %s", error)

    async def close(self) -> None:
        """Leave the group, whatever the other ranks do."""
        self._left = True
        tasks = [task for task in (self._posting, self._listening, *self._tasks) if task is not None]
        for task in tasks:
            task.cancel()
        await outlast(asyncio.gather(*tasks, return_exceptions=True))
        try:
            await self.communicator.close()
        except Exception as error:
            _log.warning("the communicator of the ranks: %s", error)

    async def _let_all_go(self) -> None:
        there = [rank for rank in self.others if rank not in self._silent]
        try:
            await gather(self.communicator, "close", b"", timeout=self.deadline, among=there)
        finally:
            self.publish(Closing())
            async with asyncio.timeout(limits.in_force.last_words):
                await self._outbox.join()
        await gather(self.communicator, "closed", b"", timeout=limits.in_force.last_words, among=there)

    async def _ask_to_go(self) -> None:
        await self.communicator.send([COORDINATOR], "close", b"")
        if self._listening is not None and not self.deserted:
            async with asyncio.timeout(
                2 * self.deadline + limits.in_force.last_words
            ):  # rank 0 may wait for others as long
                await asyncio.wait([self._listening])
        await self.communicator.send([COORDINATOR], "closed", b"")

    def start(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """Run ``work`` as a task of its own, which ends with the group."""
        task = asyncio.create_task(_logged(work, name), name=f"tieredckpt {name}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(lambda _: work.close())  # a task that is cancelled at once never begins it
        return task

    def start_last(self, work: Coroutine[Any, Any, None], name: str) -> None:
        """Start the last messages of a cancelled call, as `start`; does nothing after `close`."""
        if self._left:
            work.close()
        else:
            self.start(work, name)

    # -- which ranks answer -------------------------------------------------------------------------------

    @property
    def deserted(self) -> bool:
        """Whether rank 0 has timed out here, and nothing has come from it since."""
        return COORDINATOR in self._silent

    def missed(self, ranks: Iterable[int]) -> None:
        """Note that ranks have timed out."""
        self._silent.update(ranks)

    async def gather(self, topic: str, data: bytes, *, timeout: float | None = None) -> dict[int, bytes]:
        """Gather from all ranks, within the deadline or ``timeout`` seconds; notes which ranks time out."""
        try:
            came = await gather(self.communicator, topic, data, timeout=self.deadline if timeout is None else timeout)
        except RanksMissing as error:
            self._silent.difference_update(error.came)
            self.missed(error.ranks)
            raise
        self._silent.difference_update(came)
        return came

    async def all_in(self, heard: Mapping[int, object], came: Notification, deadline: float) -> list[int]:
        """At rank 0, wait until ``heard`` has all ranks, at most until ``deadline``; returns those that it lacks.

        ``came`` is notified when a rank comes in, and the deadline is one of the loop's clock.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout_at(deadline):
                await came.until(lambda: len(heard) == self.size)
        missing = sorted(set(range(self.size)) - heard.keys())
        self.missed(missing)
        return missing

    # -- the log ------------------------------------------------------------------------------------------

    def publish(self, message: Logged) -> None:
        """Append a message to rank 0's log, which all other ranks apply in order. For rank 0; does not wait."""
        self._put(message)

    def report(self, message: Reported) -> None:
        """Append a message to this rank's log, which rank 0 applies in order. For other ranks; does not wait."""
        self._put(message)

    def _put(self, message: Logged | Reported) -> None:
        self._sent += 1
        self._outbox.put_nowait((f"log/{self._sent}", encode(message)))

    async def all_sent(self) -> None:
        """At rank 0, send all messages so far, within the deadline: next, the trainer may keep this process busy."""
        if self.coordinates:
            with suppress(TimeoutError):
                async with asyncio.timeout(self.deadline):
                    await self._outbox.join()

    async def _post(self) -> None:
        while True:
            topic, data = await self._outbox.get()
            while True:  # the receivers take messages in order, so none is skipped
                try:
                    await self.communicator.send(self.others if self.coordinates else [COORDINATOR], topic, data)
                    break
                except RanksUnavailable as error:
                    _log.error("rank %d cannot send %s to the others, and tries again: %s", self.rank, topic, error)
                    await asyncio.sleep(limits.in_force.send_again)
            self._outbox.task_done()

    async def _listen(self, source: int, kind: M, apply: Callable[[Any], Awaitable[None]]) -> None:
        """Apply the log of another rank, whose messages are of a ``kind``, until the log ends."""
        heard = 0
        # Every call looks for messages at once, so rank 0, which has many of these loops, calls less often in each.
        again = limits.in_force.listen_again * (len(self.others) if self.coordinates else 1)
        while True:
            try:
                data = await self.communicator.recv(source, f"log/{heard + 1}", timeout=again)
            except RanksUnavailable:
                continue  # there was no message, or that rank has died: whoever waits for it notices
            except Closed:
                return
            heard += 1
            self._silent.discard(source)
            message: object = None
            try:
                message = decode(data, kind)
                if isinstance(message, Closing):
                    self.ended = True
                    return
                await apply(message)
            except Exception:
                _log.exception("rank %d: a message of rank %d was not applied: %.300r", self.rank, source, message)


async def _logged(work: Coroutine[Any, Any, None], name: str) -> None:
    try:
        await work
    except Closed:
        _log.info("%s ended with the store", name)
    except Exception:
        _log.exception("%s: unexpected failure", name)


async def vote(
    group: Group, topic: str, work: Awaitable[bytes], decide: Callable[[dict[int, bytes]], Awaitable[bytes]]
) -> bytes:
    """Do ``work`` on every rank, let rank 0 ``decide`` on the results of all, and return its verdict on every rank.

    If the work fails on a rank, or rank 0 cannot decide, all ranks raise that error, with the number of the rank in
    front. Raises `RanksUnavailable` when ranks do not answer within the deadline. If the call is cancelled, this rank
    tells the others at once.
    """
    try:
        said, failure = await _outcome(work)
        answer = encode((said, None if failure is None else Failure.of(failure)))
        if group.coordinates:
            return await _lead(group, topic, answer, failure, decide)
        with _rather(failure):
            await group.communicator.send([COORDINATOR], topic, answer)
    except asyncio.CancelledError:
        group.start_last(bow_out(group, topic), f"leaving of {topic}")
        raise
    with _rather(failure):
        answer = await group.communicator.recv(COORDINATOR, topic, timeout=group.patience)
    if failure is not None:
        raise failure
    verdict, problem = messages.decode_said(answer)
    if problem is not None:
        raise problem.error()
    return verdict


async def bow_out(group: Group, topic: str) -> None:
    """Abort a vote on behalf of this rank; does not wait for the outcome."""
    failure = Failure.of(RanksUnavailable(f"rank {group.rank} has given up {topic!r}", [group.rank]))
    await group.communicator.send(group.others if group.coordinates else [COORDINATOR], topic, encode((b"", failure)))


@contextmanager
def _rather(failure: Exception | None) -> Iterator[None]:
    """Raise the ``failure`` of this rank, if there is one, instead of the error that rank 0 does not answer."""
    try:
        yield
    except RanksUnavailable:
        if failure is not None:
            raise failure from failure.__cause__  # which `from None` would take away
        raise


async def _outcome(work: Awaitable[bytes]) -> tuple[bytes, Exception | None]:
    try:
        return await work, None
    except Exception as error:
        return b"", error


async def _lead(
    group: Group,
    topic: str,
    answer: bytes,
    failure: Exception | None,
    decide: Callable[[dict[int, bytes]], Awaitable[bytes]],
) -> bytes:
    """Rank 0's side of a vote; ``failure`` is that of its own work."""
    verdict, problem = b"", None
    cause = failure
    try:
        verdict = await decide(_heard(await group.gather(topic, answer)))
    except Exception as error:
        cause = failure or error
        problem = Failure.of(cause)
        if not isinstance(cause, TieredCkptError) and failure is None:
            _log.exception("rank %d could not decide on %s", COORDINATOR, topic)
    await group.communicator.send(group.others, topic, encode((verdict, problem)))
    if cause is not None:
        raise cause
    return verdict


def _heard(came: dict[int, bytes]) -> dict[int, bytes]:
    found: dict[int, bytes] = {}
    for rank, data in sorted(came.items()):
        found[rank], problem = messages.decode_said(data)
        if problem is not None:
            raise Failure(problem.kind, f"rank {rank}: {problem.text}", problem.ranks or (rank,)).error()
    return found
