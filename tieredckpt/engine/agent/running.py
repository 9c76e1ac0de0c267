"""Runs an agent as the work of a process, which ends it in order on SIGTERM, SIGINT and SIGHUP."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

from tieredckpt.config import StoreConfig
from tieredckpt.engine.agent.agent import Agent, Life
from tieredckpt.events import Events

__all__ = ["run_agent"]


def run_agent(config: StoreConfig, events: Events, life: Life, ram: Path | None = None) -> bool:
    """Run until the agent ends: True when a signal ended it. Raises as `Agent.run`. For the main thread."""
    try:
        asyncio.run(_run(Agent(config, events, life, ram)))
    except asyncio.CancelledError:
        return True
    return False


async def _run(agent: Agent) -> None:
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:  # as behind nohup
            loop.add_signal_handler(number, task.cancel)
    await agent.run()
