"""What every rank does in `test_lost_node`: two nodes with RAM of their own, and a step that is on no other tier."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
from distributed.launch import SOON, Rank, rank_of_this_process

from tieredckpt import CheckpointStore, Shard
from tieredckpt.events import StepReplicated

ROWS, COLUMNS = 1024, 256
STEP = 3


def node_of(me: Rank) -> str:
    return "ab"[2 * me.rank // me.size]


def config_of(me: Rank) -> dict[str, Any]:
    """RAM of this rank's node, and a folder that all share and nothing is promoted to."""
    return {
        "store": {"name": "lost-node", "chunk_size": "64 KiB", "rank_deadline": SOON},
        "tiers": {
            "ram": {
                "kind": "ram",
                "path": Path(me.arguments["ram"], node_of(me), "ram"),
                "capacity": "8 MiB",
                "replicas": 2,
            },
            "disk": {"kind": "posix", "path": me.arguments["disk"], "promote": "never", "fsync": False},
        },
    }


def rows(me: Rank) -> tuple[int, int]:
    return ROWS * me.rank // me.size, ROWS * (me.rank + 1) // me.size


def whole(step: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    return np.random.default_rng(step).standard_normal((ROWS, COLUMNS)).astype(np.float32)


def save(me: Rank, store: Any) -> None:
    """Save some steps, and hang when the last one lies on both nodes."""
    first, last = rows(me)
    replicated = threading.Event()
    store.subscribe(
        lambda event: replicated.set() if isinstance(event, StepReplicated) and event.step == STEP else None
    )
    for step in range(1, STEP + 1):
        mine = whole(step)[first:last].copy()
        store.save(step, {"w": Shard(mine, shape=(ROWS, COLUMNS), offset=(first, 0)), "step": step})
    assert replicated.wait(SOON)
    me.mark("replicated")
    threading.Event().wait()


def restore(me: Rank, store: Any) -> None:
    """Tell where everything came from, and whether it is what was saved."""
    first, last = rows(me)
    mine = np.zeros((last - first, COLUMNS), np.float32)
    restored = store.restore(into={"w": Shard(mine, shape=(ROWS, COLUMNS), offset=(first, 0)), "step": 0})
    same = mine.tobytes() == whole(STEP)[first:last].tobytes()
    me.tell({"step": restored.step, "same": same, "sources": dict(restored.sources), "nbytes": mine.nbytes})


def main() -> None:
    """Do what the test asks for."""
    with rank_of_this_process() as me:
        os.environ["TIEREDCKPT_NODE"] = node_of(me)
        with CheckpointStore.open(config_of(me)).sync() as store:
            {"save": save, "restore": restore}[me.arguments["task"]](me, store)


if __name__ == "__main__":
    main()
