"""An abstract state of `jax.eval_shape` whose shardings have no devices is restored onto the mesh that is set."""

from __future__ import annotations

from typing import Any

import pytest
from support.frameworks import require

from tieredckpt import CheckpointStore, Invalid
from tieredckpt.config import StoreConfig

jax = require("jax")

Spec = jax.sharding.PartitionSpec


@pytest.fixture
def mesh() -> Any:
    return jax.make_mesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Explicit,))


def state_on(mesh: Any) -> dict[str, Any]:
    sharding = jax.sharding.NamedSharding(mesh, Spec("x"))
    keys = jax.random.split(jax.random.key(0), 4)
    return {"w": jax.device_put(jax.numpy.arange(4.0), sharding), "rng": jax.device_put(keys, sharding)}


def abstract_of(state: dict[str, Any]) -> Any:
    found = jax.eval_shape(lambda: jax.tree.map(jax.numpy.copy, state))
    assert isinstance(found["w"].sharding.mesh, jax.sharding.AbstractMesh)
    return found


def assert_on(mesh: Any, tree: Any, state: dict[str, Any]) -> None:
    for name, array in tree.items():
        assert array.sharding == jax.sharding.NamedSharding(mesh, Spec("x")), name
        assert (array == state[name]).all()


async def test_a_restore_takes_the_mesh_that_is_set_where_it_is_called(tiers: StoreConfig, mesh: Any) -> None:
    state = state_on(mesh)
    async with CheckpointStore.open(tiers) as store:
        with jax.set_mesh(mesh):
            like = abstract_of(state)
            await store.prepare(like)
            assert await store.restore(like=like) is None
            await store.save(1, state)
            found = await store.restore(like=like)
    assert found is not None
    assert_on(mesh, found.tree, state)


def test_a_blocking_restore_takes_the_mesh_of_its_thread(tiers: StoreConfig, mesh: Any) -> None:
    state = state_on(mesh)
    with CheckpointStore.open_sync(tiers) as store, jax.set_mesh(mesh):
        like = abstract_of(state)
        store.prepare(like)
        store.save(1, state)
        found = store.restore(like=like)
    assert found is not None
    assert_on(mesh, found.tree, state)


async def test_without_such_a_mesh_the_leaf_is_named_and_what_to_do(tiers: StoreConfig, mesh: Any) -> None:
    state = state_on(mesh)
    other = jax.make_mesh((1,), ("y",))
    async with CheckpointStore.open(tiers) as store:
        await store.save(1, state)
        like = abstract_of(state)
        with pytest.raises(Invalid, match=r"'rng'.*abstract mesh \{'x': 1\}.*no mesh is set.*jax\.set_mesh"):
            await store.restore(like=like)
        with jax.set_mesh(other), pytest.raises(Invalid, match=r"'rng'.*the mesh that is set has \{'y': 1\}"):
            await store.restore(like=like)
