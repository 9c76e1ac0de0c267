"""An agent that a store starts: ``python -m tieredckpt.agent``, with the configuration on its input."""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from pathlib import Path

from tieredckpt.agent.agent import run_agent
from tieredckpt.config import load
from tieredckpt.errors import TieredCkptError
from tieredckpt.events import Event, Events
from tieredckpt.policy.base import offer

_log = logging.getLogger("tieredckpt")


def main() -> int:
    """Promote until there is nothing to do and no trainer; returns 1 if that is impossible."""
    logging.Formatter.converter = time.gmtime
    logging.basicConfig(format="%(asctime)sZ %(process)d %(levelname)s %(message)s", datefmt="%Y-%m-%dT%H:%M:%S")
    _log.setLevel(logging.INFO)
    handed = json.loads(sys.stdin.readline())  # not to the end, which a fork of the trainer may hold back
    offer(handed["config"].get("policies", ()))  # the policies named in the trainer's own file
    config, ram = load(handed["config"]), Path(handed["ram"])
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, sys.stdin.fileno())
    os.close(nothing)
    events = Events()
    events.subscribe(_note)
    try:
        ended = run_agent(config, events, "with trainer", ram)
    except TieredCkptError as error:
        _log.error("%s", error)
        return 1
    _log.info("ended by a signal" if ended == "signal" else "ended, for nothing is due and there is no trainer")
    return 0


def _note(event: Event) -> None:
    _log.info("%s", event)


if __name__ == "__main__":
    sys.exit(main())
