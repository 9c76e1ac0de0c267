"""A JAX training: a pytree with Adam's moments and a PRNG key, captured by reference. Run it twice.

JAX arrays do not change, so `save(capture="reference")` returns at once, and the copy is made in the background. Arrays
that are donated to a jitted step (`donate_argnums`) must not be captured by reference: see jax_train.py.
"""

from __future__ import annotations

import sys
from typing import Any

from tieredckpt import CheckpointStore

STEPS_PER_RUN = 25


def main() -> None:
    """Train some steps more than the last run did."""
    try:
        import jax
        import jax.numpy as jnp
    except ImportError:
        print("JAX is not installed: pip install jax")
        return

    def initial() -> dict[str, Any]:
        first, second, rest = jax.random.split(jax.random.key(0), 3)
        params = {"w1": jax.random.normal(first, (32, 256)) / 6, "w2": jax.random.normal(second, (256, 1)) / 16}
        zeros = jax.tree.map(jnp.zeros_like, params)
        return {"params": params, "mean": zeros, "square": zeros, "count": jnp.int32(0), "key": rest}

    def loss_of(params: Any, inputs: Any) -> Any:
        outputs = jax.nn.relu(inputs @ params["w1"]) @ params["w2"]
        return jnp.mean((outputs - jnp.sum(inputs**2, axis=1, keepdims=True)) ** 2)

    @jax.jit
    def train(state: dict[str, Any]) -> tuple[dict[str, Any], Any]:
        key, batch = jax.random.split(state["key"])
        loss, gradients = jax.value_and_grad(loss_of)(state["params"], jax.random.normal(batch, (64, 32)))
        count = state["count"] + 1
        mean = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, state["mean"], gradients)
        square = jax.tree.map(lambda s, g: 0.999 * s + 0.001 * g * g, state["square"], gradients)
        params = jax.tree.map(
            lambda p, m, s: p - 1e-3 * (m / (1 - 0.9**count)) / (jnp.sqrt(s / (1 - 0.999**count)) + 1e-8),
            state["params"],
            mean,
            square,
        )
        return {"params": params, "mean": mean, "square": square, "count": count, "key": key}, loss

    with CheckpointStore.open(sys.argv[1] if len(sys.argv) > 1 else "jax-checkpoints").sync() as store:
        state, first = initial(), 1
        restored = store.restore(like=state)
        if restored:
            state, first = restored.tree, restored.step + 1
            print(f"restored step {restored.step}, loss {restored.metrics['loss']:.6f}")
        for step in range(first, first + STEPS_PER_RUN):
            state, loss = train(state)
            if store.due(step):
                store.save(step, state, metrics={"loss": float(loss)}, capture="reference")
        store.flush()
        print(f"trained to step {step}, saved {[info.step for info in store.steps()]}")


if __name__ == "__main__":
    main()
