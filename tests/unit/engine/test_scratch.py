"""Scratch memory is lent piece by piece, to one borrower at a time, in the order in which they came."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import numpy as np
import pytest

from tieredckpt.blobs import mapping
from tieredckpt.blobs.ram.slab import PAGE
from tieredckpt.engine.scratch import Scratch
from tieredckpt.errors import Corrupt, NoSpace
from tieredckpt.units import format_size


@pytest.fixture(params=[True, False], ids=["shared", "private"])
def scratch(request: pytest.FixtureRequest) -> Iterator[Scratch]:
    scratch = Scratch(8 * PAGE, shared=request.param)
    yield scratch
    scratch.close()


async def turns() -> None:
    """Run every task until it waits."""
    for _ in range(20):
        await asyncio.sleep(0)


async def test_pieces_are_whole_pages_that_nobody_else_has(scratch: Scratch) -> None:
    async with scratch.lend(PAGE + 1) as one, scratch.lend(2 * PAGE) as other:
        assert one.size == other.size == 2 * PAGE
        assert one.ctypes.data % PAGE == other.ctypes.data % PAGE == 0
        one[:], other[:] = 1, 2
        assert (one == 1).all()
    assert scratch.slab.used == 0


async def test_memory_that_came_back_is_lent_again(scratch: Scratch) -> None:
    addresses = set()
    for _ in range(5):
        async with scratch.lend(PAGE) as memory:
            addresses.add(memory.ctypes.data)
    assert len(addresses) == 1
    assert scratch.slab.reserved == PAGE


async def test_who_asks_for_more_than_is_free_waits_until_enough_came_back(scratch: Scratch) -> None:
    first = await scratch.borrow(5 * PAGE)
    second = await scratch.borrow(3 * PAGE)
    waiter = asyncio.create_task(scratch.borrow(6 * PAGE))
    await turns()
    scratch.give_back(second, 3 * PAGE)
    await turns()
    assert not waiter.done()
    scratch.give_back(first, 5 * PAGE)
    scratch.give_back(await waiter, 6 * PAGE)


async def test_a_large_request_is_not_overtaken_for_ever_by_small_ones(scratch: Scratch) -> None:
    held, enough_for_the_small_one = await scratch.borrow(7 * PAGE), await scratch.borrow(PAGE)
    order: list[str] = []

    async def borrow(name: str, nbytes: int) -> None:
        async with scratch.lend(nbytes):
            order.append(name)

    async with asyncio.TaskGroup() as group:
        group.create_task(borrow("large", 8 * PAGE))
        await turns()
        group.create_task(borrow("small", PAGE))
        await turns()
        scratch.give_back(enough_for_the_small_one, PAGE)
        await turns()
        scratch.give_back(held, 7 * PAGE)
    assert order == ["large", "small"]


async def test_a_borrower_that_gives_up_stops_nobody(scratch: Scratch) -> None:
    held = await scratch.borrow(8 * PAGE)
    first, second = (asyncio.create_task(scratch.borrow(4 * PAGE)) for _ in range(2))
    await turns()
    first.cancel()
    await turns()
    scratch.give_back(held, 8 * PAGE)
    scratch.give_back(await second, 4 * PAGE)
    assert scratch.slab.used == 0


async def test_memory_released_to_the_slab_itself_is_announced_by_a_beat(scratch: Scratch) -> None:
    taken = scratch.slab.allocate(8 * PAGE)
    assert taken is not None
    waiter = asyncio.create_task(scratch.borrow(PAGE))
    await turns()
    scratch.slab.release(taken, 8 * PAGE)
    scratch.returned.notify()
    scratch.give_back(await waiter, PAGE)


async def test_many_borrowers_never_share_a_byte(scratch: Scratch) -> None:
    rng = np.random.default_rng(1)

    async def borrow(number: int, nbytes: int) -> None:
        async with scratch.lend(nbytes) as memory:
            memory[:] = number
            await asyncio.sleep(0)
            assert (memory == number).all()

    async with asyncio.TaskGroup() as group:
        for number in range(100):
            group.create_task(borrow(number, int(rng.integers(1, 8 * PAGE))))
    assert scratch.slab.used == 0


@pytest.mark.parametrize("scratch", [True], indirect=True)  # private memory comes with its first use
async def test_a_system_without_memory_is_an_error_and_no_wait_without_end(
    scratch: Scratch, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(mapping, "reserve", refuse)
    with pytest.raises(NoSpace, match=f"no memory for a buffer of {format_size(PAGE)}"):
        await scratch.borrow(PAGE)


async def test_a_chunk_larger_than_the_pool_has_memory_of_its_own(scratch: Scratch) -> None:
    async with scratch.lend(8 * PAGE + 1) as memory:
        assert memory.size == 9 * PAGE
        assert memory.ctypes.data % PAGE == 0
        memory[:] = 1
        assert scratch.slab.used == 0
    with pytest.raises(Corrupt, match="cannot be right"):
        async with scratch.lend(1 << 40):
            pass
