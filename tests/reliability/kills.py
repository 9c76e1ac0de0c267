"""Kills trainers, over and over, and holds each that follows to what the ones before it were told.

``python -m reliability kills --kills 300`` does it at length and prints a summary.

A trainer dies by SIGKILL at any time, around a write of the promoter, around a deletion of a collection, or while
its disk is full. Every fifth trainer loses its memory too, as with its node. The next one must restore, bit for bit,
the newest step that was acknowledged where it outlived that, or one newer still. With ``by_agent``, an agent promotes
for the trainers, and is killed as well: alone, or with its trainer.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from reliability.doomed import AGENT_POINTS, POINTS, Job, Point, is_state
from tieredckpt.blobs.ram.folder import is_store_folder
from tieredckpt.engine.agent.process import LOCK, lives
from tieredckpt.errors import TieredCkptError
from tieredckpt.store import CheckpointStore

__all__ = ["Killed", "Story", "kill_trainers"]

_TESTS = Path(__file__).parents[1]
_STEPS = 60
_HUNG = 60.0
"""Seconds after which a trainer that neither ended nor was killed counts as hanging."""
_LONGEST = 0.15
"""Seconds of training after which one is killed at the latest."""
_MOMENT = 0.01
_NODES = 5
"""Every so many trainers, the memory is lost too."""


@dataclass
class Killed:
    """What the kills came to."""

    kills: Counter[str] = field(default_factory=Counter)
    """How many by where they struck."""
    nodes: int = 0
    """How often the memory went with the process."""
    restarts: int = 0
    acknowledged: int = 0
    """Saves that returned."""
    promoted: int = 0
    unacknowledged: int = 0
    """Saves that were under way at a kill and are lost: they were never acknowledged."""
    lost: list[str] = field(default_factory=list)
    """What was acknowledged and did not come back."""
    seconds: float = 0.0


class _Trainers:
    """The process that forks trainers."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def start(self, job: Job) -> int:
        """The number of a new trainer's process."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{job.to_json()}\n")
        self._process.stdin.flush()
        word, number = self.next_line()
        assert word == "pid", word
        return int(number)

    def next_line(self) -> tuple[str, str]:
        assert self._process.stdout is not None
        word, _, rest = self._process.stdout.readline().rstrip("\n").partition(" ")
        if not word:
            raise AssertionError("the process that forks trainers has ended")
        return word, rest


@contextlib.contextmanager
def _trainers() -> Iterator[_Trainers]:
    with subprocess.Popen(
        [sys.executable, "-W", "ignore", "-m", "reliability.doomed"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"OPENBLAS_NUM_THREADS": "1", "PYTHONPATH": str(_TESTS)},  # what is forked has one thread
    ) as process:
        try:
            yield _Trainers(process)
        finally:
            assert process.stdin is not None
            process.stdin.close()


class Story:
    """What the trainers of one store were told, one after the other."""

    def __init__(self, found: Killed) -> None:
        self._found = found
        self.saved = self.promoted = 0
        """The newest step that was acknowledged at all, and the newest on the disk."""
        self._saving = 0

    def hear(self, word: str, rest: str) -> None:
        match word:
            case "restored":
                self._restored(int(rest))
            case "saving":
                self._saving = int(rest)
            case "saved":
                self.saved = int(rest)
                self._found.acknowledged += 1
            case "promoted":
                self.promoted = max(self.promoted, int(rest))
                self._found.promoted += 1
            case "wrong":
                self._found.lost.append(rest)

    def memory_is_lost(self) -> None:
        """From now on, only what is on the disk is owed."""
        self.saved = self.promoted

    def _restored(self, step: int) -> None:
        if step < self.saved:
            self._found.lost.append(f"step {self.saved} was acknowledged, and {step} was restored")
        self._found.unacknowledged += self._saving > step
        self.saved = self._saving = step
        self.promoted = min(self.promoted, step)


def kill_trainers(
    kills: int,
    memory: Path,
    disk: Path | Mapping[str, Any],
    *,
    seed: int = 0,
    points: Sequence[Point] | None = None,
    by_agent: bool = False,
) -> Killed:
    """Kill so many trainers of one store, or their agents.

    Args:
        kills: how many.
        memory: a folder for the RAM tier.
        disk: the folder of the slower tier, which may be on a file system that is too small, or the table of a tier
            to which requests take long.
        seed: of where and when they die.
        points: where they may die; None for wherever such trainers do.
        by_agent: an agent promotes for them.
    """
    points = points or (AGENT_POINTS if by_agent else POINTS)
    begin = time.monotonic()
    chance = random.Random(seed)
    found = Killed()
    story = Story(found)
    config = _config(memory, disk)
    config["store"]["promote_in"] = "agent" if by_agent else "trainer"
    with _trainers() as trainers, contextlib.ExitStack() as until_done:
        until_done.callback(_kill_agent, memory / "ram")
        while sum(found.kills.values()) < kills:
            point = points[found.restarts % len(points)]
            job = Job(config, point, chance.randrange(1 << 30), _STEPS)
            code, struck = _one(trainers, job, story, chance)
            found.restarts += 1
            if code == -signal.SIGKILL or (struck and not code):
                found.kills[point] += 1
            elif code:
                found.lost.append(f"a trainer ended with {code}")
                break
            if found.restarts % _NODES == 0:
                _kill_agent(memory / "ram")
                shutil.rmtree(memory / "ram", ignore_errors=True)
                found.nodes += 1
                story.memory_is_lost()
        _look(config, story, found)
    found.seconds = time.monotonic() - begin
    return found


def _config(memory: Path, disk: Path | Mapping[str, Any]) -> dict[str, Any]:
    nearest = {"kind": "ram", "path": str(memory / "ram"), "capacity": "192 KiB", "on_close": "keep"}
    # What nobody refers to is collected all the time.
    slower: Mapping[str, Any] = {"kind": "posix", "path": str(disk), "direct": False}
    often = {"lease_ttl": 0.05, "grace": 0.1}
    if isinstance(disk, Mapping):
        slower, often = disk, {"lease_ttl": 0.5, "grace": 1.0}
    return {
        "store": {"chunk_size": 4096, "when_full": "replace", **often},
        "tiers": {"ram": nearest, "disk": {"retries": 0, "retain": {"kind": "last_n", "n": 2}, **slower}},
    }


def _one(trainers: _Trainers, job: Job, story: Story, chance: random.Random) -> tuple[int, bool]:
    """Run one trainer until it is killed: how it ended, and whether its agent was killed."""
    process = trainers.start(job)
    memory = Path(job.config["tiers"]["ram"]["path"])
    struck = threading.Event()

    def strike() -> None:
        if job.point in ("its agent", "both at once") and _kill_agent(memory):
            struck.set()
        if job.point != "its agent":
            _kill(process)

    by_itself = job.point in ("between writes", "in a collection")
    killer = threading.Timer(_HUNG if by_itself else chance.uniform(0, _LONGEST), strike)
    watchdog = threading.Timer(2 * _HUNG, _kill, [process])
    watchdog.start()
    word, rest = "", ""
    while word != "ended":
        word, rest = trainers.next_line()
        story.hear(word, rest)
        if word == "restored":
            killer.start()
    for timer in (killer, watchdog):
        timer.cancel()
    if killer.is_alive():
        killer.join()  # it is at work: what it kills must not be of the next one
    return int(rest), struck.is_set()


def _kill(process: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(process, signal.SIGKILL)


def _kill_agent(root: Path) -> bool:
    """Kill the agent of the one store whose RAM is in a root, if it has one; it is dead when this returns."""
    return any(_kill_agent_of(folder) for folder in root.glob("*") if is_store_folder(folder.name))


def _kill_agent_of(folder: Path) -> bool:
    if not lives(folder) or (process := _agent_of(folder)) is None:
        return False
    _kill(process)
    while lives(folder):
        time.sleep(_MOMENT)
        if _agent_of(folder) not in (None, process):  # one that had the lock, and had not said yet who it is
            return _kill_agent_of(folder)
    return True


def _agent_of(folder: Path) -> int | None:
    """Who last said that it is the agent of a RAM folder."""
    with contextlib.suppress(FileNotFoundError):
        found = re.match(r"process (\d+) on ", (folder / LOCK).read_text())
        return int(found[1]) if found is not None else None
    return None


def _look(config: dict[str, Any], story: Story, found: Killed) -> None:
    """Open the store once more, and read everything that it has."""
    with CheckpointStore.open(config).sync() as store:
        restored = store.restore()
        story.hear("restored", str(restored.step if restored is not None else 0))
        with contextlib.suppress(TieredCkptError):  # of a disk that is full
            store.flush()
        for info in store.steps():
            for verified in store.verify(info.step, serial=info.serial):
                if verified.problem and verified.tier in store.where(info.step):
                    found.lost.append(f"step {info.step} on {verified.tier}: {verified.problem}")
        if restored is not None and not is_state(restored.tree, restored.step):
            found.lost.append(f"step {restored.step} is not what was saved")
