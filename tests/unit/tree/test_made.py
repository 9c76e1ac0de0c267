"""Arrays that are made without an example: of the kinds that were saved, or of one kind."""

from __future__ import annotations

import sys
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from support.trees import arrays as any_array

from tieredckpt import ArraySpec, CheckpointStore, Invalid
from tieredckpt.config import StoreConfig
from tieredckpt.tree.arrays import host_view
from tieredckpt.tree.flatten import flatten, unflatten

VALUES = np.arange(6, dtype=np.float32).reshape(2, 3)


def kinds(tree: Any) -> dict[str, str]:
    return {name: type(value).__module__.partition(".")[0] for name, value in tree.items()}


async def test_arrays_come_back_as_what_they_were(tiers: StoreConfig) -> None:
    torch, jax = pytest.importorskip("torch"), pytest.importorskip("jax")
    tree = {
        "jax": jax.numpy.asarray(VALUES),
        "key": jax.random.key(7),
        "numpy": VALUES,
        "scalar": np.float32(1.5),
        "torch": torch.tensor(VALUES).to(torch.bfloat16),
    }
    async with CheckpointStore.open(tiers) as store:
        await store.save(1, tree)
        for copy in (True, False):
            restored = await store.restore(as_="saved", copy=copy)
            assert restored is not None
            found = restored.tree
            assert kinds(found) == {
                "jax": "jaxlib",
                "key": "jax",
                "numpy": "numpy",
                "scalar": "numpy",
                "torch": "torch",
            }
            assert found["torch"].dtype == torch.bfloat16
            assert torch.equal(found["torch"], tree["torch"])
            assert jax.numpy.array_equal(found["jax"], tree["jax"])
            assert found["key"].dtype == tree["key"].dtype
            assert jax.random.bits(found["key"]) == jax.random.bits(tree["key"])
            assert type(found["scalar"]) is np.float32


async def test_all_arrays_come_back_as_one_kind(tiers: StoreConfig) -> None:
    torch, jax = pytest.importorskip("torch"), pytest.importorskip("jax")
    tree = {"jax": jax.numpy.asarray(VALUES), "numpy": VALUES.astype(">f4"), "torch": torch.tensor(VALUES)}
    async with CheckpointStore.open(tiers) as store:
        await store.save(1, {**tree, "key": jax.random.key(7)})
        for kind, module in (("numpy", "numpy"), ("torch", "torch"), ("jax", "jaxlib"), (None, "numpy")):
            restored = await store.restore(as_=kind)
            assert restored is not None
            key = restored.tree.pop("key")  # NumPy and torch have its data
            assert kinds(restored.tree) == dict.fromkeys(tree, module)
            assert all(np.array_equal(np.asarray(value), VALUES) for value in restored.tree.values())
            assert jax.numpy.issubdtype(key.dtype, jax.dtypes.prng_key) if kind == "jax" else key.shape == (2,)
        part = await store.restore(as_="torch", keys=["torch"])
        assert part is not None
        assert kinds(part.tree) == {"torch": "torch"}


async def test_what_cannot_be_made_is_named(tiers: StoreConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("jax")
    async with CheckpointStore.open(tiers) as store:
        await store.save(1, {"time": np.zeros(3, "datetime64[s]"), "wide": np.zeros(3)})
        with pytest.raises(Invalid, match=r"leaf 'time': torch has no dtype for datetime64"):
            await store.restore(as_="torch")
        with pytest.raises(Invalid, match=r"leaf 'time': jax cannot hold datetime64"):
            await store.restore(as_="jax", keys=["time"])
        with pytest.raises(Invalid, match=r"leaf 'wide': jax would make float32 of float64; set jax_enable_x64"):
            await store.restore(as_="jax", keys=["wide"])
        monkeypatch.delattr("tieredckpt.tree.torch_leaves")
        monkeypatch.setitem(sys.modules, "tieredckpt.tree.torch_leaves", None)
        with pytest.raises(Invalid, match=r"as_='torch' makes it an array of torch, which cannot be imported"):
            await store.restore(as_="torch")


async def test_the_kind_is_a_known_one_and_stands_without_an_example(tiers: StoreConfig) -> None:
    async with CheckpointStore.open(tiers) as store:
        await store.save(1, {"w": VALUES})
        with pytest.raises(Invalid, match="'saved', 'numpy', 'torch', 'jax' or 'specs', not 'tensorflow'"):
            await store.restore(as_="tensorflow")
        for example in ({"like": {"w": VALUES}}, {"into": {"w": VALUES.copy()}}):
            with pytest.raises(Invalid, match="without `like` and `into`"):
                await store.restore(as_="numpy", **example)


@given(any_array())
def test_torch_keeps_every_bit_of_what_it_has_a_dtype_for(array: np.ndarray[Any, Any]) -> None:
    pytest.importorskip("torch")
    flat = flatten({"w": array})
    stored = {"w": np.ascontiguousarray(host_view(flat.arrays[0])).reshape(array.shape)}
    try:
        made = unflatten(flat.structure, stored, "torch")
    except Invalid:
        return  # it has not
    again = host_view(flatten(made).arrays[0])
    native = stored["w"].astype(stored["w"].dtype.newbyteorder("="))
    assert (again.dtype, again.shape, again.tobytes()) == (native.dtype, native.shape, native.tobytes())


def test_small_floats_are_known_to_torch() -> None:
    torch = pytest.importorskip("torch")
    array = np.arange(4).astype(ml_dtypes.float8_e4m3fn)
    flat = flatten({"w": array})
    made = unflatten(flat.structure, {"w": array}, "torch")
    assert isinstance(made, dict)
    assert made["w"].dtype == torch.float8_e4m3fn


async def test_a_step_is_told_without_its_arrays(tiers: StoreConfig) -> None:
    async with CheckpointStore.open(tiers) as store:
        await store.save(1, {"w": VALUES, "rest": [VALUES[0], (1.5, None)]})
        found = await store.restore(as_="specs", resume=False)
        assert found is not None
        assert found.tree == {
            "w": ArraySpec("w", VALUES.dtype, (2, 3), "numpy"),
            "rest": [ArraySpec("rest/0", VALUES.dtype, (3,), "numpy"), (1.5, None)],
        }
        assert found.sources == {}
