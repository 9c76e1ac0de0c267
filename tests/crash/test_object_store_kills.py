"""Trainers whose slower tier is an object store die by SIGKILL; what they were told is saved is there."""

from __future__ import annotations

from pathlib import Path

import pytest
from reliability.doomed import POINTS
from reliability.kills import kill_trainers
from support.object_stores import Place
from support.proxy import cut, internal_error, late, lose_reply, proxy, slow_down


def assert_nothing_lost(kills: int, memory: Path, place: Place, seed: int) -> None:
    """Requests pass through a proxy that breaks some of them in each way it knows."""
    with proxy(place.server) as between:
        between.fail_often(0.05, slow_down, internal_error, cut, lose_reply, late, seed=seed)
        found = kill_trainers(kills, memory, place.tier(between.url, retries=3), seed=seed)
    assert found.lost == []
    assert sum(found.kills.values()) == kills
    assert len(found.kills) == len(POINTS)
    assert found.promoted
    assert found.nodes
    assert place.bucket.sizes()
    assert not place.bucket.uploads()  # which are paid for and in no listing


def test_trainers_that_are_killed_lose_nothing_that_they_were_told_is_saved(
    shared_memory: Path, s3_place: Place
) -> None:
    assert_nothing_lost(10, shared_memory, s3_place, seed=4)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_trainers_that_are_killed_two_hundred_times_lose_nothing(shared_memory: Path, s3_place: Place) -> None:
    assert_nothing_lost(200, shared_memory, s3_place, seed=1)
