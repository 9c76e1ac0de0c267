"""jax arrays of several processes: each process has its own boxes, each once, and gets back what its devices need."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from distributed.launch import SOON, free_port

pytest.importorskip("jax")

MANY_DEVICES = """
import jax, numpy as np
from tieredckpt.format.boxes import tile
from tieredckpt.format.structure import array_nodes
from tieredckpt.tree import flatten, host_view, jax_leaves, jax_shards, match
mesh = jax.make_mesh((2, 4), ("x", "y"))
P = jax.sharding.PartitionSpec
whole = np.arange(8 * 12, dtype=np.float32).reshape(8, 12)
for spec in (P("x", "y"), P("y", "x"), P(("x", "y")), P(None, "y"), P("x"), P()):
    sharding = jax.sharding.NamedSharding(mesh, spec)
    array = jax.device_put(whole, sharding)
    found = jax_shards.pieces("w", array, jax_leaves._array_leaf, jax_leaves._template)
    assert tile(whole.shape, [leaf.box for leaf in found.leaves]), spec
    assert len({leaf.key for leaf in found.leaves}) == len(found.leaves)
    for leaf in found.leaves:
        assert host_view(leaf).tolist() == whole[leaf.box.slices()].tolist()
        assert leaf.place is None or leaf.place.cut == sharding.shard_shape(whole.shape)
    abstract = jax.ShapeDtypeStruct(whole.shape, whole.dtype, sharding=sharding)
    for like in (array, abstract):
        wanted = jax_shards.templates("w", like, jax_leaves._template)
        assert [leaf.key for leaf in wanted.leaves] == [leaf.key for leaf in found.leaves]
        values = {leaf.key: whole[leaf.box.slices()].copy() for leaf in wanted.leaves}
        got = jax_leaves.restored_pieces(wanted, values)
        assert got.sharding == sharding and got.tolist() == whole.tolist(), spec
        places = [shard.data.unsafe_buffer_pointer() for shard in got.addressable_shards]
        assert len(set(places)) == len(places), "devices share memory that one of them may be given to write to"
    keys = jax.device_put(jax.random.split(jax.random.key(3), (8, 12)), sharding)
    found = jax_shards.pieces("k", keys, jax_leaves._array_leaf, jax_leaves._template)
    data = np.asarray(jax.random.key_data(keys))
    assert found.node.shape == data.shape and found.node.prng == "threefry2x32"
    assert tile(data.shape, [leaf.box for leaf in found.leaves])
    values = {leaf.key: host_view(leaf).copy() for leaf in found.leaves}
    assert all((values[leaf.key] == data[leaf.box.slices()]).all() for leaf in found.leaves)
    got = jax_leaves.restored_pieces(jax_shards.templates("k", keys, jax_leaves._template), values)
    assert got.sharding == keys.sharding and (jax.random.key_data(got) == data).all()
"""

TWO_PROCESSES = """
import sys
import jax, numpy as np
rank, port = int(sys.argv[1]), sys.argv[2]
jax.distributed.initialize(f"127.0.0.1:{port}", num_processes=2, process_id=rank)
from tieredckpt.tree import flatten, host_view, match
P = jax.sharding.PartitionSpec
whole = np.arange(8 * 6, dtype=np.float32).reshape(8, 6)
mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(2, 2), ("host", "local"))
def make(spec, values=whole):
    sharding = jax.sharding.NamedSharding(mesh, spec)
    return jax.make_array_from_callback(whole.shape, sharding, lambda index: values[index])
tree = {"both": make(P("host", "local")), "local": make(P("local")), "all": make(P()), "host": make(P(None, "host"))}
flat = flatten(tree)
found = {}
for leaf in flat.arrays:
    assert host_view(leaf).tolist() == whole[leaf.box.slices()].tolist()
    found.setdefault(leaf.place.key, []).append((leaf.box.offset, leaf.box.shape, leaf.place.replicas))
rows, columns = 4 * rank, 3 * rank
assert found["both"] == [((rows, 0), (4, 3), ()), ((rows, 3), (4, 3), ())], found
assert found["local"] == [((0, 0), (4, 6), (0, 1)), ((4, 0), (4, 6), (0, 1))], found
assert found["all"] == [((0, 0), (8, 6), (0, 1))], found
assert found["host"] == [((0, columns), (8, 3), ())], found
zeros = {name: make(array.sharding.spec, np.zeros_like(whole)) for name, array in tree.items()}
abstract = {name: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding) for name, a in tree.items()}
for like in (zeros, abstract):
    fitted = match(like, flat.structure)
    assert [leaf.key for leaf in fitted.leaves] == [leaf.key for leaf in flat.arrays]
    got = fitted.build({leaf.key: whole[leaf.box.slices()].copy() for leaf in fitted.leaves})
    for name, array in got.items():
        assert array.sharding == tree[name].sharding and array.shape == whole.shape
        for shard in array.addressable_shards:
            assert np.asarray(shard.data).tolist() == whole[shard.index].tolist()
jax.distributed.shutdown()
"""


def environment(devices: int) -> dict[str, str]:
    return os.environ | {"XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}", "JAX_PLATFORMS": "cpu"}


def test_the_boxes_of_many_devices_are_each_one_piece_and_come_back_sharded() -> None:
    subprocess.run([sys.executable, "-c", MANY_DEVICES], env=environment(8), check=True, timeout=SOON)


def test_every_process_of_a_job_has_the_boxes_of_its_own_devices() -> None:
    port = str(free_port())
    processes = [
        subprocess.Popen([sys.executable, "-c", TWO_PROCESSES, str(rank), port], env=environment(2))
        for rank in range(2)
    ]
    try:
        assert [process.wait(timeout=SOON) for process in processes] == [0, 0]
    finally:
        for process in processes:
            process.kill()
            process.wait()
