"""Trainings as users of Flax, Optax, Equinox and MaxText write them; what `test_jax_users` runs in processes.

``save FOLDER`` trains each from nothing, with donation, and saves it on the way; ``restore FOLDER`` brings it back
into abstract states on the mesh of this process, and ``go on FOLDER`` trains on. All print digests as JSON.
"""

from __future__ import annotations

import functools
import hashlib
import json
import sys
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from flax.training.train_state import TrainState
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tieredckpt import CheckpointStore

SAVED_AT, LAST = 2, 4
WIDTH = 32

State = Any


class User(NamedTuple):
    """How somebody trains."""

    initial: Callable[[], State]
    """Traceable, and so abstract under `jax.eval_shape`."""
    step: Callable[[State], State]
    capture: Literal["copy", "device", "pinned_host"] = "copy"


def batch(rng: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Inputs and what to learn of them."""
    inputs = jax.random.normal(rng, (16, WIDTH))
    return inputs, jnp.sum(jnp.sin(inputs), axis=1, keepdims=True)


# -- Flax linen -----------------------------------------------------------------------------------------------


class Mlp(nn.Module):
    @nn.compact
    def __call__(self, inputs: jax.Array, *, train: bool) -> jax.Array:
        hidden = nn.relu(nn.BatchNorm(use_running_average=not train)(nn.Dense(WIDTH)(inputs)))
        hidden = nn.Dropout(0.1, deterministic=not train)(hidden)
        return nn.Dense(1, param_dtype=jnp.bfloat16)(hidden)


class LinenState(TrainState):
    batch_stats: Any
    rng: jax.Array


def linen_initial() -> LinenState:
    model = Mlp()
    variables = model.init(jax.random.key(0), jnp.zeros((1, WIDTH)), train=False)
    transform = optax.adamw(optax.warmup_cosine_decay_schedule(0, 1e-3, 2, 10))
    # Its step is Python's 0 here, int32 in the abstract state, and weakly typed after the first update.
    return LinenState.create(
        apply_fn=model.apply,
        params=variables["params"],
        tx=transform,
        batch_stats=variables["batch_stats"],
        rng=jax.random.key(1),
    )


def linen_step(state: LinenState) -> LinenState:
    rng, data, dropout = jax.random.split(state.rng, 3)
    inputs, wanted = batch(data)

    def loss_of(params: Any) -> tuple[jax.Array, Any]:
        variables = {"params": params, "batch_stats": state.batch_stats}
        found, updates = state.apply_fn(
            variables, inputs, train=True, mutable=["batch_stats"], rngs={"dropout": dropout}
        )
        return jnp.mean((found - wanted) ** 2), updates["batch_stats"]

    gradients, statistics = jax.grad(loss_of, has_aux=True)(state.params)
    return state.apply_gradients(grads=gradients, batch_stats=statistics, rng=rng)


# -- Flax nnx -------------------------------------------------------------------------------------------------


class Net(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.layers = nnx.List([nnx.Linear(WIDTH, WIDTH, rngs=rngs) for _ in range(2)])
        self.norm = nnx.BatchNorm(WIDTH, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)
        self.out = nnx.Linear(WIDTH, 1, rngs=rngs)

    def __call__(self, inputs: jax.Array) -> jax.Array:
        for layer in self.layers:
            inputs = nnx.relu(layer(inputs))
        return self.out(self.dropout(self.norm(inputs)))


def nnx_modules() -> tuple[Net, nnx.Optimizer[Net]]:
    net = Net(nnx.Rngs(params=0, dropout=1, data=2))
    return net, nnx.Optimizer(net, optax.adam(1e-3), wrt=nnx.Param)


def nnx_initial() -> State:
    """What `nnx.split` gives besides the graph, which the program knows."""
    return {"modules": nnx.state(nnx_modules()), "rng": jax.random.key(3)}


def nnx_step(state: State) -> State:
    graph, _ = nnx.split(nnx.eval_shape(nnx_modules))
    net, optimizer = nnx.merge(graph, state["modules"])
    rng, data = jax.random.split(state["rng"])
    inputs, wanted = batch(data)
    gradients = nnx.grad(lambda net: jnp.mean((net(inputs) - wanted) ** 2))(net)
    optimizer.update(net, gradients)
    return {"modules": nnx.state((net, optimizer)), "rng": rng}


# -- Optax ----------------------------------------------------------------------------------------------------


def optax_transform() -> optax.GradientTransformation:
    adam = optax.inject_hyperparams(optax.adam)(learning_rate=optax.exponential_decay(1e-2, 2, 0.9), b1=0.9)
    parts = optax.multi_transform(
        {"matrix": optax.chain(optax.clip_by_global_norm(1.0), adam), "rest": optax.sgd(1e-2, momentum=0.9)},
        {"w": "matrix", "b": "rest", "frozen": "rest"},
    )
    masked = optax.masked(optax.add_decayed_weights(1e-4), {"w": True, "b": False, "frozen": False})
    every_second: optax.GradientTransformation = optax.MultiSteps(
        optax.chain(masked, parts, optax.ema(0.9)), every_k_schedule=2
    ).gradient_transformation()
    return every_second


def optax_initial() -> State:
    params = {"w": jax.random.normal(jax.random.key(0), (WIDTH, WIDTH)), "b": jnp.zeros(WIDTH), "frozen": jnp.ones(())}
    return {"params": params, "opt": optax_transform().init(params), "rng": jax.random.key(1, impl="rbg")}


def optax_step(state: State) -> State:
    rng, data = jax.random.split(state["rng"])
    inputs, wanted = batch(data)
    gradients = jax.grad(lambda p: jnp.mean((inputs @ p["w"] + p["b"] - wanted * p["frozen"]) ** 2))(state["params"])
    updates, opt = optax_transform().update(gradients, state["opt"], state["params"])
    return {"params": optax.apply_updates(state["params"], updates), "opt": opt, "rng": rng}


# -- Equinox --------------------------------------------------------------------------------------------------


def equinox_model() -> eqx.nn.MLP:
    return eqx.nn.MLP(WIDTH, 1, WIDTH, depth=2, activation=jax.nn.gelu, key=jax.random.key(0))


def equinox_initial() -> State:
    params = eqx.filter(equinox_model(), eqx.is_inexact_array)  # without the activation, which is a function
    return {"model": params, "opt": optax.lion(1e-3).init(params), "rng": jax.random.key(1)}


def equinox_step(state: State) -> State:
    _, static = eqx.partition(eqx.filter_eval_shape(equinox_model), lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct))
    rng, data = jax.random.split(state["rng"])
    inputs, wanted = batch(data)

    def loss_of(params: Any) -> jax.Array:
        model = eqx.combine(params, static)
        return jnp.mean((jax.vmap(model)(inputs) - wanted) ** 2)

    updates, opt = optax.lion(1e-3).update(jax.grad(loss_of)(state["model"]), state["opt"], state["model"])
    return {"model": eqx.apply_updates(state["model"], updates), "opt": opt, "rng": rng}


# -- MaxText --------------------------------------------------------------------------------------------------


class Block(nn.Module):
    """Parameters in boxes that name their logical axes, and layers that are scanned, as MaxText has them."""

    @nn.compact
    def __call__(self, carry: jax.Array, _: None) -> tuple[jax.Array, None]:
        initial = nn.with_logical_partitioning(nn.initializers.lecun_normal(), ("embed", "mlp"))
        kernel = self.param("kernel", initial, (WIDTH, WIDTH), jnp.float32)
        scale = self.param("scale", nn.with_logical_partitioning(nn.initializers.ones, ("embed",)), (WIDTH,))
        return carry + nn.gelu(carry @ kernel) * scale, None


class Decoder(nn.Module):
    @nn.compact
    def __call__(self, inputs: jax.Array) -> jax.Array:
        layers = nn.scan(
            Block,
            variable_axes={"params": 0},
            split_rngs={"params": True},
            length=3,
            metadata_params={nn.PARTITION_NAME: "layers"},
        )
        outputs, _ = layers(name="layers")(inputs, None)
        return nn.Dense(1, name="logits")(outputs)


def maxtext_initial() -> TrainState:
    model = Decoder()
    variables = model.init(jax.random.key(0), jnp.zeros((1, WIDTH)))
    return TrainState.create(apply_fn=model.apply, params=variables, tx=optax.adamw(1e-3, mu_dtype=jnp.bfloat16))


def maxtext_step(state: TrainState) -> TrainState:
    inputs, wanted = batch(jax.random.fold_in(jax.random.key(5), state.step))
    gradients = jax.grad(lambda params: jnp.mean((state.apply_fn(params, inputs) - wanted) ** 2))(state.params)
    return state.apply_gradients(grads=gradients)


USERS: dict[str, User] = {
    "linen": User(linen_initial, linen_step, "device"),
    "nnx": User(nnx_initial, nnx_step, "pinned_host"),
    "optax": User(optax_initial, optax_step, "device"),
    "equinox": User(equinox_initial, equinox_step),
    "maxtext": User(maxtext_initial, maxtext_step, "pinned_host"),
}


def mesh() -> Mesh:
    """Of all devices: 8 as 4 by 2, 4 as 2 by 2, 1 as 1 by 1."""
    devices = np.array(jax.devices())
    return Mesh(devices.reshape(-1, min(2, devices.size)), ("data", "model"))


def sharding_of(leaf: Any, over: Mesh) -> NamedSharding:
    """Over both axes where a matrix allows it, over the first where a vector does, else everywhere the same."""
    sizes = over.devices.shape
    is_key = jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    if is_key or leaf.ndim == 0 or leaf.shape[-1] % np.prod(sizes):
        return NamedSharding(over, PartitionSpec())
    if leaf.ndim == 1 or leaf.shape[-2] % sizes[0]:
        return NamedSharding(over, PartitionSpec(*[None] * (leaf.ndim - 1), "data"))
    return NamedSharding(over, PartitionSpec(*[None] * (leaf.ndim - 2), "data", "model"))


def abstract(user: User, over: Mesh) -> State:
    """The state of ``user`` as shapes, dtypes and shardings."""

    def sharded(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding_of(leaf, over), weak_type=leaf.weak_type)

    return jax.tree.map(sharded, jax.eval_shape(user.initial))


def jitted(user: User, over: Mesh) -> tuple[Callable[[State], State], Any]:
    """The step of ``user``, to which the state is donated, and the shardings of that."""
    shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract(user, over))
    return jax.jit(user.step, donate_argnums=0, out_shardings=shardings), shardings


def digest(state: State) -> str:
    """Of the paths, bits and types of all leaves."""
    found = hashlib.sha256(type(state).__name__.encode())
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        is_key = jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        data = jax.random.key_data(leaf) if is_key else leaf
        weak = not is_key and leaf.weak_type
        found.update(f"{jax.tree_util.keystr(path)} {leaf.dtype} {leaf.shape} {weak}".encode())
        found.update(np.asarray(data).tobytes())
    return found.hexdigest()


def store_in(folder: str, name: str, *, read_only: bool = False) -> Any:
    """RAM of this process, and a folder that outlives it."""
    ram = {"kind": "ram", "capacity": "16 MiB", "on_close": "release"}
    tiers = {"ram": ram, "disk": {"kind": "posix", "path": f"{folder}/{name}"}}
    return CheckpointStore.open({"tiers": tiers}, read_only=read_only).sync()


def save(name: str, folder: str) -> dict[str, str]:
    user, over = USERS[name], mesh()
    step, shardings = jitted(user, over)
    state = jax.jit(user.initial, out_shardings=shardings)()
    told = {}
    with store_in(folder, name) as store:
        for number in range(1, LAST + 1):
            state = step(state)
            if number == SAVED_AT:
                told["saved"] = digest(state)
                store.save(number, state, capture=user.capture)
        store.flush()
    return told | {"last": digest(state)}


def restore(name: str, folder: str, *, trains_on: bool) -> dict[str, Any]:
    user, over = USERS[name], mesh()
    like = abstract(user, over)
    with store_in(folder, name, read_only=True) as store:
        found = store.restore(like=like)
        assert found is not None
        state = found.tree
    placed = jax.tree.map(lambda leaf, example: leaf.sharding == example.sharding, state, like)
    told = {"saved": digest(state), "step": found.step, "placed": all(jax.tree.leaves(placed))}
    if not trains_on:
        return told
    step, _ = jitted(user, over)
    for _ in range(found.step, LAST):
        state = step(state)
    return told | {"last": digest(state)}


def main() -> None:
    what, folder = sys.argv[1:]
    jax.config.update("jax_compilation_cache_dir", f"{folder}/compiled")
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    task = save if what == "save" else functools.partial(restore, trains_on=what == "go on")
    print(json.dumps({name: task(name, folder) for name in USERS}))


if __name__ == "__main__":
    main()
