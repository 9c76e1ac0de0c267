"""Runs an agent as the work of a process, which ends it in order on SIGTERM, SIGINT and SIGHUP."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from typing import Literal

from tieredckpt.agent.agent import Agent, Life
from tieredckpt.config import StoreConfig
from tieredckpt.events import Events

__all__ = ["Ending", "run_agent"]

Ending = Literal["signal", "done", "nothing to do"]


def run_agent(config: StoreConfig, events: Events, life: Life, ram: Path | None = None) -> Ending:
    """Run until the agent ends, and log the reason. Raises as `Agent.run`. For the main thread."""
    agent = Agent(config, events, life, ram)
    try:
        asyncio.run(_run(agent))
    except asyncio.CancelledError:
        return "signal"
    return "done" if agent.opened else "nothing to do"


async def _run(agent: Agent) -> None:
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:  # as behind nohup
            loop.add_signal_handler(number, task.cancel)
    await agent.run()
