"""A training of NumPy arrays over MPI: every rank has some columns of a field, divided again for each number of ranks.

    mpiexec -n 4 python ranks_mpi.py [STORE]

Run it again with another number of ranks, and each reads the columns that are its own now.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from tieredckpt import CheckpointStore, Shard

SHAPE = (128, 500)
STEPS_PER_RUN = 5


def main() -> None:
    """Go some steps further than the last run did."""
    try:
        from mpi4py import MPI  # initialises MPI, for use from several threads
    except ImportError:
        print("mpi4py is not installed: pip install mpi4py")
        return
    world = MPI.COMM_WORLD
    rank, size = world.Get_rank(), world.Get_size()
    first, last = SHAPE[1] * rank // size, SHAPE[1] * (rank + 1) // size
    columns = np.zeros((SHAPE[0], last - first))

    def state(step: int) -> dict[str, Any]:
        return {"field": Shard(columns, shape=SHAPE, offset=(0, first)), "time": 0.1 * step}

    with CheckpointStore.open(sys.argv[1] if len(sys.argv) > 1 else "mpi-ranks-checkpoints").sync() as store:
        restored = store.restore(into=state(0))
        began = restored.step if restored else 0
        for step in range(began + 1, began + 1 + STEPS_PER_RUN):
            columns += np.arange(first, last)
            store.save(step, state(step))
        store.flush()
        total = np.array([columns.sum()])
        world.Allreduce(MPI.IN_PLACE, total)  # not `allreduce`, which keeps the store's threads from running
        if rank == 0:
            print(f"{size} ranks went from step {began} to {step}, and the field sums up to {total[0]:.0f}")


if __name__ == "__main__":
    main()
