"""What a trainer and its agent hold for each other ends with what it is for, wherever that is cancelled."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any, cast

import pytest
from support.scenes import SOON, config, folder, ram

from tieredckpt.concurrency import outlast
from tieredckpt.engine.agent import messages
from tieredckpt.engine.agent.client import AgentClient
from tieredckpt.engine.agent.wire import Wire, connect, listen
from tieredckpt.engine.opening.connect import make_tiers
from tieredckpt.engine.scratch import Scratch
from tieredckpt.engine.state.state import State
from tieredckpt.engine.wire_types import encode
from tieredckpt.events import Events
from tieredckpt.format.manifest import StepId


@pytest.fixture
def state(shared_memory: Path, tmp_path: Path) -> Iterator[State]:
    settings = config({"ram": ram(shared_memory), "disk": folder(tmp_path / "disk")})
    events = Events()
    tiers, _ = make_tiers(settings, read_only=False, events=events)
    with ThreadPoolExecutor(1) as pool, closing(Scratch(1 << 20)) as scratch:
        yield State(settings, tiers, events, pool, scratch, read_only=False)


class Agent:
    """The end of a connection to an agent that answers at once."""

    def __init__(self, client: AgentClient) -> None:
        self._client = client
        self.asked: list[Any] = []

    def send(self, message: object) -> None:
        if isinstance(message, messages.Request):
            self.asked.append(message.operation)
            if (waits := self._client._asked.get(message.number)) is not None:
                waits.answer.set_result(encode(None))

    @property
    def reads(self) -> int:
        begun, ended = (
            sum(isinstance(each, kind) for each in self.asked) for kind in (messages.BeginRead, messages.EndRead)
        )
        return begun - ended


async def test_an_agent_that_comes_while_a_read_begins_is_left_no_read(state: State) -> None:
    """It kept the step until the trainer ended."""
    client = AgentClient(state)
    first, second = Agent(client), Agent(client)
    client._wire = cast("Wire", first)

    async def read() -> None:
        async with client._being_read(state.tiers[1], StepId(1, 1)):
            pass

    reading = asyncio.create_task(read())
    asyncio.get_running_loop().call_soon(setattr, client, "_wire", second)
    client._tasks = [reading]
    await reading
    await asyncio.sleep(0.01)
    assert (first.reads, second.reads) == (0, 0)


async def test_an_agent_whose_call_is_accepted_as_the_store_closes_is_not_left_waiting(
    state: State, tmp_path: Path
) -> None:
    """It waited for the trainer's first words until its patience ended."""
    client, may_end = AgentClient(state), asyncio.Event()

    async def talk() -> None:
        await outlast(asyncio.ensure_future(may_end.wait()))

    client._talk = asyncio.create_task(talk())
    with listen(tmp_path) as sock:
        meeting = asyncio.create_task(client._meet(sock))
        agent = await connect(tmp_path)
        assert agent is not None
        while not client._talk.cancelling():
            await asyncio.sleep(0.01)
        meeting.cancel()
        may_end.set()
        await asyncio.wait([meeting])
        async with asyncio.timeout(SOON / 10):
            assert await agent._reader.read() == b""
        await agent.close()
