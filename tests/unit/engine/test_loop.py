"""The engine's loop: work from any loop or thread, cancelled work that has really ended, an end that is final."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tieredckpt.concurrency import in_thread
from tieredckpt.engine.loop import EngineLoop, Work
from tieredckpt.errors import Closed, NotFound


@pytest.fixture
def engine() -> Iterator[EngineLoop]:
    loop = EngineLoop("engine of a test")
    yield loop
    loop.stop()


async def where() -> str:
    return threading.current_thread().name


async def test_work_runs_on_the_engines_own_thread(engine: EngineLoop) -> None:
    assert await engine.call(where()) == "engine of a test"
    assert engine.call_blocking(where()) == "engine of a test"
    assert await asyncio.to_thread(asyncio.run, engine.call(where())) == "engine of a test"


async def test_what_the_work_raises_reaches_the_caller(engine: EngineLoop) -> None:
    async def fail() -> None:
        raise NotFound("as it was raised")

    with pytest.raises(NotFound, match="as it was raised"):
        await engine.call(fail())
    with pytest.raises(NotFound, match="as it was raised"):
        engine.call_blocking(fail())


async def test_a_cancelled_caller_returns_when_the_work_has_ended(engine: EngineLoop) -> None:
    begun, may_end, ended = threading.Event(), threading.Event(), threading.Event()

    def reluctant() -> None:
        begun.set()
        may_end.wait()
        ended.set()

    calling = asyncio.create_task(engine.call(in_thread(reluctant)))
    await asyncio.to_thread(begun.wait)
    for _ in range(3):
        calling.cancel()
        await asyncio.wait([calling], timeout=0.01)
        assert not calling.done()
    may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await calling
    assert ended.is_set()


async def test_work_of_a_caller_whose_loop_has_gone_does_no_harm(engine: EngineLoop) -> None:
    release = threading.Event()

    def leave_behind() -> None:
        async def give_up_at_once() -> None:
            work = engine.submit(asyncio.to_thread(release.wait))
            work.cancel()

        asyncio.run(give_up_at_once())

    await asyncio.to_thread(leave_behind)
    release.set()
    assert await engine.call(where())


def test_calls_from_many_threads_all_return() -> None:
    engine = EngineLoop("engine of a test")

    async def echo(value: int) -> int:
        await asyncio.sleep(0)
        return value

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda i: engine.call_blocking(echo(i)), range(200))) == list(range(200))
    engine.stop()


async def test_stopping_ends_what_is_under_way_and_refuses_what_comes(engine: EngineLoop) -> None:
    begun = threading.Event()

    async def for_ever() -> None:
        begun.set()
        await asyncio.Event().wait()

    calling = asyncio.create_task(engine.call(for_ever()))
    await asyncio.to_thread(begun.wait)
    await asyncio.gather(*(asyncio.to_thread(engine.stop) for _ in range(3)))
    with pytest.raises(Closed):
        await calling
    with pytest.raises(Closed):
        await engine.call(where())
    with pytest.raises(Closed):
        engine.call_blocking(where())
    assert "engine of a test" not in {thread.name for thread in threading.enumerate()}


@pytest.mark.parametrize("late", [0, 1, 2, 3])
async def test_a_close_in_the_moment_of_the_end_is_done_or_refused(engine: EngineLoop, late: int) -> None:
    """None of the calls is left pending, whichever turn of the loop it is submitted in."""
    works: list[Work[None]] = []

    async def close() -> None:
        for _ in range(20):
            await asyncio.sleep(0)

    def submit(turns: int) -> None:
        if turns:
            engine.thread.loop.call_soon(submit, turns - 1)
        else:
            works.append(engine.submit(close(), closes=True))

    def end() -> None:
        engine.thread.end()
        submit(late)

    engine.soon(end)
    await engine.joined()
    for work in works:
        assert work.task is None or work.task.done()
        assert work.ended.wait(0.0)
