"""What tests of agents share: who is the agent of a folder, and that none outlives its test."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil

from support.scenes import SOON, ram_in
from tieredckpt import CheckpointStore
from tieredckpt.engine.agent.process import LOCK, LOG, lives


def agent_of(folder: Path, *, after: int | None = None) -> int:
    """The process that is the agent of a RAM folder; the next one, once there is one, ``after`` another."""
    if after is not None:
        eventually(lambda: _holder(folder) not in (None, after), "there is another agent")
    assert lives(ram_in(folder)), f"there is no agent; its log:\n{log_of(folder)}"
    found = _holder(folder)
    assert found is not None
    return found


def _holder(folder: Path) -> int | None:
    """Who last said that it is the agent of a folder."""
    try:
        found = re.match(r"process (\d+) on ", (ram_in(folder) / LOCK).read_text())
    except FileNotFoundError:
        return None
    return int(found[1]) if found is not None else None


def log_of(folder: Path) -> str:
    """What agents that stores started have said."""
    log = ram_in(folder) / LOG
    return log.read_text() if log.exists() else ""


def wait_for_end(process: int) -> None:
    """Return when a process has ended; fails after a while."""
    try:
        psutil.Process(process).wait(SOON)
    except psutil.NoSuchProcess:
        return


def end_agent(folder: Path) -> None:
    """Kill the agent of a folder, if there is one; it may end by itself at any moment."""
    if lives(ram_in(folder)) and (process := _holder(folder)) is not None:
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
        wait_for_end(process)


async def until(store: CheckpointStore, condition: Callable[[], bool]) -> None:
    """Return when something holds of the store's state; fails after `SOON` seconds."""
    async with asyncio.timeout(SOON):
        await store._life.loop.call(store._life.engine.state.changed.until(condition))


def eventually(condition: Callable[[], bool], what: str) -> None:
    """Poll until a condition holds; fails after `SOON` seconds."""
    deadline = time.monotonic() + SOON
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.01)
