"""Kills a training with SIGKILL and starts it again: it resumes from RAM, since shared memory outlives a process.

Without arguments this starts itself twice as the trainer; ``train`` is the trainer, and ``train 12`` one whose step
after the twelfth is so long that the kill comes meanwhile.
"""

from __future__ import annotations

import subprocess
import sys

import numpy as np

from tieredckpt import CheckpointStore

STEPS, KILLED_AT = 20, 12


def train(long_after: int | None = None) -> None:
    """Train to the end, and save every step; the one after ``long_after`` takes until the input ends."""
    state = {"weights": np.zeros(500_000), "momentum": np.zeros(500_000)}
    with CheckpointStore.open("resume-checkpoints").sync() as store:
        restored = store.restore(into=state)
        if restored:
            print(f"restored step {restored.step} from {', '.join(restored.sources)}", flush=True)
        for step in range(restored.step + 1 if restored else 1, STEPS + 1):
            state["momentum"] = 0.9 * state["momentum"] + (1 - state["weights"])
            state["weights"] += 0.01 * state["momentum"]
            store.save(step, state)
            print(f"saved step {step}", flush=True)
            if step == long_after:
                sys.stdin.read()
        print(f"finished at step {STEPS}, mean weight {state['weights'].mean():.6f}", flush=True)


def run(kill_at: int | None = None) -> None:
    """Run the trainer in a process of its own, and kill it as soon as it has saved the step ``kill_at``."""
    command = [sys.executable, __file__, "train", *([str(kill_at)] if kill_at else [])]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as trainer:
        for line in trainer.stdout or ():
            print(f"  {line}", end="")
            if line == f"saved step {kill_at}\n":
                trainer.kill()
                print("  killed")
                break


if __name__ == "__main__":
    if sys.argv[1:2] == ["train"]:
        train(*map(int, sys.argv[2:]))
    else:
        run(kill_at=KILLED_AT)
        run()
