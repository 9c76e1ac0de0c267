"""The threads of a posix store: as many as are needed, and nothing is held when a call or the pool has ended."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from typing import Any

import numpy as np
import pytest

from tieredckpt.blobs.posix import threads


async def test_what_a_call_used_is_let_go_when_it_has_ended() -> None:
    """Also by a thread that waits for the next call, and where the call failed."""
    pool = threads.Threads(2, "test", "here")
    memory = [np.zeros(10), np.zeros(10)]
    gone = [weakref.ref(each) for each in memory]

    def fail(_: Any) -> None:
        raise ValueError

    assert await asyncio.wrap_future(pool.submit(len, memory[0])) == 10
    with pytest.raises(ValueError):  # noqa: PT011
        await asyncio.wrap_future(pool.submit(fail, memory[1]))
    memory.clear()
    async with asyncio.timeout(30):
        while any(each() is not None for each in gone):
            await asyncio.sleep(0.001)
    pool.shutdown()
    with pytest.raises(RuntimeError, match="have ended"):
        pool.submit(len, b"")


async def test_calls_side_by_side_have_as_many_threads_as_there_are_and_no_more() -> None:
    pool = threads.Threads(3, "test", "here")
    together, alone = threading.Barrier(3), threading.Semaphore(3)

    def meet() -> bool:
        free = alone.acquire(blocking=False)
        together.wait(30)
        alone.release()
        return free

    for _ in range(20):
        assert all(await asyncio.gather(*(asyncio.wrap_future(pool.submit(meet)) for _ in range(9))))
    pool.shutdown()


async def test_threads_end_with_the_pool_that_nobody_refers_to() -> None:
    pool = threads.Threads(2, "forgotten", "here")
    await asyncio.wrap_future(pool.submit(int))
    del pool
    async with asyncio.timeout(30):
        while any("forgotten" in thread.name for thread in threading.enumerate()):
            gc.collect()
            await asyncio.sleep(0.01)
