"""Conformance suite of communicators: subclass `CommunicatorTests` to test one of your own.

::

    class TestMyRanks(CommunicatorTests):
        @pytest.fixture
        def processes(self, tmp_path):
            return lambda: [MyRanks(tmp_path, rank=rank, size=3) for rank in range(3)]

``processes`` starts a training: it makes a new communicator for every rank. Called once more, it starts all of them
again in the same job. They need pytest-asyncio in ``auto`` mode.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import pytest

from tieredckpt.engine.ranks.communicator import Communicator, RanksMissing, barrier, broadcast, exchange, gather
from tieredckpt.errors import Closed, Invalid, RanksUnavailable

__all__ = ["CommunicatorTests"]

T = TypeVar("T")

ENOUGH = 20.0
SHORT = 0.2
"""Timeout, in seconds, of a receive to which nothing comes."""
MISSED = 2.0
"""Seconds after which an absent rank counts as missing; the other ranks have so long to come."""
SLACK = 20.0
"""Most seconds by which a deadline may be missed, on a busy machine."""


class CommunicatorTests:
    """The contract of `tieredckpt.Communicator`. Subclasses give the fixture ``processes``."""

    @pytest.fixture
    def processes(self) -> Callable[[], list[Communicator]]:
        """Starts a training: makes a communicator for every rank, in the order of the ranks."""
        raise NotImplementedError("a subclass of CommunicatorTests gives the fixture `processes`")

    @pytest.fixture
    async def start(
        self, processes: Callable[[], list[Communicator]]
    ) -> AsyncIterator[Callable[[], Awaitable[list[Communicator]]]]:
        """Starts a training and lets its ranks meet."""
        made: list[Communicator] = []

        async def start() -> list[Communicator]:
            ranks = processes()
            made.extend(ranks)
            await _all(rank.open(timeout=ENOUGH) for rank in ranks)
            return ranks

        yield start
        await _all(rank.close() for rank in made)

    @pytest.fixture
    async def ranks(self, start: Callable[[], Awaitable[list[Communicator]]]) -> list[Communicator]:
        """The ranks of a training that have met."""
        return await start()

    # -- messages -----------------------------------------------------------------------------------------

    async def test_it_tells_who_it_is(self, ranks: list[Communicator]) -> None:
        assert [each.rank for each in ranks] == list(range(len(ranks)))
        assert {each.size for each in ranks} == {len(ranks)}
        assert all(isinstance(each, Communicator) and each.node for each in ranks)
        assert len({each.bulk for each in ranks}) == 1

    async def test_what_is_sent_is_received_once_by_each(self, ranks: list[Communicator]) -> None:
        everybody = range(len(ranks))
        for each in ranks:
            await each.send(everybody, "first", bytes([each.rank]))
            await each.send(everybody, "second", b"second of %d" % each.rank)
        for each in ranks:
            for source in everybody:  # in another order than they were sent
                assert await each.recv(source, "second", timeout=ENOUGH) == b"second of %d" % source
                assert await each.recv(source, "first", timeout=ENOUGH) == bytes([source])
                with pytest.raises(RanksUnavailable):
                    await each.recv(source, "first", timeout=0.0)

    async def test_a_receive_waits_for_the_send(self, ranks: list[Communicator]) -> None:
        taking = asyncio.create_task(ranks[0].recv(ranks[-1].rank, "later", timeout=ENOUGH))
        await asyncio.sleep(0.05)
        assert not taking.done()
        await ranks[-1].send([0], "later", b"now")
        assert await taking == b"now"

    @pytest.mark.parametrize("nbytes", [0, 1, 100_000, 4 << 20])
    async def test_a_message_is_kept_bit_for_bit(self, ranks: list[Communicator], nbytes: int) -> None:
        data = random.Random(nbytes).randbytes(nbytes)
        await ranks[-1].send([0], "a/topic of ünusual name", data)
        assert await ranks[0].recv(ranks[-1].rank, "a/topic of ünusual name", timeout=ENOUGH) == data

    @pytest.mark.parametrize("seed", range(3))
    async def test_whatever_the_order_nothing_is_lost_or_mixed_up(self, ranks: list[Communicator], seed: int) -> None:
        rng = random.Random(seed)
        messages = [(rng.choice(ranks), rng.choice(ranks), f"topic {number}") for number in range(60)]

        async def send(source: Communicator, to: Communicator, topic: str) -> None:
            await asyncio.sleep(rng.random() / 20)
            await source.send([to.rank], topic, f"{source.rank} {to.rank} {topic}".encode())

        async def recv(source: Communicator, to: Communicator, topic: str) -> None:
            await asyncio.sleep(rng.random() / 20)
            data = await to.recv(source.rank, topic, timeout=ENOUGH)
            assert data == f"{source.rank} {to.rank} {topic}".encode()

        calls = [call for message in messages for call in (send(*message), recv(*message))]
        rng.shuffle(calls)
        await _all(calls)

    # -- deadlines ----------------------------------------------------------------------------------------

    async def test_a_silent_rank_is_named_at_the_deadline(self, ranks: list[Communicator]) -> None:
        begin = time.monotonic()
        with pytest.raises(RanksUnavailable, match="has not sent 'nothing'") as caught:
            await ranks[0].recv(ranks[-1].rank, "nothing", timeout=SHORT)
        assert SHORT * 0.9 <= time.monotonic() - begin < SHORT + SLACK
        assert caught.value.ranks == (ranks[-1].rank,)

    async def test_what_comes_after_the_deadline_may_be_taken_later(self, ranks: list[Communicator]) -> None:
        with pytest.raises(RanksUnavailable):
            await ranks[0].recv(ranks[-1].rank, "late", timeout=SHORT)
        await ranks[-1].send([0], "late", b"better")
        assert await ranks[0].recv(ranks[-1].rank, "late", timeout=ENOUGH) == b"better"

    async def test_a_take_that_was_cancelled_took_nothing(self, ranks: list[Communicator]) -> None:
        for number in range(5):
            taking = asyncio.create_task(ranks[0].recv(ranks[-1].rank, f"kept {number}", timeout=ENOUGH))
            await asyncio.sleep(0.01 * number)
            await ranks[-1].send([0], f"kept {number}", b"safe")
            taking.cancel()
            outcome = (await asyncio.gather(taking, return_exceptions=True))[0]
            if isinstance(outcome, asyncio.CancelledError):
                outcome = await ranks[0].recv(ranks[-1].rank, f"kept {number}", timeout=ENOUGH)
            assert outcome == b"safe"

    async def test_a_post_does_not_wait_for_who_has_gone(self, ranks: list[Communicator]) -> None:
        if len(ranks) == 1:
            pytest.skip("there is nobody else")
        await ranks[-1].close()
        begin = time.monotonic()
        await ranks[0].send([ranks[-1].rank], "gone", bytes(1 << 20))
        assert time.monotonic() - begin < SLACK
        await ranks[0].send([0], "self", b"still here")
        assert await ranks[0].recv(0, "self", timeout=ENOUGH) == b"still here"

    # -- together -----------------------------------------------------------------------------------------

    async def test_ranks_speak_together(self, ranks: list[Communicator]) -> None:
        size = len(ranks)
        said = [f"rank {rank}".encode() for rank in range(size)]
        gathered = await _all(gather(each, "gather", said[each.rank], timeout=ENOUGH) for each in ranks)
        assert gathered == [dict(enumerate(said)), *[{}] * (size - 1)]
        broadcasts = (broadcast(each, "cast", None if each.rank else b"hear", timeout=ENOUGH) for each in ranks)
        assert await _all(broadcasts) == [b"hear"] * size
        exchanged = await _all(exchange(each, "exchange", said[each.rank], timeout=ENOUGH) for each in ranks)
        assert exchanged == [said] * size

    async def test_nobody_passes_a_barrier_before_all_have_come(self, ranks: list[Communicator]) -> None:
        early = [asyncio.create_task(barrier(each, "gate", timeout=ENOUGH)) for each in ranks[:-1]]
        await asyncio.sleep(0.1)
        assert not any(task.done() for task in early)
        await barrier(ranks[-1], "gate", timeout=ENOUGH)
        await _all(early)

    async def test_all_are_told_who_is_missing_at_the_deadline(self, ranks: list[Communicator]) -> None:
        if len(ranks) == 1:
            pytest.skip("there is nobody else")
        begin = time.monotonic()
        outcomes = await asyncio.gather(
            *(exchange(each, "without", bytes([each.rank]), timeout=MISSED) for each in ranks[:-1]),
            return_exceptions=True,
        )
        assert time.monotonic() - begin < MISSED + SLACK
        for outcome in outcomes:
            assert isinstance(outcome, RanksMissing)
            assert outcome.ranks == (ranks[-1].rank,)
        with pytest.raises(RanksMissing) as caught:
            await gather(ranks[0], "alone", b"mine", timeout=SHORT)
        assert caught.value.came == {0: b"mine"}
        assert caught.value.ranks == tuple(range(1, len(ranks)))

    async def test_ranks_speak_from_loops_of_their_own(self, processes: Callable[[], list[Communicator]]) -> None:
        ranks = processes()

        async def speak(mine: Communicator) -> list[list[bytes]]:
            await mine.open(timeout=ENOUGH)
            said = [
                await exchange(mine, f"number {number}", bytes([mine.rank, number]), timeout=ENOUGH)
                for number in range(30)
            ]
            await mine.close()
            return said

        expected = [[bytes([rank, number]) for rank in range(len(ranks))] for number in range(30)]
        with ThreadPoolExecutor(len(ranks)) as threads:
            loop = asyncio.get_running_loop()
            calls = (loop.run_in_executor(threads, asyncio.run, speak(each)) for each in ranks)
            assert await _all(calls) == [expected] * len(ranks)

    # -- bulk ---------------------------------------------------------------------------------------------

    async def test_bulk_arrives_bit_for_bit_and_in_order(self, ranks: list[Communicator]) -> None:
        _needs_bulk(ranks)
        source, to = ranks[0], ranks[-1]
        parcels = [random.Random(size).randbytes(size) for size in (9 << 20, 1, 300_000)]
        arrays = [bytearray(len(parcel)) for parcel in parcels]
        await _all(
            [
                *(source.send_bulk(to.rank, memoryview(parcel), tag=3, timeout=ENOUGH) for parcel in parcels),
                *(to.recv_bulk(0, memoryview(array), tag=3, timeout=ENOUGH) for array in arrays),
            ]
        )
        assert arrays == parcels

    async def test_bulk_has_a_deadline_and_messages_go_on(self, ranks: list[Communicator]) -> None:
        _needs_bulk(ranks)
        begin = time.monotonic()
        with pytest.raises(RanksUnavailable) as receiving:
            await ranks[0].recv_bulk(ranks[-1].rank, memoryview(bytearray(10)), tag=1, timeout=SHORT)
        with pytest.raises(RanksUnavailable) as sending:
            await ranks[0].send_bulk(ranks[-1].rank, memoryview(bytes(64 << 20)), tag=2, timeout=SHORT)
        assert time.monotonic() - begin < 2 * SHORT + SLACK
        assert receiving.value.ranks == sending.value.ranks == (ranks[-1].rank,)
        await ranks[-1].send([0], "after", b"words")
        assert await ranks[0].recv(ranks[-1].rank, "after", timeout=ENOUGH) == b"words"

    async def test_bulk_that_failed_with_one_rank_goes_on_with_the_others(self, ranks: list[Communicator]) -> None:
        _needs_bulk(ranks)
        if len(ranks) < 3:
            pytest.skip("there are no others")
        with pytest.raises(RanksUnavailable):
            await ranks[0].recv_bulk(ranks[-1].rank, memoryview(bytearray(10)), tag=1, timeout=SHORT)
        into = bytearray(1000)
        send = ranks[0].send_bulk(1, memoryview(b"x" * 1000), tag=1, timeout=ENOUGH)
        await _all([send, ranks[1].recv_bulk(0, memoryview(into), tag=1, timeout=ENOUGH)])
        assert into == b"x" * 1000

    async def test_bulk_is_refused_where_there_is_none(self, ranks: list[Communicator]) -> None:
        if ranks[0].bulk:
            pytest.skip("it sends in bulk")
        with pytest.raises(Invalid, match="bulk"):
            await ranks[0].send_bulk(ranks[-1].rank, memoryview(b"x"), tag=0, timeout=SHORT)
        with pytest.raises(Invalid, match="bulk"):
            await ranks[0].recv_bulk(ranks[-1].rank, memoryview(bytearray(1)), tag=0, timeout=SHORT)

    # -- sessions -----------------------------------------------------------------------------------------

    async def test_a_closed_one_says_so_and_ends_who_waits(self, ranks: list[Communicator]) -> None:
        mine = ranks[-1]
        taking = asyncio.create_task(mine.recv(0, "never", timeout=ENOUGH))
        await asyncio.sleep(0.02)
        await mine.close()
        with pytest.raises(Closed):
            await taking
        with pytest.raises(Closed):
            await mine.recv(0, "never", timeout=SHORT)
        with pytest.raises(Closed):
            await mine.send([0], "never", b"")
        await mine.close()

    @pytest.mark.parametrize("orderly", [True, False], ids=["closed", "died"])
    async def test_a_restart_reads_nothing_of_before(
        self, start: Callable[[], Awaitable[list[Communicator]]], orderly: bool
    ) -> None:
        everybody = range(len(before := await start()))
        for each in before:
            await each.send(everybody, "word", b"old")
        if orderly:
            await _all(each.close() for each in before)
        after = await start()
        for each in after:
            with pytest.raises(RanksUnavailable):
                await each.recv(0, "word", timeout=SHORT)
        await after[0].send(everybody, "word", b"new")
        for each in after:
            assert await each.recv(0, "word", timeout=ENOUGH) == b"new"

    async def test_who_does_not_come_is_named_at_the_deadline(
        self, processes: Callable[[], list[Communicator]], start: Callable[[], Awaitable[list[Communicator]]]
    ) -> None:
        ranks = processes()
        if len(ranks) == 1:
            pytest.skip("there is nobody else")
        begin = time.monotonic()
        outcomes = await asyncio.gather(*(each.open(timeout=MISSED) for each in ranks[:-1]), return_exceptions=True)
        assert time.monotonic() - begin < MISSED + SLACK
        await _all(each.close() for each in ranks)
        assert isinstance(outcomes[0], RanksMissing)
        assert outcomes[0].ranks == (ranks[-1].rank,)
        assert all(isinstance(outcome, RanksUnavailable) for outcome in outcomes)
        again = await start()  # what they left does not keep others from meeting
        assert await _all(exchange(each, "all", b"!", timeout=ENOUGH) for each in again) == [[b"!"] * len(again)] * len(
            again
        )


def _needs_bulk(ranks: list[Communicator]) -> None:
    if not ranks[0].bulk:
        pytest.skip("it sends nothing in bulk")


async def _all(calls: Iterable[Awaitable[T]]) -> list[T]:
    return list(await asyncio.gather(*calls))
