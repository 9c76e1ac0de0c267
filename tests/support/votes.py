"""What tests of votes share: saves that one rank fails or holds up, and that a save of all ranks works."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from support.cohort import Cohort, assert_whole
from support.rank_insight import mode_of
from support.scenes import SOON
from tieredckpt import CheckpointStore
from tieredckpt.engine.ranks import ranked

SIZE = 3


@contextmanager
def before_copies(store: CheckpointStore, do: Callable[[], None], *, early: bool = False) -> Iterator[None]:
    """Make each save of one rank ``do`` this while it copies; with ``early``, before it copies."""
    state = store._life.engine.state
    ram = state.tiers[0].ram
    assert ram is not None
    target, name = (ranked, "split") if early else (ram.index, "allocate")
    go_on = getattr(target, name)

    def first(*arguments: Any, **more: Any) -> Any:
        if more.get("rank", state.membership.rank) == state.membership.rank:
            do()
        return go_on(*arguments, **more)

    with mock.patch.object(target, name, first):
        yield


@contextmanager
def failing(store: CheckpointStore, error: Exception, *, early: bool = False) -> Iterator[None]:
    """Make each save of one rank fail; see `before_copies`."""

    def fail() -> None:
        raise error

    with before_copies(store, fail, early=early):
        yield


@contextmanager
def held_up(store: CheckpointStore, *, early: bool = False) -> Iterator[tuple[threading.Event, threading.Event]]:
    """Hold up each save of one rank; see `before_copies`. Yields the events of the first that is, and of going on."""
    is_held, go_on = threading.Event(), threading.Event()

    def wait() -> None:
        is_held.set()
        assert go_on.wait(SOON)

    with before_copies(store, wait, early=early):
        yield is_held, go_on


def votes_kept(ranks: Cohort) -> set[str]:
    """The attempts on which rank 0 has votes."""
    return set(mode_of(ranks[0]).ranked.votes.coordinator._box._votes)


async def works(ranks: Cohort, step: int) -> None:
    """A save of all ranks is agreed on, committed and restored."""
    checkpoints = await ranks.save(step)
    await ranks.reached(checkpoints, "disk")
    assert [await store.where(step) for store in ranks.stores] == [("ram", "disk")] * ranks.size
    for restored in await ranks.restored():
        assert_whole(restored, step)
