"""What the ranks of a store do together."""

from __future__ import annotations

import gc

from reliability.ranks import World

from tieredckpt.engine.ranks.group import Group


async def test_work_that_was_started_when_the_group_closes_leaves_nothing_behind() -> None:
    (communicator,) = World(1).communicators()
    group = Group(communicator, deadline=5.0)
    begun = []

    async def work() -> None:
        begun.append(True)

    group.start(work(), "work that is never begun")
    await group.close()
    gc.collect()  # a coroutine that nobody has awaited would warn
    assert not begun
