"""The agent's end of a connection serves a trainer for as long as it trains, and keeps nothing of what is over."""

from __future__ import annotations

import asyncio
from pathlib import Path

from support.scenes import SOON, config, folder, ram

from tieredckpt import CheckpointStore
from tieredckpt.agent.service import Service
from tieredckpt.engine.agent import messages
from tieredckpt.engine.agent.wire import accept, connect, listen


async def test_a_request_that_is_cancelled_before_it_has_begun_leaves_nothing_behind(
    shared_memory: Path, tmp_path: Path
) -> None:
    """A trainer may cancel thousands: both messages come at once where the agent was busy."""

    async def serve() -> int:
        sock = listen(tmp_path)
        accepting = asyncio.create_task(accept(sock))
        trainer = await connect(tmp_path)
        assert trainer is not None
        wire = await accepting
        service = Service(store._life.engine, wire)
        for number in range(10):
            trainer.send(messages.Request(number, messages.Flush()))
            trainer.send(messages.Cancel(number))
        running = asyncio.create_task(service.run(()))
        await asyncio.sleep(0.2)
        left = len(service._work)
        trainer.send(messages.Goodbye(False))
        await running
        await wire.close()
        await trainer.close()
        sock.close()
        return left

    tiers = {"ram": ram(shared_memory), "disk": folder(tmp_path / "disk")}
    async with CheckpointStore.open(config(tiers)) as store, asyncio.timeout(SOON):
        assert await store._life.loop.call(serve()) == 0
