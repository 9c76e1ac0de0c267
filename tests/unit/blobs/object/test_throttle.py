"""Requests are held back while a server says that there are too many, and no longer than it takes."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from tieredckpt.blobs.object import throttle
from tieredckpt.blobs.object.throttle import SlowDown, Throttle


@pytest.fixture
def slept(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The pauses so far; time passes in them alone, and they are as short as they may be."""
    found: list[float] = []
    sleep = asyncio.sleep

    async def sleeping(seconds: float) -> None:
        await sleep(0)
        found.append(seconds)

    monkeypatch.setattr(throttle, "asyncio", SimpleNamespace(sleep=sleeping))
    monkeypatch.setattr(throttle, "time", SimpleNamespace(monotonic=lambda: sum(found)))
    monkeypatch.setattr(throttle, "random", SimpleNamespace(uniform=lambda least, _: least))
    return found


class Server:
    """Refuses so many requests, and then answers."""

    def __init__(self, refusals: int) -> None:
        self.refusals = refusals

    async def __call__(self) -> None:
        await asyncio.sleep(0)  # so that others begin meanwhile
        self.refusals -= 1
        if self.refusals >= 0:
            raise SlowDown("too many")


async def test_each_refusal_doubles_the_pause_up_to_a_bound_and_each_answer_halves_it(slept: list[float]) -> None:
    held = Throttle()
    await held(Server(8))
    assert slept == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0])
    await held(Server(0))
    await held(Server(1))
    assert slept[8:] == pytest.approx([2.5])


async def test_requests_that_are_refused_together_count_as_one(slept: list[float]) -> None:
    """Eight of them held back all others for five seconds."""
    held = Throttle()
    server = Server(8)
    await asyncio.gather(*(held(server) for _ in range(8)))
    assert set(slept) == {0.1}
