"""Kills the ranks of a training, over and over, and holds those that follow to what was acknowledged before.

``python -m reliability rank-kills --lives 60`` does it at length and prints a summary.

Each life of the training has one to four ranks on two nodes. They are killed at any time: all at once, or one dies or
hangs first; or they end in order. Between lives the memory of a node may be lost. The next ranks must all restore the
same save, bit for bit: the newest that was acknowledged where it outlived all that, or one that came after it.
"""

from __future__ import annotations

import contextlib
import json
import random
import shutil
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from distributed.launch import SOON, Job, launch

__all__ = ["RanksKilled", "Story", "kill_ranks"]

Save = tuple[int, int]
"""The life that made a save, and its step."""

_PROGRAM = Path(__file__).with_name("doomed_ranks.py")
_NODES = "ab"
_ENDS = ("all are killed", "all are killed", "one is killed first", "one hangs first", "in order")
_POLICIES: tuple[dict[str, Any], ...] = (
    {},
    {"promote": {"kind": "every_n_steps", "n": 3}},
    {"retain": {"kind": "last_n", "n": 2}},
)


@dataclass
class RanksKilled:
    """What the kills came to."""

    ends: Counter[str] = field(default_factory=Counter)
    """How many lives by how they ended."""
    nodes: int = 0
    """How often a node lost its memory."""
    sources: Counter[str] = field(default_factory=Counter)
    """How many ranks restored from where."""
    acknowledged: Counter[str] = field(default_factory=Counter)
    """Acknowledgements by tier; ``replicas`` are copies in the RAM of the other node."""
    lost: list[str] = field(default_factory=list)
    """What was acknowledged and did not come back, and what else was wrong."""
    seconds: float = 0.0


@dataclass(frozen=True)
class _Acknowledged:
    save: Save
    tier: str
    nodes: frozenset[str]
    """Those of the ranks that have parts of it."""


class Story:
    """What the ranks of one store were told, one life after the other."""

    def __init__(self) -> None:
        self._origins: dict[int, Save | None] = {}
        """The save from which each life went on."""
        self._acknowledged: list[_Acknowledged] = []
        self._losses: list[tuple[int, str]] = []
        """Nodes that lost their memory, and after how many acknowledgements."""

    def lose(self, node: str) -> None:
        """The memory of a node is lost."""
        self._losses.append((len(self._acknowledged), node))

    def acknowledge(self, save: Save, tier: str, nodes: Sequence[str]) -> None:
        """Ranks on these nodes were told that a save is there."""
        self._acknowledged.append(_Acknowledged(save, tier, frozenset(nodes)))

    def go_on(self, life: int, origin: Save | None, nodes: Sequence[str]) -> str:
        """Ranks on these nodes go on from a save; returns what is lost by that, or nothing."""
        self._origins[life] = origin
        owed = {each.save for number, each in enumerate(self._acknowledged) if self._is_there(number, each, nodes)}
        # What a process saves that works alone, and sees only its node, is of another line than what it misses.
        newest = {save for save in owed if not any(self._leads_to(save, other) for other in owed - {save})}
        if newest and not any(origin is not None and self._leads_to(save, origin) for save in newest):
            return f"life {life} went on from {origin} (life, step), and {sorted(newest)} were acknowledged"
        return ""

    def _is_there(self, number: int, what: _Acknowledged, nodes: Sequence[str]) -> bool:
        """Whether ranks on these nodes must find it."""
        lost = {node for when, node in self._losses if when > number} & what.nodes
        seen = what.nodes - lost <= set(nodes)
        match what.tier:
            case "disk":
                return True
            case "replicas":  # each part lies on both nodes
                return seen and len(nodes) > 1 and len(lost) < len(what.nodes)
            case _:
                return seen and not lost

    def _leads_to(self, earlier: Save, later: Save) -> bool:
        """Whether a training that has ``later`` went through ``earlier``."""
        at: Save | None = later
        while at is not None and at[0] != earlier[0]:
            at = self._origins[at[0]]
        return at is not None and earlier[1] <= at[1]


def kill_ranks(
    lives: int, memory: Path, folder: Path, *, engine: Literal["none", "torch"] = "none", seed: int = 0
) -> RanksKilled:
    """Start the ranks of a training so many times, and kill them.

    Args:
        lives: how many.
        memory: a folder for the RAM tiers.
        folder: an empty one for everything else.
        engine: what the ranks communicate by; see `launch`. Copies in the RAM of other nodes need torch.
        seed: of where and when they die.
    """
    begin, chance, found, story = time.monotonic(), random.Random(seed), RanksKilled(), Story()
    for life in range(lives):
        ranks = chance.randint(1, 4)
        nodes = [chance.choice(_NODES)] if ranks == 1 else [_NODES[2 * rank // ranks] for rank in range(ranks)]
        end = chance.choice(_ENDS)
        arguments = {
            "life": life,
            "nodes": nodes,
            "journal": str(folder / f"journal-{life}"),
            "memory": str(memory),
            "disk": str(folder / "disk"),
            "replicas": engine == "torch" and ranks > 1 and chance.random() < 0.5,
            "deadline": SOON if end == "in order" else chance.choice([1, 10]),
            "policies": chance.choice(_POLICIES),
            "steps": chance.choice([3, 20]) if end == "in order" else 200,
        }
        with launch(engine, _PROGRAM, ranks=ranks, folder=folder / f"life-{life}", arguments=arguments) as job:
            found.lost += _end(job, end, ranks, chance)
        found.ends[end] += 1
        found.lost += _judge(life, arguments, story, found)
        if chance.random() < 0.25:
            node = chance.choice(_NODES)
            shutil.rmtree(memory / node, ignore_errors=True)
            story.lose(node)
            found.nodes += 1
        if found.lost:
            break
        shutil.rmtree(folder / f"life-{life}")
    found.seconds = time.monotonic() - begin
    return found


def _end(job: Job, end: str, ranks: int, chance: random.Random) -> Iterator[str]:
    """Kill, stop or wait for ranks as ``end`` says; yields what was wrong. `launch` kills those that are left."""
    if end == "in order":
        if job.wait():
            yield f"ranks that nobody killed failed:\n{job.output[-3000:]}"
        return
    if chance.random() < 0.8:
        job.wait_for("restored", rank=0)
    time.sleep(chance.uniform(0, chance.choice([0.1, 0.5, 1.5])))
    first = chance.randrange(ranks)
    if end == "one is killed first":
        job.kill(first)
    elif end == "one hangs first":
        with contextlib.suppress(ProcessLookupError):  # it has all its steps
            job.stop(first)
    if end != "all are killed":
        time.sleep(chance.uniform(0, 2))
    if end == "one hangs first" and chance.random() < 0.5:
        with contextlib.suppress(ProcessLookupError):
            job.go_on(first)
        time.sleep(chance.uniform(0, 1))


def _judge(life: int, arguments: dict[str, Any], story: Story, found: RanksKilled) -> Iterator[str]:
    """Add what the ranks of a life noted to the story; what was wrong."""
    journal, nodes = Path(arguments["journal"]), arguments["nodes"]
    lines = [json.loads(line) for line in journal.read_text().splitlines()] if journal.exists() else []
    restored = [line for line in lines if line["what"] == "restored"]
    if len({str(line["origin"]) for line in restored}) > 1 or not all(line["right"] for line in restored):
        yield f"not all ranks restored what was saved: {restored}"
    if restored:
        origin = restored[0]["origin"]
        if lost := story.go_on(life, tuple(origin) if origin else None, nodes):
            yield lost
    for line in restored:
        found.sources.update(line["sources"])
    for line in lines:
        if line["what"] == "acknowledged":
            story.acknowledge((life, line["step"]), line["tier"], nodes)
            found.acknowledged[line["tier"]] += 1
