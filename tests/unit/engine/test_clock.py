"""The engine's clock: a process that does not run misses no deadline, and time goes on in one that is slow."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest

from tieredckpt.engine import limits
from tieredckpt.engine.clock import RunningTimeLoop


@pytest.fixture
def loop(monkeypatch: pytest.MonkeyPatch) -> Iterator[RunningTimeLoop]:
    monkeypatch.setattr(limits, "in_force", replace(limits.in_force, longest_pause=0.4))
    loop = RunningTimeLoop()
    yield loop
    loop.close()


def test_what_came_while_the_process_stood_still_is_in_time(loop: RunningTimeLoop) -> None:
    async def several_turns_later() -> str:
        await asyncio.sleep(0.1)  # waits when everything stands still
        for _ in range(10):
            await asyncio.sleep(0.01)
        return "came"

    async def wait() -> str:
        loop.call_later(0.05, time.sleep, 2.0)
        async with asyncio.timeout(1.5):
            return await several_turns_later()

    assert loop.run_until_complete(wait()) == "came"


def test_a_wait_ends_though_its_process_runs_a_little_at_a_time(loop: RunningTimeLoop) -> None:
    async def wait() -> None:
        def again() -> None:
            time.sleep(0.6)
            loop.call_soon(again)

        again()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1.0):
                await asyncio.Event().wait()

    loop.run_until_complete(wait())


def test_a_wait_takes_as_long_as_it_says(loop: RunningTimeLoop) -> None:
    begin = time.monotonic()
    loop.run_until_complete(asyncio.sleep(1.0))
    assert 1.0 <= time.monotonic() - begin < 60
