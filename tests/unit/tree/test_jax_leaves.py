"""jax arrays and typed PRNG keys: viewed in place on a CPU, restored where and as they were."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from tieredckpt.errors import Invalid
from tieredckpt.tree import Shard, as_array_leaf, flatten, host_view, match, unflatten, writable_view

jax = pytest.importorskip("jax")
jnp = jax.numpy

from tieredckpt.tree import jax_parts
from tieredckpt.tree.arrays import host_reader
from tieredckpt.tree.leaf import ArrayLeaf

DTYPES = [
    "bool",
    "uint8",
    "int16",
    "int32",
    "float16",
    "bfloat16",
    "float32",
    "complex64",
    "float8_e4m3fn",
    "int4",
]


def restore(saved: object, like: object) -> Any:
    flat = flatten(saved)
    return match(like, flat.structure).build({leaf.key: host_view(leaf).copy() for leaf in flat.arrays})


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_comes_back_bit_for_bit(dtype: str) -> None:
    array = jnp.arange(6).reshape(2, 3).astype(dtype)
    leaf = as_array_leaf("k", array)
    assert leaf is not None
    assert leaf.immutable
    assert (leaf.shape, leaf.dtype.name) == ((2, 3), dtype)
    view = host_view(leaf)
    assert view.tobytes() == np.asarray(array).tobytes()
    got = restore({"a": array}, {"a": jnp.zeros((2, 3), dtype)})["a"]
    assert isinstance(got, jax.Array)
    assert got.dtype == array.dtype
    assert np.asarray(got).tobytes() == view.tobytes()


def test_an_array_of_the_cpu_is_viewed_in_place() -> None:
    array = jnp.arange(1000.0)
    leaf = as_array_leaf("k", array)
    assert leaf is not None
    assert host_view(leaf).ctypes.data == array.unsafe_buffer_pointer()


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg", "unsafe_rbg"])
@pytest.mark.parametrize("shape", [(), (3,)])
def test_typed_prng_keys_come_back_with_their_implementation(impl: str, shape: tuple[int, ...]) -> None:
    def keys(seed: int) -> Any:
        key = jax.random.key(seed, impl=impl)
        return jax.random.split(key, shape) if shape else key

    abstract = jax.eval_shape(lambda: keys(0))
    for like in (keys(0), abstract):
        got = restore({"rng": keys(42)}, {"rng": like})["rng"]
        assert got.dtype == keys(42).dtype
        assert jax.random.key_impl(got) == impl
        assert jax.random.key_data(got).tolist() == jax.random.key_data(keys(42)).tolist()
    other = "rbg" if impl != "rbg" else "threefry2x32"
    with pytest.raises(Invalid, match=rf"'rng' .*PRNG key {other}.*PRNG key {impl}"):
        restore({"rng": keys(1)}, {"rng": jax.random.key(0, impl=other)})
    data = jax.random.key_data(keys(1))
    with pytest.raises(Invalid, match="'rng'"):
        restore({"rng": keys(1)}, {"rng": data})
    with pytest.raises(Invalid, match="'rng'"):
        restore({"rng": data}, {"rng": keys(1)})


def test_typed_prng_keys_are_no_shard() -> None:
    with pytest.raises(Invalid, match=r"'rng'.*key_data"):
        flatten({"rng": Shard(jax.random.split(jax.random.key(0), 4), (8, 2), (0, 0))})


def test_placement_is_that_of_like() -> None:
    sharding = jax.sharding.SingleDeviceSharding(jax.devices("cpu")[0])
    like = {
        "committed": jax.device_put(jnp.zeros(2), sharding),
        "free": jnp.zeros(2),
        "abstract": jax.ShapeDtypeStruct((2,), np.float32, sharding=sharding),
        "anywhere": jax.ShapeDtypeStruct((2,), np.float32),
    }
    keys = {
        "committed": jax.device_put(jax.random.key(0), sharding),
        "free": jax.random.key(0),
        "abstract": jax.ShapeDtypeStruct((), jax.random.key(0).dtype, sharding=sharding),
        "anywhere": jax.eval_shape(lambda: jax.random.key(0)),
    }
    for saved, likes in ((jnp.ones(2), like), (jax.random.key(7), keys)):
        got = restore(dict.fromkeys(likes, saved), likes)
        committed = {name: array.committed for name, array in got.items()}
        assert committed == {"committed": True, "free": False, "abstract": True, "anywhere": False}
        assert got["committed"].sharding == got["abstract"].sharding == sharding
        assert all((array == saved).all() for array in got.values())


def test_a_sharding_that_its_shape_cannot_have_is_refused_by_key() -> None:
    """Where it is asked for, and not once all has been read."""
    program = """
import jax, numpy as np
from tieredckpt.errors import Invalid
from tieredckpt.tree import flatten, match
P = jax.sharding.PartitionSpec
for kind in (jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit):
    mesh = jax.make_mesh((4,), ("x",), axis_types=(kind,))
    like = {"w": jax.ShapeDtypeStruct((6,), np.float32, sharding=jax.sharding.NamedSharding(mesh, P("x")))}
    try:
        match(like, flatten({"w": np.ones(6, np.float32)}).structure)
    except Invalid as error:
        assert "'w'" in str(error) and "6" in str(error), error
    else:
        raise AssertionError("it was taken")
"""
    environment = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=4", "JAX_PLATFORMS": "cpu"}
    subprocess.run([sys.executable, "-c", program], env=environment, check=True)


def test_read_only_memory_is_not_handed_to_jax() -> None:
    like = {"a": jnp.zeros(64)}
    aligned = np.zeros(128, np.float32)
    start = -aligned.ctypes.data % 64 // 4
    memory = aligned[start : start + 64]
    memory.flags.writeable = False
    got: Any = match(like, flatten(like).structure).build({"a": memory})
    assert got["a"].unsafe_buffer_pointer() != memory.ctypes.data


@pytest.mark.parametrize("make", [lambda: jnp.zeros(2), lambda: jax.random.key(3)])
def test_an_array_given_away_while_its_capture_was_pending_is_named_with_a_remedy(make: Any) -> None:
    array = make()
    (leaf,) = flatten({"params": {"w": array}}).arrays
    array.delete()
    with pytest.raises(Invalid, match=r"'params/w'.*donated or deleted.*capture=.copy.*reached") as error:
        host_view(leaf)
    assert 'capture="copy"' in str(error.value)


def test_an_array_given_away_before_cannot_be_saved_but_can_be_like() -> None:
    array = jnp.zeros(2)
    array.delete()
    with pytest.raises(Invalid, match=r"'w'.*donated or deleted"):
        flatten({"w": array})
    assert restore({"w": jnp.ones(2)}, {"w": array})["w"].tolist() == [1, 1]


def test_a_double_that_jax_would_narrow_is_refused() -> None:
    like = {"x": jax.ShapeDtypeStruct((2,), np.float64)}
    jax.config.update("jax_enable_x64", True)
    try:
        assert restore({"x": np.ones(2)}, like)["x"].dtype == np.float64
    finally:
        jax.config.update("jax_enable_x64", False)
    with pytest.raises(Invalid, match=r"'x'.*jax_enable_x64"):
        restore({"x": np.ones(2)}, like)


def test_without_like_arrays_are_numpy_and_keys_their_data() -> None:
    flat = flatten({"a": jnp.arange(3), "rng": jax.random.key(5)})
    got: Any = unflatten(flat.structure, {leaf.key: host_view(leaf) for leaf in flat.arrays})
    assert type(got["a"]) is type(got["rng"]) is np.ndarray
    assert got["rng"].tolist() == jax.random.key_data(jax.random.key(5)).tolist()


def test_what_has_no_data_is_refused_by_key() -> None:
    with pytest.raises(Invalid, match=r"'a'.*ShapeDtypeStruct"):
        flatten({"a": jax.ShapeDtypeStruct((2,), np.float32)})

    def traced(x: Any) -> Any:
        flatten({"a": x})
        return x

    with pytest.raises(Invalid, match=r"'a'.*traced"):
        jax.jit(traced)(1.0)


def test_an_array_cannot_be_restored_into() -> None:
    with pytest.raises(Invalid, match=r"'a'.*`like`"):
        writable_view("a", jnp.zeros(2))


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class State:
    params: Any
    apply: Any = dataclasses.field(metadata={"static": True})


class Pair:
    """Registered without names for its children."""

    def __init__(self, left: Any, right: Any) -> None:
        self.left = left
        self.right = right


jax.tree_util.register_pytree_node(Pair, lambda p: ((p.left, p.right), None), lambda _, parts: Pair(*parts))


def test_nodes_of_jaxs_registry_are_containers_and_keep_what_is_static() -> None:
    saved = {"state": State({"w": jnp.ones(2)}, apply=abs), "pair": Pair(jnp.ones(1), None)}
    assert [leaf.key for leaf in flatten(saved).arrays] == ["state/params/w", "pair/0"]
    got = restore(saved, {"state": State({"w": jnp.zeros(2)}, apply=len), "pair": Pair(jnp.zeros(1), None)})
    assert type(got["state"]) is State
    assert got["state"].apply is len
    assert got["state"].params["w"].tolist() == [1, 1]
    assert type(got["pair"]) is Pair
    assert got["pair"].left.tolist() == [1]
    assert got["pair"].right is None
    assert restore(saved["state"], saved["state"]).params["w"].tolist() == [1, 1]


def test_a_node_that_contains_itself_is_refused() -> None:
    pair = Pair(None, None)
    pair.left = pair
    with pytest.raises(Invalid, match=r"'p/0'.*contains itself"):
        flatten({"p": pair})


SHARDED = """
import jax, numpy as np
from tieredckpt.tree import flatten, host_view, match
mesh = jax.make_mesh((2, 2), ("x", "y"))
P = jax.sharding.PartitionSpec
whole = np.arange(24.0, dtype=np.float32).reshape(4, 6)
for spec in (P("x", "y"), P("x"), P(None, ("x", "y")[0]), P()):
    sharding = jax.sharding.NamedSharding(mesh, spec)
    keys = jax.device_put(jax.random.split(jax.random.key(1), 4), jax.sharding.NamedSharding(mesh, P("x")))
    tree = {"a": jax.device_put(whole, sharding), "one": jax.device_put(1.0, jax.devices()[3]), "rng": keys}
    flat = flatten(tree)
    arrays = {leaf.key: host_view(leaf).copy() for leaf in flat.arrays}
    assert arrays["a"].tobytes() == whole.tobytes()
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree)
    for like in (tree, abstract):
        got = match(like, flat.structure).build(arrays)
        assert got["a"].sharding == sharding and got["a"].tolist() == whole.tolist()
        assert got["one"].devices() == {jax.devices()[3]}
        assert got["rng"].sharding == keys.sharding
        assert jax.random.key_data(got["rng"]).tolist() == jax.random.key_data(keys).tolist()
"""


READ = """
import itertools
import numpy as np, jax
from jax.sharding import NamedSharding, PartitionSpec as P
from msgspec.structs import replace
from tieredckpt.tree import as_array_leaf, jax_parts
from tieredckpt.tree.arrays import host_reader

mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(2, 2), ("x", "y"))
whole = np.arange(8 * 6, dtype=np.int16).reshape(8, 6)
spans = {8: [slice(0, 8), slice(1, 5), slice(4, 8)], 6: [slice(0, 6), slice(2, 4), slice(0, 3)]}
for elsewhere in (False, True):
    if elsewhere:
        jax_parts._is_here = lambda array: False
    for spec in (P("x", "y"), P(None, "y"), P(("x", "y")), P("y"), P()):
        leaf = as_array_leaf("w", jax.device_put(whole, NamedSharding(mesh, spec)))
        read = host_reader(leaf)
        assert (read is None) == (spec == P() and not elsewhere)
        for box in itertools.product(spans[8], spans[6]) if read else ():
            assert np.array_equal(read(box), whole[box]), (spec, box)
        part = (slice(3, 8), slice(1, 5))
        inner = host_reader(replace(leaf, shape=(5, 4), part=part))
        for box in itertools.product((slice(0, 5), slice(1, 3)), (slice(0, 4), slice(3, 4))) if inner else ():
            assert np.array_equal(inner(box), whole[part][box]), (spec, box)
        assert leaf.source._npy_value is None
        assert not elsewhere or all(shard.data._npy_value is None for shard in leaf.source.addressable_shards)
"""


def test_boxes_of_an_array_without_a_view_are_read_alone_and_nothing_is_kept_with_it() -> None:
    environment = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=4", "JAX_PLATFORMS": "cpu"}
    subprocess.run([sys.executable, "-c", READ], env=environment, check=True)


def test_a_box_that_begins_beyond_two_billion_is_read_where_it_begins() -> None:
    """Jax cuts the starts of a dynamic slice to 32 bits and says nothing."""
    large = jax.ShapeDtypeStruct((3_000_000_100,), np.uint8)
    text = str(jax.make_jaxpr(lambda data: jax_parts._slice(data, [3_000_000_000], [16]))(large))
    assert "start_indices=(3000000000,)" in text


def test_a_full_device_gives_an_array_once_and_not_for_every_box(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> jax.Array:
        raise RuntimeError("RESOURCE_EXHAUSTED: out of memory")

    copied = []
    copy = jax_parts._copied
    monkeypatch.setattr(jax_parts, "_is_here", lambda _: False)
    monkeypatch.setattr(jax_parts, "_slice", full)
    monkeypatch.setattr(jax_parts, "_copied", lambda data: copied.append(data) or copy(data))
    array = jnp.arange(16.0).reshape(4, 4)
    leaf = as_array_leaf("w", array)
    assert isinstance(leaf, ArrayLeaf)
    read = host_reader(leaf)
    assert read is not None
    for row in range(4):
        assert np.array_equal(read((slice(row, row + 1), slice(0, 4))), array[row : row + 1])
    assert len(copied) == 1


def test_what_is_read_of_an_array_given_away_is_told_as_of_one_with_a_view(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax_parts, "_is_here", lambda _: False)
    array = jnp.zeros((4, 4))
    leaf = as_array_leaf("w", array)
    assert isinstance(leaf, ArrayLeaf)
    read = host_reader(leaf)
    assert read is not None
    array.delete()
    for box in ((slice(0, 2), slice(0, 4)), (slice(0, 4), slice(0, 4))):
        with pytest.raises(Invalid, match=r"'w'.*donated or deleted"):
            read(box)


def test_an_array_sharded_over_devices_is_saved_whole_and_restored_sharded() -> None:
    environment = os.environ | {
        "XLA_FLAGS": "--xla_force_host_platform_device_count=4",
        "JAX_PLATFORMS": "cpu",
    }
    subprocess.run([sys.executable, "-c", SHARDED], env=environment, check=True)
