"""The plan of an exchange: everybody gets everything, from RAM first, with one read of what nobody has."""

from __future__ import annotations

import time
from collections import Counter, defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tieredckpt.engine.ranks.restore.plan import (
    Stock,
    Task,
    decode_stock,
    decode_tasks,
    encode_stock,
    encode_tasks,
    plan,
)
from tieredckpt.errors import Corrupt


def name(number: int) -> bytes:
    return number.to_bytes(16, "big")


@st.composite
def worlds(draw: st.DrawFn) -> dict[int, Stock]:
    """What up to seven ranks need and have, of up to forty chunks; what one has itself it may still ask for."""
    sizes = draw(st.lists(st.integers(1, 5000), min_size=1, max_size=40))
    chunks = st.integers(0, len(sizes) - 1)
    return {
        rank: Stock(
            {name(i): sizes[i] for i in draw(st.lists(chunks, unique=True))},
            [name(i) for i in draw(st.lists(chunks, unique=True))],
        )
        for rank in range(draw(st.integers(1, 7)))
    }


def near(rank: int, group: int | None) -> int:
    return 0 if group is None else rank // group


def shared_needs(stocks: dict[int, Stock], group: int | None) -> dict[tuple[bytes, int], bool]:
    """By chunk and group, whether several of the group need it."""
    count = Counter((name, near(rank, group)) for rank, stock in stocks.items() for name in stock.needs)
    return {place: several > 1 for place, several in count.items()}


@given(worlds(), st.none() | st.integers(1, 4))
def test_everybody_gets_what_it_needs_once_from_ram_if_anyone_has_it(
    stocks: dict[int, Stock], group: int | None
) -> None:
    tasks = plan(stocks, group=group)
    has = {rank: set(stock.has) for rank, stock in stocks.items()}
    somewhere = set().union(*has.values())
    shared = shared_needs(stocks, group)
    for rank, stock in stocks.items():
        got = Counter(task.digest for task in tasks[rank] if task.source != rank)
        alone = {name for name in stock.needs if name not in somewhere and not shared[name, near(rank, group)]}
        assert got == Counter(set(stock.needs) - has[rank] - alone)
    for rank, todo in tasks.items():
        for task in todo:
            if task.source == rank:
                assert task.digest in has[rank]
            elif task.source is None:
                assert task.digest not in somewhere
            else:
                assert not task.to
            assert rank not in task.to
            for other in task.to:
                (there,) = [one for one in tasks[other] if one.digest == task.digest]
                assert there == Task(task.digest, task.nbytes, rank, ())
                if task.source is None and group is not None:
                    assert rank // group == other // group


@given(worlds(), st.none() | st.integers(1, 4))
def test_a_chunk_is_read_once_in_every_group_that_needs_it(stocks: dict[int, Stock], group: int | None) -> None:
    somewhere = {digest for stock in stocks.values() for digest in stock.has}
    reads = Counter(
        (task.digest, near(rank, group))
        for rank, todo in plan(stocks, group=group).items()
        for task in todo
        if task.source is None
    )
    shared = shared_needs(stocks, group)
    assert reads == Counter(place for place, several in shared.items() if several and place[0] not in somewhere)


@given(worlds())
def test_no_transfer_waits_for_a_later_one(stocks: dict[int, Stock]) -> None:
    """Ranks that do one task at a time, each when its partners are at it too, come to their ends."""
    left = {rank: list(todo) for rank, todo in plan(stocks).items()}
    while any(left.values()):
        heads = {rank: todo[0] for rank, todo in left.items() if todo}
        ready = [
            rank
            for rank, head in heads.items()
            if head.source in (None, rank) and all(heads[to].digest == head.digest for to in head.to)
        ]
        assert ready, "all wait for each other"
        for other in (ready[0], *heads[ready[0]].to):
            left[other].pop(0)


@given(st.integers(2, 9), st.lists(st.integers(1, 5000), min_size=1, max_size=60))
def test_replicas_read_equal_shares(ranks: int, sizes: list[int]) -> None:
    needs = {name(i): nbytes for i, nbytes in enumerate(sizes)}
    tasks = plan({rank: Stock(needs) for rank in range(ranks)})
    read = [sum(task.nbytes for task in todo if task.source is None) for todo in tasks.values()]
    assert sum(read) == sum(sizes)
    assert max(read) - min(read) <= 2 * max(sizes)


@given(st.integers(2, 9), st.lists(st.integers(1, 5000), min_size=1, max_size=60))
def test_holders_give_equal_shares(holders: int, sizes: list[int]) -> None:
    has = [name(i) for i in range(len(sizes))]
    stocks = {rank: Stock({}, has) for rank in range(holders)}
    stocks[holders] = Stock({name(i): nbytes for i, nbytes in enumerate(sizes)})
    tasks = plan(stocks)
    given_ = [sum(task.nbytes * len(task.to) for task in tasks[rank]) for rank in range(holders)]
    assert sum(given_) == sum(sizes)
    assert max(given_) - min(given_) <= 2 * max(sizes)


def test_what_lies_side_by_side_is_read_by_one_rank() -> None:
    needs = {name(i): 100 for i in range(400)}
    for todo in plan({rank: Stock(needs) for rank in range(4)}).values():
        read = [int.from_bytes(task.digest, "big") for task in todo if task.source is None]
        assert read == list(range(read[0], read[0] + 100))


def test_all_ranks_read_at_the_same_time() -> None:
    """The common order takes a chunk of every reader in turn, so that none waits for another's whole share."""
    needs = {name(i): 100 for i in range(400)}
    todo = plan({rank: Stock(needs) for rank in range(4)})[0]
    sources = [0 if task.source is None else task.source for task in todo]
    assert all(set(sources[at : at + 4]) == {0, 1, 2, 3} for at in range(0, 400, 4))


@given(worlds())
def test_messages_say_what_they_were_made_of(stocks: dict[int, Stock]) -> None:
    for stock in stocks.values():
        assert decode_stock(encode_stock(stock)) == stock
        assert list(decode_stock(encode_stock(stock)).needs) == list(stock.needs)
    for todo in plan(stocks).values():
        assert decode_tasks(encode_tasks(todo)) == todo


@settings(max_examples=300)
@given(worlds(), st.data())
def test_a_damaged_message_is_refused_or_read(stocks: dict[int, Stock], data: st.DataObject) -> None:
    message = bytearray(encode_tasks(plan(stocks)[0]))
    at = data.draw(st.integers(0, len(message) - 1))
    message[at] = data.draw(st.integers(0, 255))
    for damaged in (bytes(message), bytes(message[:at])):
        for decode in (decode_tasks, decode_stock):
            try:
                decode(damaged)
            except Corrupt as error:
                assert "exchange" in str(error)  # noqa: PT017  # most damage is refused, not all


def test_a_broadcast_of_many_chunks_is_planned_in_no_time() -> None:
    needs = {name(i): 16 << 20 for i in range(20_000)}
    begin = time.process_time()
    tasks = plan({rank: Stock(needs) for rank in range(16)}, group=8)
    assert time.process_time() - begin < 10.0
    by_kind: dict[bool, int] = defaultdict(int)
    for todo in tasks.values():
        for task in todo:
            by_kind[task.source is None] += 1
    assert by_kind == {True: 40_000, False: 280_000}


def test_nothing_to_exchange_is_no_task() -> None:
    assert plan({0: Stock({}), 1: Stock({}, [name(1)])}) == {0: [], 1: []}
    with pytest.raises(Corrupt, match="exchange"):
        decode_stock(b"")
