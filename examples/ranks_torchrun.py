"""A PyTorch training of several processes: every rank has some rows of the weights, and all have the optimizer's step.

    torchrun --nproc-per-node 4 ranks_torchrun.py [STORE]

Run it again, with the same number of ranks or another one, and it goes on from the newest step.
"""

from __future__ import annotations

import sys
from typing import Any

from tieredckpt import CheckpointStore, Shard

ROWS, COLUMNS = 1000, 64
STEPS_PER_RUN = 10


def main() -> None:
    """Train some steps more than the last run did."""
    try:
        import torch
        import torch.distributed as dist
    except ImportError:
        print("PyTorch is not installed: pip install torch")
        return
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    first, last = ROWS * rank // size, ROWS * (rank + 1) // size
    rows = torch.zeros(last - first, COLUMNS)  # of the weights, those of this rank
    scale = torch.ones(COLUMNS)  # the same on every rank

    def state() -> dict[str, Any]:
        return {"weights": Shard(rows, shape=(ROWS, COLUMNS), offset=(first, 0)), "scale": scale, "step": step}

    step = 0
    source = sys.argv[1] if len(sys.argv) > 1 else "torchrun-ranks-checkpoints"
    with CheckpointStore.open(source).sync() as store:  # a call of all ranks, which meet here
        restored = store.restore(into=state())  # and so is this; it fills `rows` and `scale`
        if restored:
            step = restored.step
        began = step
        for step in range(began + 1, began + 1 + STEPS_PER_RUN):
            gradient = torch.full_like(rows, float(step))
            total = gradient.sum()
            dist.all_reduce(total)
            rows -= 0.001 * gradient
            scale *= 0.99
            store.save(step, state(), metrics={"loss": total.item()}, replicated=("scale",))
        store.flush()  # until the newest step is on the shared tier
        if rank == 0:
            print(f"{size} ranks trained steps {began + 1} to {step}, saved on {', '.join(store.where())}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
