"""Trainers die by SIGKILL wherever it hurts; what they were told is saved is there for the next one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from reliability import kills
from reliability.doomed import AGENT_POINTS, POINTS
from reliability.kills import Killed, Story, kill_trainers
from support.file_systems import played

from tieredckpt.engine.agent.process import LOCK


def assert_nothing_lost(found: Killed, kills: int) -> None:
    assert found.lost == []
    assert sum(found.kills.values()) == kills
    assert found.acknowledged


def test_trainers_that_are_killed_lose_nothing_that_they_were_told_is_saved(shared_memory: Path) -> None:
    found = kill_trainers(8, shared_memory, shared_memory / "disk", seed=3)
    assert_nothing_lost(found, 8)
    assert len(found.kills) == len(POINTS)
    assert found.nodes


@pytest.mark.parametrize("kind", ["nfs", "lustre"])
def test_trainers_that_are_killed_lose_nothing_on_a_file_system_that_nodes_share(
    shared_memory: Path, kind: str
) -> None:
    tier = {"kind": kind, "path": str(shared_memory / "disk"), "direct": False}
    with played():
        found = kill_trainers(5, shared_memory, tier, seed=6)
    assert_nothing_lost(found, 5)
    assert found.promoted


def test_trainers_and_agents_that_are_killed_lose_nothing_that_they_were_told_is_saved(shared_memory: Path) -> None:
    found = kill_trainers(4, shared_memory, shared_memory / "disk", seed=5, by_agent=True)
    assert_nothing_lost(found, 4)
    assert len(found.kills) == len(AGENT_POINTS)
    assert found.promoted


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_trainers_and_agents_that_are_killed_a_hundred_times_lose_nothing(shared_memory: Path) -> None:
    found = kill_trainers(100, shared_memory, shared_memory / "disk", seed=2, by_agent=True)
    assert_nothing_lost(found, 100)
    assert len(found.kills) == len(AGENT_POINTS)
    assert found.nodes


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_trainers_that_are_killed_hundreds_of_times_lose_nothing(shared_memory: Path) -> None:
    found = kill_trainers(300, shared_memory, shared_memory / "disk", seed=1)
    assert_nothing_lost(found, 300)
    assert len(found.kills) == len(POINTS)
    assert found.nodes
    assert found.promoted


def test_on_a_file_system_that_is_too_small_killed_trainers_lose_nothing(
    shared_memory: Path, tiny_file_system: Path
) -> None:
    found = kill_trainers(4, shared_memory, tiny_file_system / "disk", seed=2, points=("any time",))
    assert_nothing_lost(found, 4)


def test_an_older_step_than_was_acknowledged_is_a_loss() -> None:
    found = Killed()
    story = Story(found)
    for word, rest in [("saving", "4"), ("saved", "4"), ("saving", "5"), ("restored", "3")]:
        story.hear(word, rest)
    assert found.lost == ["step 4 was acknowledged, and 3 was restored"]
    assert found.unacknowledged == 1


def test_after_the_loss_of_memory_only_what_was_promoted_is_owed() -> None:
    found = Killed()
    story = Story(found)
    for word, rest in [("saved", "4"), ("promoted", "3")]:
        story.hear(word, rest)
    story.memory_is_lost()
    story.hear("restored", "3")
    assert found.lost == []
    story.hear("restored", "2")
    assert found.lost != []


CLAIMING = """
import fcntl, os, sys
lock = os.open(sys.argv[1], os.O_RDWR)
fcntl.flock(lock, fcntl.LOCK_EX)
print("held", flush=True)
sys.stdin.readline()
os.ftruncate(lock, 0)
os.pwrite(lock, f"process {os.getpid()} on here".encode(), 0)
sys.stdin.read()
"""


def test_an_agent_that_has_not_said_yet_who_it_is_is_killed_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock, forerunner = tmp_path / LOCK, os.getpid()
    lock.write_text(f"process {forerunner} on here")
    command = [sys.executable, "-c", CLAIMING, str(lock)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as agent:
        assert agent.stdin is not None
        assert agent.stdout is not None
        assert agent.stdout.readline() == "held\n"
        killed: list[int] = []

        def kill(process: int) -> None:
            killed.append(process)
            if process == forerunner:  # which is what the lock says: so the agent is a moment too late
                print(file=agent.stdin, flush=True)
            else:
                agent.kill()

        monkeypatch.setattr(kills, "_kill", kill)
        assert kills._kill_agent_of(tmp_path)
    assert killed == [forerunner, agent.pid]
