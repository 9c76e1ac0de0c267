"""The figures of `docs/explanation/reliability.md`, from runs on this machine: what was tried, and what was lost."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

from reliability.decoders import DECODERS, fuzz
from reliability.journal import Failure
from reliability.kills import Killed, kill_trainers
from reliability.life import KINDS, live
from reliability.rank_kills import RanksKilled, kill_ranks
from reliability.ranks_life import NODES, live_together
from reliability.ranks_replay import Death, replay_ranks
from reliability.replay import replay
from reliability.soak import Soaked, soak
from reliability.sweep import ERRORS, fail_each_call
from tieredckpt.testing.faulty import KINDS as FAULTS

__all__ = [
    "BUDGETS",
    "Budget",
    "Crashes",
    "Figures",
    "crash",
    "fail_calls",
    "fault_rows",
    "fuzz_decoders",
    "kill",
    "measure",
    "run_soak",
    "soak_json",
    "soak_rows",
]

T = TypeVar("T")


@dataclass(frozen=True)
class Budget:
    """How much of everything is tried."""

    every: int
    """Of the crashes that differ, one in so many is survived."""
    every_of_ranks: int
    """The same for a life of several ranks, each of which is survived by three sets of ranks."""
    kills: int
    agent_kills: int
    """Of trainers and of the agents that promote for them."""
    seconds: float
    """Of the soak."""
    pace: float
    """Seconds from one save of the soak to the next."""
    times: int
    """Each call of the system fails at its first, its second, … and at this time."""
    inputs: int
    """For each decoder."""


BUDGETS: Mapping[str, Budget] = {
    "short": Budget(
        every=40, every_of_ranks=400, kills=10, agent_kills=3, seconds=20.0, pace=0.02, times=1, inputs=100
    ),
    "documented": Budget(
        every=1, every_of_ranks=20, kills=300, agent_kills=60, seconds=600.0, pace=0.05, times=15, inputs=3000
    ),
}
"""A look that takes a minute or two, and what the documentation records."""


@dataclass(frozen=True)
class Crashes:
    """Of one recorded life: how it was cut off, and what was survived."""

    life: str
    failure: str
    changes: int
    points: int
    states: int
    steps: int
    seconds: float


@dataclass
class Figures:
    """All of it."""

    crashes: list[Crashes] = field(default_factory=list)
    killed: list[Killed] = field(default_factory=list)
    """Trainers, and trainers and agents."""
    soaked: Soaked | None = None
    calls: Counter[str] = field(default_factory=Counter)
    """Calls of the system that failed, by name."""
    inputs: dict[str, int] = field(default_factory=dict)
    """By decoder."""
    losses: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def rows(self) -> list[tuple[str, object]]:
        """As a table of what there was, and how much."""
        rows: list[tuple[str, object]] = [
            ("crash points tried", _number(sum(each.points for each in self.crashes))),
            ("  states that they left, and that were survived", _number(sum(each.states for each in self.crashes))),
            ("  steps compared bit for bit after them", _number(sum(each.steps for each in self.crashes))),
        ]
        kills = self._kills()
        rows += [("kills survived", _number(kills.total()))]
        rows += [(f"  {point}", _number(number)) for point, number in sorted(kills.items())]
        if self.soaked is not None:
            rows += fault_rows(self.soaked)
        rows += [
            ("calls of the system that failed", _number(self.calls.total())),
            *((f"  {call}", _number(number)) for call, number in self.calls.most_common()),
            ("inputs fuzzed", f"{_number(sum(self.inputs.values()))} for {len(self.inputs)} decoders"),
        ]
        if self.soaked is not None:
            rows += soak_rows(self.soaked)
        return [*rows, ("losses", "; ".join(self.losses) or "none"), ("seconds", f"{self.seconds:.0f}")]

    def _kills(self) -> Counter[str]:
        """By the point at which they came."""
        return sum((each.kills for each in self.killed), Counter())

    def to_json(self) -> dict[str, Any]:
        """The same with every number by its name."""
        soaked = self.soaked or Soaked()
        faults: dict[str, dict[str, int]] = {}
        for (kind, verb), number in sorted(soaked.faults.items()):
            faults.setdefault(kind, {})[verb] = number
        return {
            "crash_points": sum(each.points for each in self.crashes),
            "crashes": [vars(each) for each in self.crashes],
            "kills": dict(sorted(self._kills().items())),
            "faults": faults,
            "system_calls": dict(sorted(self.calls.items())),
            "inputs_fuzzed": sum(self.inputs.values()),
            "decoders": self.inputs,
            "bytes_healed": soaked.healed,
            "soak": soak_json(soaked),
            "losses": self.losses,
            "seconds": self.seconds,
        }


def fault_rows(found: Soaked) -> list[tuple[str, object]]:
    """What was injected in a soak, by kind."""
    by_kind = [(f"  {kind}", _verbs(found.faults, kind)) for kind in FAULTS]
    return [("faults injected into blob stores", _number(found.faults.total())), *(row for row in by_kind if row[1])]


def soak_rows(found: Soaked) -> list[tuple[str, object]]:
    """What a soak came to, faults apart."""
    rows: list[tuple[str, object]] = [
        ("bytes healed", _number(found.healed)),
        ("  chunks written back, those that a tier only lied about included", _number(found.repaired)),
        ("  bits inverted where they lie", _number(found.damaged)),
        ("seconds under faults", f"{found.seconds:.0f}"),
        ("  saves", _number(found.saves)),
        ("  saves that found no room, and said so", _number(found.skipped)),
        ("  promotions", _number(found.promotions)),
        ("  restores compared bit for bit", _number(found.restores)),
        ("  copies of steps read whole", _number(found.compared)),
        ("  orders that failed, and said why", _number(found.refused)),
        ("  restarts", _number(found.reopened)),
    ]
    return rows + [
        (f"  {trend.gauge}, first and last part", f"{_number(trend.early)}, {_number(trend.late)}")
        for trend in found.trends
    ]


def soak_json(found: Soaked) -> dict[str, Any]:
    """The numbers of a soak by name, faults apart."""
    plain = {name: value for name, value in vars(found).items() if isinstance(value, int | float)}
    gauges = {each.gauge: {"early": each.early, "late": each.late, "most": each.most} for each in found.trends}
    return plain | {"gauges": gauges, "growing": found.growing}


def _number(value: float) -> str:
    return f"{value:,.0f}"


def _verbs(faults: Counter[Any], kind: str) -> str:
    """How many calls met a fault, and of which verbs."""
    by_verb = {verb: number for (other, verb), number in faults.items() if other == kind}
    total = sum(by_verb.values())
    parts = ", ".join(f"{verb} {_number(by_verb[verb])}" for verb in sorted(by_verb))
    return f"{_number(total)} ({parts})" if total else ""


# -- the runs ---------------------------------------------------------------------------------------------


@contextmanager
def memory() -> Iterator[Path]:
    """A folder in shared memory, where there is some; nothing that runs in the block says that a tier failed."""
    base = "/dev/shm" if os.path.isdir("/dev/shm") else None
    for name in ("tieredckpt", "stamina"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    folder = Path(tempfile.mkdtemp(prefix=f"tieredckpt-test-{os.getpid()}-", dir=base))
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


def crash(every: int, every_of_ranks: int) -> Iterator[tuple[str, Callable[[], Crashes]]]:
    """Every recorded life with every way to die, by name: what is to be run."""
    for kind in KINDS:
        for failure in get_args(Failure):
            yield f"{kind}: the {failure} dies", partial(_crash, kind, failure, every)
    for kind in KINDS:
        for death in get_args(Death):
            yield f"{len(NODES)} ranks, {kind}: {death} die", partial(_crash_ranks, kind, death, every_of_ranks)


def _crash(kind: str, failure: Failure, every: int) -> Crashes:
    begin = time.monotonic()
    with memory() as place:
        life = asyncio.run(live(kind, place / "life"))
        found = asyncio.run(replay(life, failure, place / "life", every=every))
    seconds = time.monotonic() - begin
    return Crashes(kind, failure, len(life.entries), found.crashes, found.states, found.steps, seconds)


def _crash_ranks(kind: str, death: Death, every: int) -> Crashes:
    begin = time.monotonic()
    with memory() as place:
        life = asyncio.run(live_together(kind, place / "life"))
        found = asyncio.run(replay_ranks(life, death, place / "life", every=every))
    seconds = time.monotonic() - begin
    name = f"{len(NODES)} ranks, {kind}"
    return Crashes(name, death, len(life.entries), found.crashes, found.states, found.steps, seconds)


def kill(kills: int, seed: int, disk: Path | None, *, by_agent: bool = False) -> Killed:
    """Kill so many trainers, or trainers and agents; their slower tier is in memory without a folder for it."""
    with memory() as place:
        return kill_trainers(kills, place, disk or place / "disk", seed=seed, by_agent=by_agent)


def kill_all_ranks(lives: int, seed: int, engine: Literal["none", "torch"]) -> RanksKilled:
    """Start the ranks of a training so many times, and kill them."""
    with memory() as place, tempfile.TemporaryDirectory(prefix="tieredckpt-ranks-") as folder:
        return kill_ranks(lives, place, Path(folder), engine=engine, seed=seed)


def run_soak(seconds: float, seed: int, pace: float, disk: Path | None) -> Soaked:
    """Run a store under faults; its slower tiers are in a new temporary folder without one for them."""
    with memory() as place, tempfile.TemporaryDirectory(prefix="tieredckpt-soak-", dir=disk) as folder:
        return asyncio.run(soak(seconds, place, Path(folder), seed=seed, every=pace))


def fail_calls(times: int) -> Counter[str]:
    """Make each system call fail, each time with every error."""
    with memory() as place:
        failures = [(nth, number) for nth in range(1, times + 1) for number in ERRORS]
        return asyncio.run(fail_each_call(place, failures))


def fuzz_decoders(inputs: int, seed: int) -> Iterator[tuple[str, Callable[[], int]]]:
    """Every decoder by name, and how to fuzz it."""
    for decoder in DECODERS:
        yield decoder.name, partial(fuzz, decoder, inputs, seed=seed)


def measure(budget: Budget, around: Callable[[str], Any], *, seed: int = 0) -> Figures:
    """Run everything, though a part of it fails; ``around`` makes a context for each part by its name."""
    found = Figures()
    begin = time.monotonic()

    def attempt(what: str, work: Callable[[], T]) -> T | None:
        try:
            with around(what):
                return work()
        except Exception as error:  # whatever a part raises, it is a loss, and the others are still of interest
            found.losses.append(": ".join([what, *getattr(error, "__notes__", []), repr(error)]))
            return None

    for what, run in crash(budget.every, budget.every_of_ranks):
        if (crashed := attempt(what, run)) is not None:
            found.crashes.append(crashed)
    for what, killing in (
        ("killing trainers", partial(kill, budget.kills, seed, None)),
        ("killing trainers and agents", partial(kill, budget.agent_kills, seed, None, by_agent=True)),
    ):
        if (killed := attempt(what, killing)) is not None:
            found.killed.append(killed)
    found.soaked = attempt("a soak", lambda: run_soak(budget.seconds, seed, budget.pace, None))
    found.calls = attempt("calls of the system fail", lambda: fail_calls(budget.times)) or Counter()
    for name, fuzzed in fuzz_decoders(budget.inputs, seed):
        found.inputs[name] = attempt(f"fuzzing {name}", fuzzed) or 0
    found.losses += [lost for killed in found.killed for lost in killed.lost]
    found.losses += found.soaked.lost if found.soaked else []
    found.losses += [f"growth: {line}" for line in (found.soaked.growing if found.soaked else [])]
    found.seconds = time.monotonic() - begin
    return found
