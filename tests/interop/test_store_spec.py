"""Promise 9: stock TensorStore opens every array of every step on every tier, whatever was done to the tiers."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import tensorstore as ts
from hypothesis import given, settings
from hypothesis import strategies as st
from support.insight import flip_chunk
from support.scenes import CHUNK, config, crash, folder, ram
from support.trees import arrays, large_arrays

from tieredckpt import CheckpointStore
from tieredckpt.config import StoreConfig
from tieredckpt.errors import NotFound
from tieredckpt.tree import flatten, host_view

TIERS = ("ram", "disk", "far")

Array = np.ndarray[Any, Any]


@pytest.fixture
def three_tiers(shared_memory: Path, tmp_path: Path) -> StoreConfig:
    """RAM, a directory and a kvstore, whose folder is written without its final slash."""
    far = {"kind": "kvstore", "spec": {"driver": "file", "path": f"{tmp_path}/far"}, "retain": "all"}
    disk = folder(tmp_path / "disk", retain="all")
    return config({"ram": ram(shared_memory, retain="all"), "disk": disk, "far": far})


def state(seed: int) -> dict[str, Any]:
    """Arrays of all kinds, some of several chunks; most change with the seed."""
    rng = np.random.default_rng(seed)
    return {
        "params": {
            "kernel": rng.standard_normal((37, 1300)).astype(np.float32),
            "bias": rng.standard_normal(5000).astype(">f8"),
            "half": rng.standard_normal((3, 9000)).astype(ml_dtypes.bfloat16),
            "small": rng.standard_normal(5).astype(ml_dtypes.float8_e4m3fn),
            "nibbles": rng.integers(-8, 8, 30000).astype(ml_dtypes.int4),
            "großes π": [rng.standard_normal((2, 3, 5)) + 1j, rng.integers(0, 2, (70, 700)).astype(bool)],
        },
        "step": np.array(seed, np.int64),
        "empty": np.zeros((3, 0, 2), np.float32),
        "none of it": np.zeros(0, np.int16),
        "when": np.array([f"2024-01-01T00:00:0{seed % 10}", "NaT"], "<M8[s]"),
        "frozen": np.arange(5 * CHUNK, dtype=np.uint8),
        "scalar": np.float16(seed),
        "text": "no array",
    }


def opened(spec: dict[str, Any]) -> ts.TensorStore:
    """As a program that knows nothing of this store would: without caches of an earlier look."""
    return ts.open(json.loads(json.dumps(spec)), context=ts.Context(), open=True, read=True).result()


async def assert_opens(store: CheckpointStore, trees: dict[int, Any]) -> int:
    """Every array of every step on every tier, and from the nearest; returns how many there were."""
    count = 0
    for info in await store.steps():
        expected = {leaf.key: host_view(leaf) for leaf in flatten(trees[info.step]).arrays}
        for tier in (*info.tiers, None):
            for key, array in expected.items():
                found = opened(await store.spec(info.step, key, tier))
                assert_equal(found, array)
                count += 1
    return count


def assert_equal(found: ts.TensorStore, array: Array) -> None:
    native = array.astype(array.dtype.newbyteorder("="))
    if native.dtype.kind in "mM":  # zarr keeps times as integers
        native = native.view(np.int64)
    assert (found.dtype.numpy_dtype, found.shape) == (native.dtype, native.shape)
    values = found.read().result()
    assert np.ascontiguousarray(values).tobytes() == np.ascontiguousarray(native).tobytes()


async def test_stock_tensorstore_opens_everything_after_every_change(three_tiers: StoreConfig) -> None:
    trees = {step: state(step) for step in (1, 2, 3)}
    arrays = len(flatten(trees[1]).arrays)
    store = await CheckpointStore.open(three_tiers)
    await store.save(1, trees[1])
    await store.flush()
    assert await assert_opens(store, trees) == 4 * arrays

    for step in (2, 3):
        await (await store.save(step, trees[step])).reached("far")
    await store.flush()
    assert await assert_opens(store, trees) == 3 * 4 * arrays

    for step in (1, 2):
        await store.evict(step, "ram")
    await store.evict(1, "far")
    assert await assert_opens(store, trees) == (2 + 3 + 4) * arrays

    # Of step 1's pack only what never changes is left on the far tier: it is written anew.
    found = {found.tier: found.packs for found in await store.collect()}
    assert found["far"] == 1
    assert await assert_opens(store, trees) == (2 + 3 + 4) * arrays

    await store.promote(1, "far")
    for step, tier, key in ((3, "ram", "params/kernel"), (2, "disk", "params/half"), (3, "far", "params/bias")):
        await flip_chunk(store, tier, step, key)
        (repaired,) = await store.verify(step, tier, repair=True)
        assert repaired.damaged == (key,)
        assert repaired.repaired
    assert await assert_opens(store, trees) == (3 + 3 + 4) * arrays

    await crash(store)
    async with CheckpointStore.open(three_tiers) as store:
        assert await assert_opens(store, trees) == (3 + 3 + 4) * arrays
    async with CheckpointStore.open(three_tiers, read_only=True) as store:
        assert await assert_opens(store, trees) == (3 + 3 + 3) * arrays  # the end gave the memory back


ANY = st.dictionaries(st.text(max_size=4), arrays() | large_arrays(6 * 4096), max_size=4)


@settings(max_examples=15, deadline=None)
@given(tree=ANY)
def test_stock_tensorstore_opens_any_array(tree: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> None:
    place = tmp_path_factory.mktemp("any")
    tiers = {
        "disk": folder(place / "disk"),
        "far": {"kind": "kvstore", "spec": f"file://{place}/far/"},
    }
    with CheckpointStore.open(config(tiers, chunk_size=4096)).sync() as store:
        store.save(1, tree)
        store.flush()
        for leaf in flatten(tree).arrays:
            for tier in tiers:
                assert_equal(opened(store.spec(1, leaf.key, tier)), host_view(leaf))


OPEN = """
import hashlib, json, sys
import numpy as np, tensorstore as ts
for spec in json.load(sys.stdin):
    values = ts.open(spec, open=True).result().read().result()
    print(hashlib.sha256(np.ascontiguousarray(values).tobytes()).hexdigest())
assert not any(name.partition(".")[0] == "tieredckpt" for name in sys.modules)
"""


async def copied_out(spec: dict[str, Any], place: Path) -> int:
    """Copy what the index of a step has, key by key, to a folder: plain zarr."""
    kvstore = await ts.KvStore.open(spec["kvstore"], context=ts.Context())
    keys = await kvstore.list()
    for key in keys:
        path = place / key.decode()
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes((await kvstore.read(key)).value)
    return len(keys)


@pytest.mark.parametrize("codec", ["fast", "small"])
async def test_zarr_python_opens_what_is_copied_out_of_a_compressed_step(tmp_path: Path, codec: str) -> None:
    """Every array of a whole step whose dtype zarr-python knows."""
    zarr = pytest.importorskip("zarr", minversion="3")
    saved = state(1)
    async with CheckpointStore.open(config({"disk": folder(tmp_path / "disk", codec=codec)})) as store:
        await store.save(1, saved)
        await copied_out(await store.spec(1, "params/kernel", "disk"), tmp_path / "plain")
    opened = 0
    for leaf in flatten(saved).arrays:
        array = host_view(leaf)
        if array.dtype.kind == "V" or array.dtype.name.startswith(("float8", "int4", "bfloat16")):
            continue  # of `ml_dtypes`
        found = zarr.open_array(tmp_path / "plain" / leaf.key, mode="r")[...]
        native = array.astype(array.dtype.newbyteorder("="))
        np.testing.assert_array_equal(found, native.view(np.int64) if native.dtype.kind == "M" else native)
        opened += 1
    assert opened >= 9


@pytest.mark.parametrize("codec", ["none", "fast", "small"])
async def test_zarr_python_opens_what_is_copied_out_of_a_derived_step(tmp_path: Path, codec: str) -> None:
    zarr = pytest.importorskip("zarr", minversion="3")
    rng = np.random.default_rng(0)
    saved = {name: rng.standard_normal((37, 1300)).astype(name) for name in ("float16", "float32", "float64")}
    lossy = [{"keys": ["**"], "max_error": "0.4%"}]
    tiers = {"disk": folder(tmp_path / "disk"), "archive": folder(tmp_path / "archive", codec=codec, lossy=lossy)}
    async with CheckpointStore.open(config(tiers)) as store:
        await store.save(1, saved)
        await store.flush()
        await copied_out(await store.spec(1, "float32", "archive"), tmp_path / "plain")
    for name, array in saved.items():
        found = zarr.open_array(tmp_path / "plain" / name, mode="r")[:]
        assert found.dtype == array.dtype
        assert not np.array_equal(found, array)
        np.testing.assert_allclose(found, array, rtol=0.004, atol=0)


def test_another_program_without_this_library_opens_them_when_the_store_is_closed(three_tiers: StoreConfig) -> None:
    tree = state(1)
    expected = {leaf.key: host_view(leaf) for leaf in flatten(tree).arrays if leaf.dtype.isnative}
    with CheckpointStore.open(three_tiers).sync() as store:
        store.save(1, tree)
        store.flush()
        specs = [store.spec(1, key, tier) for tier in ("disk", "far") for key in expected]
    done = subprocess.run(
        [sys.executable, "-c", OPEN], input=json.dumps(specs), capture_output=True, text=True, check=True, timeout=60
    )
    digests = [hashlib.sha256(array.tobytes()).hexdigest() for array in expected.values()]
    assert done.stdout.split() == 2 * digests


@pytest.mark.parametrize("tier", ["disk", "far"])
async def test_stock_tensorstore_notices_rot_on_durable_tiers(three_tiers: StoreConfig, tier: str) -> None:
    async with CheckpointStore.open(three_tiers) as store:
        await store.save(1, state(1))
        await store.flush()
        spec = await store.spec(1, "params/kernel", tier)
        await flip_chunk(store, tier, 1, "params/kernel", 1)
        with pytest.raises(ValueError, match="Digest mismatch"):
            opened(spec).read().result()


@pytest.mark.parametrize(
    ("asked", "named"),
    [
        ((2, "step"), "no tier holds step 2"),
        ((1, "stop"), "no array 'stop'"),
        ((1, "text"), "no array 'text'"),
        ((1, "params"), "no array 'params'"),
        ((1, "step", "dusk"), "no tier 'dusk'.*did you mean 'disk'"),
    ],
    ids=str,
)
async def test_what_is_not_there_is_named(three_tiers: StoreConfig, asked: tuple[Any, ...], named: str) -> None:
    async with CheckpointStore.open(three_tiers) as store:
        await store.save(1, state(1))
        with pytest.raises(NotFound, match=named):
            await store.spec(*asked)


async def test_a_tier_that_does_not_hold_the_step_is_named(three_tiers: StoreConfig) -> None:
    async with CheckpointStore.open(three_tiers) as store:
        await store.save(1, state(1))
        await store.flush()
        await store.evict(1, "far")
        with pytest.raises(NotFound, match="tier 'far' does not hold step 1"):
            await store.spec(1, "step", "far")
