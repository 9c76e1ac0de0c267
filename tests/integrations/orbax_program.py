"""What `test_orbax_loops` runs in processes of their own: loops as T5X and MaxText have them, with one import changed.

``python orbax_program.py LOOP FOLDER KILL_AT`` trains on all of JAX's devices until it is killed, or to the end, and
prints the SHA-256 of all that it ends with. ``compare FOLDER`` restores onto two meshes.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import flax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax.training.train_state import TrainState
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from orbax.checkpoint.checkpoint_managers import FixedIntervalPolicy, LatestN

from tieredckpt.integrations.orbax import CheckpointManager

STEPS = 9
ROWS, COLUMNS = 256, 64


class State(TrainState):
    rng: Any = None


class Batches(Iterator[np.ndarray[Any, Any]]):
    """A data loader with a state."""

    def __init__(self) -> None:
        self.at = 0

    def __next__(self) -> np.ndarray[Any, Any]:
        self.at += 1
        return np.random.default_rng(self.at).standard_normal((8, ROWS)).astype(np.float32)


class BatchesHandler(ocp.CheckpointHandler):
    """As that of Grain: a file for each process."""

    def save(self, directory: Any, item: Any = None, args: Any = None) -> None:
        (directory / f"process_{jax.process_index()}-of-{jax.process_count()}.json").write_text(
            json.dumps(args.item.at)
        )

    def restore(self, directory: Any, item: Any = None, args: Any = None) -> Any:
        file = directory / f"process_{jax.process_index()}-of-{jax.process_count()}.json"
        args.item.at = json.loads(file.read_text())
        return args.item


@ocp.args.register_with_handler(BatchesHandler, for_save=True, for_restore=True)
@dataclasses.dataclass
class BatchesArgs(ocp.args.CheckpointArgs):
    item: Any


def mesh(devices: int | None = None) -> Mesh:
    return Mesh(np.array(jax.devices()[:devices]).reshape(-1, 2), ("data", "model"))


def shardings(state: Any, over: Mesh) -> Any:
    """Matrices over both axes, all else on every device."""

    def sharding(leaf: Any) -> NamedSharding:
        return NamedSharding(over, PartitionSpec(*(("data", "model") if leaf.shape == (ROWS, COLUMNS) else ())))

    return jax.tree.map(sharding, state)


def on(state: Any, over: Mesh) -> Any:
    """The abstract state with its shardings."""

    def placed(leaf: Any, at: NamedSharding) -> Any:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=at)

    return jax.tree.map(placed, state, shardings(state, over))


def new_state() -> Any:
    params = {"w": jax.random.normal(jax.random.key(1), (ROWS, COLUMNS)), "b": jnp.zeros(COLUMNS, jnp.bfloat16)}
    return State.create(apply_fn=None, params=params, tx=optax.adamw(1e-2), rng=jax.random.key(7))


def train_step(state: Any, batch: Any) -> Any:
    """With dropout, so that what comes out depends on the key too."""
    rng, use = jax.random.split(state.rng)
    kept = jax.random.bernoulli(use, 0.8, batch.shape)

    def loss(params: Any) -> Any:
        return jnp.square((batch * kept) @ params["w"] + params["b"]).mean()

    return state.apply_gradients(grads=jax.grad(loss)(state.params), rng=rng)


def digest(state: Any) -> str:
    leaves = [jax.random.key_data(leaf) if leaf is state.rng else leaf for leaf in jax.tree.leaves(state)]
    return hashlib.sha256(b"".join(np.asarray(leaf).tobytes() for leaf in leaves)).hexdigest()


def train(state: Any, batches: Batches, save: Callable[[int, Any], None], kill_at: int) -> Any:
    step_fn = jax.jit(train_step, donate_argnums=0, out_shardings=shardings(jax.eval_shape(new_state), mesh()))
    for step in range(int(state.step), STEPS):
        state = step_fn(state, next(batches))
        save(step + 1, state)
        if step + 1 == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
    return state


# -- as MaxText does --------------------------------------------------------------------------------------


def maxtext(folder: Path, kill_at: int) -> Any:
    manager = CheckpointManager(
        folder,
        item_names=("items", "iter"),
        item_handlers={
            "items": ocp.PyTreeCheckpointHandler(use_ocdbt=True, use_zarr3=True),
            "iter": BatchesHandler(),
        },
        options=ocp.CheckpointManagerOptions(
            create=True,
            enable_async_checkpointing=True,
            save_decision_policy=FixedIntervalPolicy(interval=2),
            preservation_policy=LatestN(3),
            async_options=None,
        ),
        logger=None,
    )
    batches, abstract = Batches(), jax.eval_shape(new_state)
    state = None
    if (latest := manager.latest_step()) is not None:
        over = shardings(abstract, mesh())
        abstract = jax.tree.map(
            lambda leaf, at: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=at), abstract, over
        )
        restore_args = jax.tree.map(
            lambda leaf: ocp.ArrayRestoreArgs(sharding=leaf.sharding, global_shape=leaf.shape, dtype=leaf.dtype),
            abstract,
        )
        restored = manager.restore(
            latest,
            args=ocp.args.Composite(
                items=ocp.args.PyTreeRestore(item=abstract, restore_args=restore_args), iter=BatchesArgs(batches)
            ),
        )
        state = restored["items"]
    state = jax.jit(new_state, out_shardings=shardings(abstract, mesh()))() if state is None else state

    def save(step: int, state: Any) -> None:
        force = step == STEPS
        if not (force or manager.should_save(step)):
            return
        if manager.latest_step() == step:
            return
        save_args = jax.tree.map(lambda _: ocp.SaveArgs(chunk_byte_size=1 << 20), state)
        items = ocp.args.PyTreeSave(item=state, save_args=save_args, ocdbt_target_data_file_size=1 << 20)
        args = ocp.args.Composite(items=items, iter=BatchesArgs(batches))
        assert manager.save(step, args=args, force=force, custom_metadata={"scan_layers": True})
        if force or manager.reached_preemption(step):
            manager.wait_until_finished()

    state = train(state, batches, save, kill_at)
    assert manager.all_steps()[-1] == STEPS
    manager.close()
    return state


# -- as T5X does ------------------------------------------------------------------------------------------


def t5x(folder: Path, kill_at: int) -> Any:
    """Its state as a dict of dicts, which is saved by force when the loop says so."""
    manager = CheckpointManager(
        directory=str(folder),
        options=ocp.CheckpointManagerOptions(
            max_to_keep=2,
            save_interval_steps=3,
            keep_period=6,
            cleanup_tmp_directories=True,
            step_prefix="checkpoint",
            async_options=ocp.AsyncOptions(timeout_secs=600),
        ),
        item_handlers={"state": ocp.PyTreeCheckpointHandler(use_ocdbt=True), "dataset": BatchesHandler()},
    )
    batches = Batches()
    state = jax.jit(new_state, out_shardings=shardings(jax.eval_shape(new_state), mesh()))()
    if (latest := manager.latest_step()) is not None:
        state_dict = flax.serialization.to_state_dict(state)
        over = mesh()
        restore_args = jax.tree.map(
            lambda leaf: ocp.ArrayRestoreArgs(mesh=over, mesh_axes=leaf.sharding.spec, dtype=leaf.dtype), state_dict
        )
        restored = manager.restore(
            latest,
            args=ocp.args.Composite(
                state=ocp.args.PyTreeRestore(state_dict, restore_args=restore_args), dataset=BatchesArgs(batches)
            ),
            directory=manager.directory,
        )
        state = flax.serialization.from_state_dict(state, restored["state"])

    def save(step: int, state: Any) -> None:
        if step % 3:
            return
        state_dict = flax.serialization.to_state_dict(state)
        save_args = jax.tree.map(lambda _: ocp.SaveArgs(), state_dict)
        args = {"state": ocp.args.PyTreeSave(state_dict, save_args=save_args), "dataset": BatchesArgs(batches)}
        assert manager.save(step, args=ocp.args.Composite(**args), force=True)

    state = train(state, batches, save, kill_at)
    manager.wait_until_finished()
    manager.close()
    return state


def compare(folder: Path) -> None:
    """Restore the newest step of the MaxText-style loop onto other meshes, and as it was saved."""
    with CheckpointManager(folder, options=ocp.CheckpointManagerOptions(read_only=True)) as manager:
        abstract = jax.eval_shape(new_state)
        found = []
        for over in (mesh(), mesh(2)):
            args = ocp.args.Composite(items=ocp.args.StandardRestore(on(abstract, over)))
            found.append(manager.restore(None, args=args)["items"])
            assert found[-1].params["w"].sharding.mesh.size == over.size
        first, second = map(digest, found)
        assert first == second
        print(first)


def ranks() -> None:
    from distributed.launch import rank_of_this_process

    with rank_of_this_process() as me:
        if "kill_at" in me.arguments:
            me.tell(trained_by_ranks(Path(me.arguments["folder"]), me.arguments["kill_at"]))
        else:
            save_and_restore(me)


def trained_by_ranks(folder: Path, kill_at: int) -> tuple[int, str]:
    """Train with arrays over all processes, until they are killed or to the end: the step that it began with, and the
    SHA-256 of what this process ends with."""
    abstract, batches = jax.eval_shape(new_state), Batches()
    with CheckpointManager(folder, options=ocp.CheckpointManagerOptions(save_interval_steps=2)) as manager:
        state = jax.jit(new_state, out_shardings=shardings(abstract, mesh()))()
        if manager.latest_step() is not None:
            args = {"items": ocp.args.PyTreeRestore(on(abstract, mesh())), "iter": BatchesArgs(batches)}
            state = manager.restore(None, args=ocp.args.Composite(**args))["items"]
        begun = int(state.step)

        def save(step: int, state: Any) -> None:
            args = {"items": ocp.args.PyTreeSave(state), "iter": BatchesArgs(batches)}
            manager.save(step, args=ocp.args.Composite(**args))
            if step == kill_at - 1:
                manager.wait_until_finished()

        state = train(state, batches, save, kill_at)
    leaves = [jax.random.key_data(leaf) if leaf is state.rng else leaf for leaf in jax.tree.leaves(state)]
    parts = [np.asarray(part.data).tobytes() for leaf in leaves for part in leaf.addressable_shards]
    return begun, hashlib.sha256(b"".join(parts)).hexdigest()


def save_and_restore(me: Any) -> None:
    """Save arrays of all processes, and an item that each has of its own, and restore them."""
    over, abstract = mesh(), jax.eval_shape(new_state)
    state = jax.jit(new_state, out_shardings=shardings(abstract, over))()
    batches = Batches()
    with CheckpointManager(me.arguments["folder"]) as manager:
        batches.at = 10 + me.rank
        args = {"items": ocp.args.PyTreeSave(state), "iter": BatchesArgs(batches)}
        assert manager.save(3, args=ocp.args.Composite(**args))
        manager.wait_until_finished()
        batches.at = 0
        args = {"items": ocp.args.PyTreeRestore(on(abstract, over)), "iter": BatchesArgs(batches)}
        found = manager.restore(None, args=ocp.args.Composite(**args))["items"]
        pairs = zip(jax.tree.leaves(state), jax.tree.leaves(found), strict=True)
        same = all(one.sharding == other.sharding and equal(one, other) for one, other in pairs)
        half = jax.ShapeDtypeStruct((ROWS, COLUMNS), jnp.bfloat16, sharding=state.params["w"].sharding)
        number = jax.ShapeDtypeStruct((), jnp.float32, sharding=NamedSharding(over, PartitionSpec()))
        part = {"params": {"w": half}, "step": number}
        wanted = ocp.args.PyTreeRestore(part, partial_restore=True)
        found = manager.restore(3, args=ocp.args.Composite(items=wanted))["items"]
        cast = equal(state.params["w"].astype(jnp.bfloat16), found["params"]["w"])
        me.tell([same, cast, int(found["step"]), batches.at])


def equal(one: Any, other: Any) -> bool:
    """Whether this process has the same of two arrays."""
    if jax.dtypes.issubdtype(one.dtype, jax.dtypes.prng_key):
        one, other = jax.random.key_data(one), jax.random.key_data(other)
    parts = zip(one.addressable_shards, other.addressable_shards, strict=True)
    return all(np.array_equal(np.asarray(left.data), np.asarray(right.data)) for left, right in parts)


if __name__ == "__main__":
    if len(sys.argv) == 1:
        ranks()
    elif sys.argv[1] == "compare":
        compare(Path(sys.argv[2]))
    else:
        what, path = sys.argv[1], Path(sys.argv[2])
        print(digest({"maxtext": maxtext, "t5x": t5x}[what](path, int(sys.argv[3]))))
