"""A JAX training of several processes, with arrays spread over the devices of all processes.

    python ranks_jax.py ADDRESS:PORT PROCESSES THIS_PROCESS [STORE]

Start it once for each process, with the address of the first one. On a cluster that JAX knows (Slurm, Open MPI,
Cloud TPU), `jax.distributed.initialize()` finds all three by itself.
"""

from __future__ import annotations

import sys
from typing import Any

from tieredckpt import CheckpointStore

SHAPE = (1024, 32)
STEPS_PER_RUN = 5


def main() -> None:
    """Train some steps more than the last run did."""
    try:
        import jax
        import jax.numpy as jnp
    except ImportError:
        print("JAX is not installed: pip install jax")
        return
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    address, processes, mine = sys.argv[1:4]
    jax.distributed.initialize(address, int(processes), int(mine))
    mesh = Mesh(jax.devices(), ("rows",))
    by_rows, everywhere = NamedSharding(mesh, PartitionSpec("rows")), NamedSharding(mesh, PartitionSpec())

    def spread(value: Any, sharding: NamedSharding) -> Any:
        return jax.make_array_from_callback(value.shape, sharding, lambda box: value[box])

    state = {
        "weights": spread(jnp.zeros(SHAPE), by_rows),
        "scale": spread(jnp.ones(SHAPE[1]), everywhere),
    }
    with CheckpointStore.open(sys.argv[4] if len(sys.argv) > 4 else "jax-ranks-checkpoints").sync() as store:
        restored = store.restore(like=state)  # in the sharding that `state` has now
        began = 0
        if restored:
            state, began = restored.tree, restored.step
        for step in range(began + 1, began + 1 + STEPS_PER_RUN):
            state = jax.tree.map(lambda array: array + 1, state)
            store.save(step, state)
        store.flush()
        weight = float(state["weights"].addressable_shards[0].data[0, 0])
        if jax.process_index() == 0:
            print(f"{processes} processes trained steps {began + 1} to {step}, and a weight is {weight:.0f}")
    jax.distributed.shutdown()


if __name__ == "__main__":
    main()
