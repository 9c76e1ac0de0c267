"""Waiting that a cancellation does not cut short leaves nothing behind, in the log neither."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

import pytest

from tieredckpt.concurrency import shielded


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
