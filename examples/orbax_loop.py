"""A JAX training with Orbax's manager over a store: one import changes. The state is donated. Run it twice."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax
import orbax.checkpoint as ocp

from tieredckpt.integrations.orbax import CheckpointManager  # instead of ocp.CheckpointManager


def main() -> None:
    """Train ten steps more than the last run did."""
    optimizer = optax.adamw(1e-2)
    params = {"w": jax.random.normal(jax.random.key(0), (32, 1))}
    state = {"params": params, "opt": optimizer.init(params), "key": jax.random.key(1)}

    def train(state: dict[str, optax.Params]) -> dict[str, optax.Params]:
        key, batch = jax.random.split(state["key"])
        inputs = jax.random.normal(batch, (64, 32))
        gradients = jax.grad(lambda params: jnp.mean((inputs @ params["w"] - inputs[:, :1]) ** 2))(state["params"])
        updates, opt = optimizer.update(gradients, state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt, "key": key}

    step_fn = jax.jit(train, donate_argnums=0)
    options = ocp.CheckpointManagerOptions(save_interval_steps=5, max_to_keep=3)
    with CheckpointManager("orbax-checkpoints", options=options) as manager:
        done = manager.latest_step() or 0
        if done:
            state = manager.restore(done, args=ocp.args.StandardRestore(state))
        for step in range(done + 1, done + 11):
            state = step_fn(state)
            manager.save(step, args=ocp.args.StandardSave(state))
    print(f"trained to step {step}")


if __name__ == "__main__":
    main()
