"""Stores of every format version are read for ever."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import tensorstore as ts

from tieredckpt import CheckpointStore
from tieredckpt.errors import Corrupt, NotFound
from tieredckpt.format import layout

_DATA = Path(__file__).parents[1] / "data"


def _tree(k: int) -> dict[str, Any]:
    """What was saved; tuples and all, as it comes back without ``like``."""
    kernel = np.arange(4096, dtype=np.float32).reshape(64, 64) + k
    return {
        "params": {
            "dense": {"kernel": kernel, "bias": np.arange(64, dtype=ml_dtypes.bfloat16)},
            "scale": np.float32(0.5),
        },
        "layers": [
            np.arange(6, dtype=np.int64).reshape(2, 3)[:, ::-1],
            (np.array(7, dtype=np.uint8), np.zeros((0, 3), np.float16)),
        ],
        "big endian": np.arange(2000, dtype=">i4"),
        "when": np.array(["2026-01-01"], dtype="datetime64[D]"),
        "epoch": k,
        "rate": 1e-3,
        "name": "frozen/format 1",
        "blob": b"\x00\xff",
        "none": None,
        "flag": True,
        "z": 1 - 2j,
        "huge": 2**80,
    }


def _assert_same(found: Any, saved: Any) -> None:
    assert type(found) is type(saved)
    if isinstance(saved, dict):
        assert list(found) == list(saved)
        for key in saved:
            _assert_same(found[key], saved[key])
    elif isinstance(saved, list | tuple):
        for one, other in zip(found, saved, strict=True):
            _assert_same(one, other)
    elif isinstance(saved, np.ndarray):
        assert found.dtype == saved.dtype
        assert found.shape == saved.shape
        assert found.tobytes() == saved.tobytes()
    else:
        assert found == saved


@pytest.fixture
def store_folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(_DATA / "format-1", tmp_path / "store"))


@pytest.mark.parametrize(("step", "k"), [(10, 1), (20, 2), (21, 3), (None, 3)])
async def test_a_store_of_format_1_restores_bit_for_bit(store_folder: Path, step: int | None, k: int) -> None:
    config = {"store": {"name": "frozen"}, "tiers": {"disk": {"kind": "posix", "path": str(store_folder)}}}
    async with CheckpointStore.open(config, read_only=True) as store:
        restored = await store.restore(step)
        assert restored is not None
        _assert_same(restored.tree, _tree(k))
        found = {info.step: info for info in await store.steps()}
    assert [(info.step, info.serial, info.off_branch) for info in found.values()] == [
        (10, 1, False),
        (20, 2, True),
        (21, 3, False),
    ]
    assert found[10].metrics["loss"] == 0.25
    assert math.isnan(found[10].metrics["odd"])
    assert found[21].restored_from == 1


async def test_a_store_of_format_1_can_be_saved_to(store_folder: Path) -> None:
    config = {
        "store": {"name": "frozen", "chunk_size": 4096},
        "tiers": {"disk": {"kind": "posix", "path": str(store_folder)}},
    }
    marker = (store_folder / "tieredckpt.json").read_bytes()
    async with CheckpointStore.open(config) as store:
        saved = await store.save(22, _tree(3))
        assert saved.saved is not None
        assert saved.saved.new_bytes == 189  # of the arrays that lie in the index
        restored = await store.restore()
    assert restored is not None
    assert restored.step == 22
    _assert_same(restored.tree, _tree(3))
    assert (store_folder / "tieredckpt.json").read_bytes() == marker


@pytest.mark.parametrize(("step", "k"), [(10, 1), (20, 2), (21, 3), (None, 3)])
async def test_a_store_of_format_2_restores_bit_for_bit(tmp_path: Path, step: int | None, k: int) -> None:
    folder = shutil.copytree(_DATA / "format-2", tmp_path / "store")
    config = {"store": {"name": "frozen"}, "tiers": {"disk": {"kind": "posix", "path": str(folder)}}}
    async with CheckpointStore.open(config, read_only=True) as store:
        restored = await store.restore(step)
        assert restored is not None
        _assert_same(restored.tree, _tree(k))
        key = "params/dense/kernel"
        array = await ts.open(await store.spec(restored.step, key))
        assert np.array_equal(await array.read(), _tree(k)["params"]["dense"]["kernel"])


@pytest.mark.parametrize("codec", ["none", "small", "fast"])
async def test_a_store_of_format_2_can_be_saved_to(tmp_path: Path, codec: str) -> None:
    """With compressed chunks it refers to those that it has; without, it stays a store of format 2."""
    folder = shutil.copytree(_DATA / "format-2", tmp_path / "store")
    marker = (folder / "tieredckpt.json").read_bytes()
    disk = {"kind": "posix", "path": str(folder), "codec": codec}
    async with CheckpointStore.open(
        {"store": {"name": "frozen", "chunk_size": 4096}, "tiers": {"disk": disk}}
    ) as store:
        saved = await store.save(22, _tree(3))
        assert saved.saved is not None
        in_index = 189
        assert (saved.saved.new_bytes == in_index) is (codec != "none")
        assert all(not found.problem for found in await store.verify())
        restored = await store.restore()
    assert restored is not None
    _assert_same(restored.tree, _tree(3))
    assert (folder / "tieredckpt.json").read_bytes() == marker


async def test_stock_tensorstore_opens_format_1(store_folder: Path) -> None:
    async with CheckpointStore.open(
        {"tiers": {"disk": {"kind": "posix", "path": str(store_folder)}}}, read_only=True
    ) as store:
        array = await ts.open(await store.spec(21, "params/dense/kernel"))
    assert np.array_equal(await array.read(), _tree(3)["params"]["dense"]["kernel"])


async def test_derived_steps_of_format_3_are_within_their_bound(tmp_path: Path) -> None:
    """Step 20 is there exact and derived, step 10 derived alone: the kernel is rounded to 7 bits, an array left out."""
    folder = shutil.copytree(_DATA / "format-3", tmp_path / "store")
    rules = [{"keys": ["params/dense/kernel"], "max_error": "0.4%"}, {"keys": ["big endian"], "drop": True}]
    place = {"kind": "posix", "path": str(folder)}
    config = {"store": {"name": "frozen"}, "tiers": {"disk": place, "small": {**place, "lossy": rules}}}
    async with CheckpointStore.open(config, read_only=True) as store:
        exact = await store.restore(lossy=True)
        assert exact is not None
        assert not exact.lossy
        _assert_same(exact.tree, _tree(2))
        with pytest.raises(NotFound, match="lossy=True"):
            await store.restore(10)
        derived = await store.restore(10, lossy=True)
        assert derived is not None
        expected = _tree(1)
        del expected["big endian"]
        kernel = expected["params"]["dense"]["kernel"]
        expected["params"]["dense"]["kernel"] = kernel.astype(ml_dtypes.bfloat16).astype(np.float32)
        _assert_same(derived.tree, expected)
        stock = await ts.open(await store.spec(10, "params/dense/kernel", "small"))
        assert np.array_equal(await stock.read(), expected["params"]["dense"]["kernel"])
        how = (await store.describe(10)).derived["small"]
        assert 0.0019 < how.arrays["params/dense/kernel"].worst <= 0.00390625
        assert how.dropped == ("big endian",)
    async with CheckpointStore.open({"tiers": {"disk": place}}, read_only=True) as store:
        with pytest.raises(NotFound):
            await store.restore(10)


def _bytes_of(place: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in place.rglob("*") if path.is_file() and "leases" not in path.parts}


@pytest.mark.parametrize("read_only", [True, False])
async def test_a_reader_of_format_1_refuses_a_store_of_format_2_and_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, read_only: bool
) -> None:
    place = Path(shutil.copytree(_DATA / "format-2", tmp_path / "store"))
    before = _bytes_of(place)
    monkeypatch.setattr(layout, "FORMAT_VERSIONS", (1,))
    tiers = {"disk": {"kind": "posix", "path": str(place)}}
    with pytest.raises(Corrupt, match=r"holds format 2 .* reads formats 1 .*use a newer tieredckpt"):
        async with CheckpointStore.open({"store": {"name": "frozen"}, "tiers": tiers}, read_only=read_only):
            pass
    assert _bytes_of(place) == before


async def test_a_reader_of_formats_1_and_2_leaves_derived_steps_and_reads_the_exact_ones_beside_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = Path(shutil.copytree(_DATA / "format-3", tmp_path / "store"))
    before = _bytes_of(place / "derived")
    monkeypatch.setattr(layout, "FORMAT_VERSIONS", (1, 2))
    disk = {"kind": "posix", "path": str(place)}
    small = {**disk, "codec": "small", "lossy": [{"keys": ["params/dense/kernel"], "max_error": "0.4%"}]}
    async with CheckpointStore.open({"store": {"name": "frozen"}, "tiers": {"disk": disk, "small": small}}) as store:
        restored = await store.restore()
        assert restored is not None
        _assert_same(restored.tree, _tree(2))
        await store.save(30, _tree(4))
        with pytest.raises(Corrupt, match=r"holds format 3 .* reads formats 1, 2 .*use a newer tieredckpt"):
            await store.flush()
    assert _bytes_of(place / "derived") == before
