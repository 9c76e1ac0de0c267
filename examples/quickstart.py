"""Save into RAM and a folder, and go on from the newest step: run it twice."""

import numpy as np

from tieredckpt import CheckpointStore

state = {"weights": np.zeros(1_000_000), "step": 0}
with CheckpointStore.open("quickstart-checkpoints").sync() as store:
    restored = store.restore()
    state = restored.tree if restored else state
    for step in range(state["step"] + 1, state["step"] + 4):
        state = {"weights": state["weights"] + 0.5, "step": step}
        store.save(step, state)
    print(f"steps {[info.step for info in store.steps()]}, newest {state['step']}")
