"""RAM, CHFS, and a shared directory: a training loses CHFS, and restores from the other tiers.

Takes the servers in ``CHFS_SERVER``; without them, the look-alike over a directory stands in for CHFS, and loses
its servers half way.
"""

from __future__ import annotations

import logging
import os
import threading
from pathlib import Path

import numpy as np

from tieredckpt import CheckpointStore
from tieredckpt.events import Event, TierFailed, TierRecovered

LOOKALIKE = Path("pmem")
STEPS = 9


def settings() -> dict[str, object]:
    """The configuration; a TOML file has the same tables."""
    chfs: dict[str, object] = {"kind": "chfs", "retain": {"kind": "last_n", "n": 3}}
    if "CHFS_SERVER" not in os.environ:
        chfs |= {"server": f"directory:{LOOKALIKE}", "rpc_timeout": "1 s", "retries": 0}
    return {
        "tiers": {
            "ram": {"kind": "ram", "capacity": "64 MiB"},
            "pmem": chfs,
            "shared": {"kind": "posix", "path": "shared", "survives": "site"},
        },
    }


def lose_servers(lost: bool) -> None:
    """Kill or revive the look-alike's only server: its switches are replaced as a whole."""
    if "CHFS_SERVER" not in os.environ:
        new = LOOKALIKE / "switches.new"
        new.write_text("dead = 0\n" if lost else "")
        new.replace(LOOKALIKE / "switches")


def wait_for(told: threading.Event) -> None:
    """Wait until the store has noticed the change of the look-alike."""
    if "CHFS_SERVER" not in os.environ:
        told.wait(60)


def main() -> None:
    logging.basicConfig(level=logging.ERROR)  # the events report what the log would
    gone, back = threading.Event(), threading.Event()

    def told(event: Event) -> None:
        match event:
            case TierFailed(tier=tier):
                print(f"{tier} failed, training goes on")
                gone.set()
            case TierRecovered(tier=tier):
                print(f"{tier} is back")
                back.set()

    state = {"weights": np.zeros(1_000_000), "steps": 0}
    with CheckpointStore.open(settings()).sync() as store:
        store.subscribe(told)
        restored = store.restore(like=state)
        if restored:
            state = restored.tree
            print(f"restored step {restored.step} from {', '.join(restored.sources)}")
        first = restored.step + 1 if restored else 1
        for step in range(first, first + STEPS):
            state["weights"] += 0.01
            state["steps"] = step
            if step == first + 3:
                lose_servers(True)
            saved = store.save(step, state)
            if step == first + 5:
                saved.reached("shared")  # past CHFS
                wait_for(gone)
                lose_servers(False)
        wait_for(back)
        store.flush()
        print(f"step {step} is on {', '.join(store.where(step))}")


if __name__ == "__main__":
    main()
