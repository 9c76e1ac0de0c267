"""A trainer that is to be killed: it restores, checks what it restored, and saves until its end.

``python -m reliability.doomed`` reads one job a line and runs each in a process of its own, forked so that
no import is paid for again. A trainer says on its output, line by line::

    pid 4711            its process
    restored 12         what it found (0: nothing), which it compared bit for bit
    saving 13           it is about to save that step
    saved 13            the save has returned
    promoted 13         the slower tier holds it
    wrong ...           what it found is not what was saved
    ended 9             how its process ended: by that signal, or 0
"""

from __future__ import annotations

import faulthandler
import json
import logging
import os
import random
import signal
import sys
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, TypeVar

import numpy as np
from support.file_systems import played

from tieredckpt.blobs.base import BlobStore
from tieredckpt.blobs.wrap.forward import Forward, Operation
from tieredckpt.config import TierConfig
from tieredckpt.engine import limits
from tieredckpt.errors import NoSpace
from tieredckpt.events import Event, StepPromoted
from tieredckpt.store import CheckpointStore
from tieredckpt.testing.faulty import Faulty
from tieredckpt.testing.tiers import Opening, tiers_opened_by

__all__ = ["AGENT_POINTS", "POINTS", "Job", "Point", "is_state", "main", "state"]

T = TypeVar("T")

Point = Literal["any time", "between writes", "in a collection", "on a full disk", "its agent", "both at once"]
"""Where a trainer is killed: by others, or by itself around a put or a delete on the slower tier; or its agent is."""

POINTS: tuple[Point, ...] = ("any time", "between writes", "in a collection", "on a full disk")
"""Of a trainer that promotes by itself."""

AGENT_POINTS: tuple[Point, ...] = ("any time", "its agent", "both at once")
"""Of one that has an agent."""

_ARRAYS = 4
_COLLECT_EVERY = 4


@dataclass(frozen=True)
class Job:
    """What a trainer is to do."""

    config: dict[str, Any]
    """Of its store, whose slower tier is called ``disk``."""
    point: Point
    seed: int
    steps: int
    """After so many steps it ends by itself, if it was not killed before."""

    def to_json(self) -> str:
        return json.dumps(asdict(self))


def state(step: int) -> dict[str, Any]:
    """What the trainer has after a step: each array changes every fourth step."""
    changed = [step - (step - i) % _ARRAYS for i in range(_ARRAYS)]
    arrays = {f"w{i}": (np.arange(8000) * (2 * at + 1) % 251).astype(np.uint8) for i, at in enumerate(changed)}
    return arrays | {"frozen": np.arange(3000, dtype=np.int32), "step": step}


class _Fatal(Forward):
    """Ends the process at a call, or when it is done."""

    def __init__(self, inner: BlobStore, verb: str, call: int, *, after: bool) -> None:
        super().__init__(inner)
        self._verb, self._left, self._after = verb, call, after

    async def around(self, operation: Operation, call: Callable[[], Awaitable[T]]) -> T:
        self._left -= operation.verb == self._verb
        strikes = operation.verb == self._verb and self._left == 0
        if strikes and not self._after:
            os.kill(os.getpid(), signal.SIGKILL)
        result = await call()
        if strikes:
            os.kill(os.getpid(), signal.SIGKILL)
        return result


def _say(line: str) -> None:
    os.write(sys.stdout.fileno(), f"{line}\n".encode())  # at once and in one piece


def _hear(event: Event) -> None:
    if isinstance(event, StepPromoted):
        _say(f"promoted {event.step}")


def _train(job: Job) -> None:
    chance = random.Random(job.seed)
    disks: list[Faulty] = []

    async def opened(tier: TierConfig, made: Opening) -> BlobStore:
        disk = Faulty(await made())
        disks.append(disk)
        verb = {"between writes": "put", "in a collection": "delete"}.get(job.point)
        if verb is None:
            return disk
        return _Fatal(disk, verb, chance.randrange(3, 12), after=chance.random() < 0.5)

    # Or a tier that was full once is left alone for too long.
    limits.in_force = replace(limits.in_force, first_retry=0.01, last_retry=0.05)
    with played(), tiers_opened_by(opened):
        _live(job, chance, disks)


def _live(job: Job, chance: random.Random, disks: list[Faulty]) -> None:
    opening = CheckpointStore.open(job.config)
    opening.subscribe(_hear)
    with opening.sync() as store:
        found = store.restore()
        first = found.step if found is not None else 0
        if found is not None and not is_state(found.tree, first):
            _say(f"wrong {first} is not what was saved")
        _say(f"restored {first}")
        for step in range(first + 1, first + 1 + job.steps):
            if job.point == "on a full disk":
                disks[-1].full_after(chance.choice([0, 5000, 20000, None]))
            _say(f"saving {step}")
            if not store.save(step, state(step)).skipped:
                _say(f"saved {step}")
            if step % _COLLECT_EVERY == 0 and job.point != "on a full disk":
                for tidy in (store.flush, store.collect):
                    with suppress(NoSpace):  # told, and no loss: no room for what is due, or for a lease
                        tidy()


def is_state(found: Any, step: int) -> bool:
    """Whether a tree is what the trainer had after that step, bit for bit."""
    expected = state(step)
    return found.keys() == expected.keys() and all(np.array_equal(found[key], expected[key]) for key in expected)


def main() -> None:
    """Run the jobs of the input, one after the other, until it ends."""
    faulthandler.enable()
    logging.getLogger("tieredckpt").setLevel(logging.CRITICAL)
    for line in sys.stdin:
        process = os.fork()
        if not process:
            status = 1
            try:
                _say(f"pid {os.getpid()}")
                _train(Job(**json.loads(line)))
                status = 0
            finally:
                sys.stderr.flush()
                if status:
                    sys.excepthook(*sys.exc_info())
                os._exit(status)
        _, status = os.waitpid(process, 0)
        _say(f"ended {os.waitstatus_to_exitcode(status)}")


if __name__ == "__main__":
    main()
