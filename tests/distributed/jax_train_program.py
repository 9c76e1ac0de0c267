"""What every process does in `test_jax_training`: a training on four devices of all processes, with donation."""

from __future__ import annotations

import hashlib
import threading
from typing import Any

import numpy as np
from distributed.launch import SOON, Rank, rank_of_this_process

from tieredckpt import CheckpointStore, SyncStore

LAST, DIES_AFTER, HANGS_AT = 12, 5, 8
"""Steps in all; after which one the processes may be killed; and the one after which they wait for it."""

ROWS, WIDTH = 512, 256


def config_of(me: Rank) -> dict[str, Any]:
    """RAM of this node, and a folder that all share."""
    return {
        "store": {"name": "jax-training", "chunk_size": "64 KiB", "rank_deadline": SOON},
        "tiers": {
            "ram": {"kind": "ram", "path": me.arguments["ram"], "capacity": "32 MiB", "on_close": "keep"},
            "disk": {"kind": "posix", "path": me.arguments["disk"], "fsync": False},
        },
    }


def train(me: Rank, store: SyncStore) -> None:
    """Train from what there is to the end, or until somebody kills this; tell the bits of every state."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    mesh = Mesh(jax.devices(), ("data",))
    assert mesh.size == 4
    by_rows, alike = NamedSharding(mesh, PartitionSpec("data")), NamedSharding(mesh, PartitionSpec())

    def initial() -> dict[str, Any]:
        first, second = jax.random.split(jax.random.key(0))
        params = {"in": jax.random.normal(first, (ROWS, WIDTH)) / 20, "out": jnp.zeros((WIDTH,), jnp.bfloat16)}
        zeros = jax.tree.map(jnp.zeros_like, params)
        return {"params": params, "momentum": zeros, "step": jnp.asarray(0), "rng": second}

    def placed(leaf: Any) -> Any:
        sharding = by_rows if leaf.ndim == 2 else alike
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding, weak_type=getattr(leaf, "weak_type", 0))

    abstract = jax.tree.map(placed, jax.eval_shape(initial))
    shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract)

    def step_of(state: dict[str, Any]) -> dict[str, Any]:
        rng, data = jax.random.split(state["rng"])
        inputs = jax.lax.with_sharding_constraint(jax.random.normal(data, (64, ROWS)), by_rows)

        def loss_of(params: Any) -> Any:
            found = jax.nn.tanh(inputs @ params["in"]) @ params["out"].astype(jnp.float32)
            return jnp.mean((found - jnp.sin(inputs).sum(axis=1)) ** 2)

        gradients = jax.grad(loss_of)(state["params"])
        momentum = jax.tree.map(lambda m, g: (0.9 * m + g).astype(m.dtype), state["momentum"], gradients)
        params = jax.tree.map(lambda p, m: (p - 1e-3 * m).astype(p.dtype), state["params"], momentum)
        return {"params": params, "momentum": momentum, "step": state["step"] + 1, "rng": rng}

    step_fn: Any = jax.jit(step_of, donate_argnums=0, out_shardings=shardings)
    # Saved as Python's int, and restored as an array that all processes have.
    restored = store.restore(like=abstract | {"epoch": jax.ShapeDtypeStruct((), np.int16, sharding=alike)})
    state = restored.tree if restored else jax.jit(initial, out_shardings=shardings)()
    began = restored.step if restored else 0
    assert restored is None or int(state.pop("epoch")) == began
    assert int(state["step"]) == began
    bits = {str(began): bits_of(state)}
    for step in range(began + 1, LAST + 1):
        state = step_fn(state)
        bits[str(step)] = bits_of(state)
        store.save(step, state | {"epoch": step}, capture=me.arguments["capture"])
        if me.arguments["dies"] and step == DIES_AFTER:
            me.mark("training")
        if me.arguments["dies"] and step == HANGS_AT:
            threading.Event().wait()
    store.flush()
    # Each process reads other rows than it saved, all of them, in another dtype.
    by_columns = NamedSharding(mesh, PartitionSpec(None, "data"))
    like = {"params": {"in": jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.bfloat16, sharding=by_columns)}}
    part = store.restore(keys=["params/in"], like=like, cast=True, resume=False)
    assert part is not None
    expected = jax.jit(lambda array: array.astype(jnp.bfloat16), out_shardings=by_columns)(state["params"]["in"])
    shards = zip(part.tree["params"]["in"].addressable_shards, expected.addressable_shards, strict=True)
    half = all(one.index == other.index and bytes_of(one.data) == bytes_of(other.data) for one, other in shards)
    me.tell({"began": began, "bits": bits, "where": store.where(), "half": half})


def bytes_of(array: Any) -> bytes:
    return np.asarray(array).tobytes()


def bits_of(state: Any) -> dict[str, str]:
    """The digests of all boxes that are here, by leaf and place, of the four devices' mesh."""
    import jax

    found = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        is_key = jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        for shard in leaf.addressable_shards:
            begins = [part.start or 0 for part in shard.index]
            data = jax.random.key_data(shard.data) if is_key else shard.data
            name = f"{jax.tree_util.keystr(path)} {begins} {leaf.dtype}"
            found[name] = hashlib.sha256(bytes_of(data)).hexdigest()
    return found


def main() -> None:
    """Train as the test asks for."""
    with rank_of_this_process() as me, CheckpointStore.open(config_of(me)).sync() as store:
        train(me, store)


if __name__ == "__main__":
    main()
