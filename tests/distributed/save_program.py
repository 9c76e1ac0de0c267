"""What every rank does in `test_save_and_restore`: saves, dies in the middle of one, goes on, and restores."""

from __future__ import annotations

import asyncio
import threading
import time
from dataclasses import replace
from typing import Any

import numpy as np
from distributed.launch import SOON, Rank, rank_of_this_process

from tieredckpt import CheckpointStore, Shard, SyncStore
from tieredckpt.engine import limits
from tieredckpt.engine.tier import commit_file
from tieredckpt.events import CommitFailed, StepCommitted

ROWS, COLUMNS = 24 * 1024, 16


def config_of(me: Rank) -> dict[str, Any]:
    """RAM of this node, and a folder that all share."""
    return {
        "store": {
            "name": "save-and-restore",
            "chunk_size": "64 KiB",
            "rank_deadline": SOON,
            "replicated": ["common/**"],
        },
        "tiers": {
            "ram": {"kind": "ram", "path": me.arguments["ram"], "capacity": "16 MiB", "on_close": "keep"},
            "disk": {"kind": "posix", "path": me.arguments["disk"], "fsync": False},
        },
    }


def whole(step: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    return np.random.default_rng(step).standard_normal((ROWS, COLUMNS)).astype(np.float32)


def common(step: int) -> np.ndarray[Any, np.dtype[np.float64]]:
    return np.random.default_rng(100 + step).standard_normal(50_000)


def rows(me: Rank) -> tuple[int, int]:
    return ROWS * me.rank // me.size, ROWS * (me.rank + 1) // me.size


def state(me: Rank, step: int) -> dict[str, Any]:
    """Rows of an array, what all ranks have alike, and what this one alone has."""
    first, last = rows(me)
    return {
        "w": Shard(whole(step)[first:last].copy(), shape=(ROWS, COLUMNS), offset=(first, 0)),
        "common": {"bias": common(step)},
        "own": {str(me.rank): np.full(3, me.rank)},
        "step": step,
    }


def check(me: Rank, store: SyncStore, step: int) -> dict[str, Any]:
    """Restore this rank's part, and tell whether it is what was saved."""
    first, last = rows(me)
    mine, shared = np.zeros((last - first, COLUMNS), np.float32), np.zeros(50_000)
    into = {"w": Shard(mine, shape=(ROWS, COLUMNS), offset=(first, 0)), "common": {"bias": shared}}
    restored = store.restore(into=into)
    assert restored is not None
    same = mine.tobytes() == whole(step)[first:last].tobytes() and shared.tobytes() == common(step).tobytes()
    return {"step": restored.step, "same": same, "sources": dict(restored.sources)}


def die(me: Rank, store: SyncStore) -> None:
    """Save one step for good; of the next, the victim has copied its part, and never commits it."""
    failed: list[CommitFailed] = []
    heard, agreed = threading.Event(), threading.Event()

    def hear(event: object) -> None:
        if isinstance(event, CommitFailed):
            failed.append(event)
            heard.set()
        elif isinstance(event, StepCommitted):
            agreed.set()

    store.subscribe(hear)
    store.save(1, state(me, 1)).reached("disk")
    assert agreed.is_set()
    ranked = store._life.engine.mode.ranked
    assert ranked is not None
    ranked.group.deadline = me.arguments["deadline"]  # from here on: they have met, and go on at the same time
    if me.rank == me.arguments["victim"]:

        async def hang(*_: object, **__: object) -> None:
            me.mark("saving")
            await asyncio.Event().wait()

        commit_file.commit = hang
    store.save(2, state(me, 2))
    me.mark("saved")
    assert heard.wait(SOON)
    me.tell({"ranks": failed[0].ranks, "reason": failed[0].reason})
    me.mark("heard")


def suspend(me: Rank, store: SyncStore) -> None:
    """Save a step for good; in the next one, all wait for the last rank while the whole job is stopped."""
    store.save(1, state(me, 1)).reached("disk")
    ranked = store._life.engine.mode.ranked
    assert ranked is not None
    ranked.group.deadline = me.arguments["deadline"]
    limits.in_force = replace(limits.in_force, longest_pause=1.0)
    if me.rank == me.size - 1:
        me.mark("waited for")
        before = time.monotonic()
        while (now := time.monotonic()) - before < 1:
            before = now
            time.sleep(0.01)
        time.sleep(1)  # the others' deadlines would have passed by now
    saved = store.save(2, state(me, 2))
    me.mark("saved")
    saved.reached("ram")
    saved.reached("disk")
    me.tell(store.where(2))


def go_on(me: Rank, store: SyncStore) -> None:
    """Restore what there is, and save the step that was lost, and one more."""
    found = check(me, store, 1)
    store.save(2, state(me, 2)).reached("disk")
    last = store.save(3, state(me, 3))
    last.reached("ram")
    store.flush()
    me.tell(found | {"where": store.where(3), "written": last.saved.new_bytes if last.saved else 0})


def restore(me: Rank, store: SyncStore) -> None:
    """Restore what another number of ranks saved."""
    me.tell(check(me, store, 3))


def main() -> None:
    """Do what the test asks for."""
    with rank_of_this_process() as me, CheckpointStore.open(config_of(me)).sync() as store:
        {"die": die, "suspend": suspend, "go_on": go_on, "restore": restore}[me.arguments["task"]](me, store)


if __name__ == "__main__":
    main()
