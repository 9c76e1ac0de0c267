"""NumPy's arrays as JAX's, in memory of their own."""

from __future__ import annotations

from typing import Any

from tieredckpt.bench.workloads import State

__all__ = ["jax_arrays"]


def jax_arrays(state: State) -> dict[str, Any]:
    """Copies that are complete: JAX copies behind, and would see what the training changes meanwhile."""
    import jax
    import jax.numpy as jnp

    found: dict[str, Any] = jax.block_until_ready({key: jnp.array(array) for key, array in state.items()})
    return found
