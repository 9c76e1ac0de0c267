"""Waiting that a cancellation does not cut short leaves nothing behind, in the log neither."""

from __future__ import annotations

import asyncio
import gc
import itertools
import threading
from typing import Any

import pytest

from tieredckpt.concurrency import shielded, side_by_side, together


async def test_a_shielded_work_goes_on_when_its_caller_is_cancelled() -> None:
    work: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    one, other = (asyncio.create_task(shielded(work)) for _ in range(2))
    await asyncio.sleep(0)
    one.cancel()
    with pytest.raises(asyncio.CancelledError):
        await one
    work.set_result(7)
    assert await other == await shielded(work) == 7


async def test_an_error_that_comes_after_the_caller_was_cancelled_is_reported_nowhere() -> None:
    loop, told = asyncio.get_running_loop(), list[dict[str, Any]]()
    loop.set_exception_handler(lambda loop, context: told.append(context))
    work: asyncio.Future[int] | None = loop.create_future()
    assert work is not None
    caller = asyncio.create_task(shielded(work))
    await asyncio.sleep(0)
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    work.set_exception(OSError("late"))
    await asyncio.sleep(0)
    work = None
    gc.collect()
    assert told == []


async def test_of_works_together_only_so_many_run_at_a_time_and_in_their_order() -> None:
    begun, running, most = list[int](), 0, 0

    async def work(number: int) -> None:
        nonlocal running, most
        begun.append(number)
        running += 1
        most = max(most, running)
        await asyncio.sleep(0)
        running -= 1

    await together(map(work, range(5)), 2)
    assert begun == [0, 1, 2, 3, 4]
    assert most == 2


@pytest.mark.parametrize("begins", [False, True])
async def test_works_whose_turn_has_not_come_never_begin_after_a_cancellation(begins: bool) -> None:
    begun = list[int]()

    async def work(number: int) -> None:
        begun.append(number)
        await asyncio.Event().wait()

    running = asyncio.create_task(together(map(work, range(3)), 1))
    await asyncio.sleep(0)
    while begins and not begun:
        await asyncio.sleep(0)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    gc.collect()  # a coroutine that was dropped unbegun would warn
    assert begun == [0] * begins


async def test_an_error_on_one_thread_ends_those_beside_it_before_it_is_raised() -> None:
    numbers, both, stop, ended = itertools.count(), threading.Barrier(2), threading.Event(), list[bool]()

    def work() -> None:
        number = next(numbers)
        both.wait(30)
        if number:
            raise OSError("this thread fails")
        ended.append(stop.wait(30))

    with pytest.raises(OSError, match="this thread fails"):
        await side_by_side(2, work, stop.set)
    assert ended == [True]
