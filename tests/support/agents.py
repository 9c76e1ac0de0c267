"""What tests of agents share: trainers that die, who is the agent of a folder, and that none outlives its test."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from support.scenes import SOON, config, ram, ram_in
from tieredckpt import CheckpointStore, StoreConfig
from tieredckpt.engine.agent.process import LOCK, LOG, lives

DYING = """
import json, os, signal, sys
from support.agents import agent_of
from support.scenes import tree
from tieredckpt import CheckpointStore
store = CheckpointStore.open(json.loads(sys.argv[1])).sync().__enter__()
for step in map(int, sys.argv[2:]):
    store.save(step, tree(step))
if store.config.promote_in == "agent":
    os.kill(agent_of(store.config.tiers[0].path), signal.SIGSTOP)  # or it might have ended before the test looks
os.kill(os.getpid(), signal.SIGKILL)
"""


def settings(shared_memory: Path, disk: dict[str, Any], **more: Any) -> StoreConfig:
    return config({"ram": ram(shared_memory, on_close="keep"), "disk": disk}, promote_in="agent", **more)


def save_and_die(settings: StoreConfig, *steps: int) -> None:
    """A trainer that is killed as soon as the last save has returned; if it has an agent, that is stopped."""
    done = subprocess.run(
        [sys.executable, "-c", DYING, json.dumps(settings.model_dump(mode="json")), *map(str, steps)],
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr


def go_on(ram_folder: Path) -> int:
    """Continue the agent that `save_and_die` has stopped; returns its process id."""
    agent = agent_of(ram_folder)
    os.kill(agent, signal.SIGCONT)
    return agent


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
