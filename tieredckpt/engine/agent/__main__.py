"""An agent that a store starts: ``python -m tieredckpt.engine.agent``, with the configuration on its input."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import sys
import time

from tieredckpt.config import load
from tieredckpt.engine.agent.agent import Agent
from tieredckpt.errors import TieredCkptError
from tieredckpt.events import Event, Events

_log = logging.getLogger("tieredckpt")


def main() -> int:
    """Promote until there is nothing to do and no trainer; 1 when that cannot be."""
    logging.Formatter.converter = time.gmtime
    logging.basicConfig(format="%(asctime)sZ %(process)d %(levelname)s %(message)s", datefmt="%Y-%m-%dT%H:%M:%S")
    _log.setLevel(logging.INFO)
    config = load(json.load(sys.stdin))
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, sys.stdin.fileno())
    os.close(nothing)
    events = Events()
    events.subscribe(_note)
    try:
        asyncio.run(_run(Agent(config, events, stays=False)))
    except TieredCkptError as error:
        _log.error("%s", error)
        return 1
    except asyncio.CancelledError:
        _log.info("ended by a signal")
    return 0


async def _run(agent: Agent) -> None:
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, task.cancel)
    await agent.run()


def _note(event: Event) -> None:
    _log.info("%s", event)


if __name__ == "__main__":
    sys.exit(main())
