"""Ranks die by SIGKILL, hang, and lose nodes; what they were told is saved is there for those that follow."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest
from distributed.launch import SOON, need
from reliability.rank_kills import Story, kill_ranks

A, B, BOTH = ["a"], ["b"], ["a", "b"]


@pytest.mark.timeout(3 * SOON)
def test_ranks_that_are_killed_lose_nothing_that_they_were_told_is_saved(shared_memory: Path, tmp_path: Path) -> None:
    found = kill_ranks(6, shared_memory, tmp_path, seed=1)
    assert found.lost == []
    assert found.acknowledged["ram"]
    assert found.acknowledged["disk"]
    assert found.sources


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("engine", ["none", "torch"])
def test_ranks_that_are_killed_sixty_times_lose_nothing(
    engine: Literal["none", "torch"], shared_memory: Path, tmp_path: Path
) -> None:
    need(engine)
    found = kill_ranks(60, shared_memory, tmp_path, engine=engine, seed=2)
    assert found.lost == []
    assert found.nodes
    assert {"ram", "disk"} <= found.sources.keys()
    assert engine == "none" or found.acknowledged["replicas"]


def test_an_older_save_than_was_acknowledged_is_a_loss() -> None:
    story = Story()
    assert not story.go_on(0, None, BOTH)
    story.acknowledge((0, 4), "ram", BOTH)
    assert not story.go_on(1, (0, 4), BOTH)
    story.acknowledge((1, 6), "disk", BOTH)
    assert story.go_on(2, (1, 5), BOTH)
    assert story.go_on(2, None, BOTH)
    assert not story.go_on(2, (1, 7), BOTH)


def test_what_is_owed_is_what_outlived_the_loss_of_nodes() -> None:
    story = Story()
    story.go_on(0, None, BOTH)
    story.acknowledge((0, 1), "disk", BOTH)
    story.acknowledge((0, 2), "replicas", BOTH)
    story.acknowledge((0, 3), "ram", BOTH)
    assert not story.go_on(1, (0, 1), A), "one process on one node has not all parts"
    story.lose("b")
    assert not story.go_on(1, (0, 2), BOTH)
    assert story.go_on(1, (0, 1), BOTH)
    story.lose("a")
    assert not story.go_on(1, (0, 1), BOTH)
    assert story.go_on(1, None, B)
