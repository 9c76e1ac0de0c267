"""`restore`: looks at arrays or extracts them, exactly, safely, and without a trace in the store."""

from __future__ import annotations

import json
import os
import zipfile
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any
from urllib.parse import unquote

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.command_line import run, told

from tieredckpt import CheckpointStore
from tieredckpt.interchange import stored_step
from tieredckpt.interchange.numpy_files import INDEX, file_name, member_name


def save(config: Path, tree: Any) -> None:
    with CheckpointStore.open(config).sync() as store:
        store.save(1, tree)
        store.flush()


def test_a_summary_tells_dtype_shape_and_values(trained: Path) -> None:
    found = told("restore", trained, 2, "--keys", "params/*")
    weights = np.random.default_rng(2).standard_normal((100, 64)).astype(np.float32)
    assert found["arrays"][0] == {
        "key": "params/w",
        "dtype": "float32",
        "shape": [100, 64],
        "min": float(weights.min()),
        "max": float(weights.max()),
        "mean": float(weights.mean(dtype=float)),
        "first": weights.reshape(-1)[:4].tolist(),
    }
    assert found["sources"] == {"ram": 25640}
    assert found["scalars"] == {}


@pytest.mark.parametrize(
    "array",
    [
        np.empty((0, 3)),
        np.array(True),
        np.array([1 + 2j, complex("nan")]),
        np.array([np.nan, np.inf, -np.inf]),
        np.array([1, 2, 3], ml_dtypes.bfloat16),
        np.array([1, -2], ml_dtypes.int4),
        np.array([0.5, 2], ml_dtypes.float8_e4m3fn),
        np.array([0.5, 2], ml_dtypes.float8_e5m2),
        np.array([2**64 - 1], np.uint64),
    ],
    ids=str,
)
def test_every_dtype_can_be_looked_at_and_extracted(config: Path, tmp_path: Path, array: np.ndarray) -> None:
    save(config, {"a": array})
    assert run("restore", config).exit_code == 0
    assert told("restore", config)["arrays"][0]["shape"] == list(array.shape)
    told("restore", config, "--to", tmp_path / "out")
    told("restore", config, "--to", tmp_path / "out.npz")
    for found in (np.load(tmp_path / "out" / "a.npy"), np.load(tmp_path / "out.npz")["a"]):
        assert (found.shape, found.tobytes()) == (array.shape, array.tobytes())


@pytest.mark.parametrize("part", [1, 1 << 30], ids=["one at a time", "together"])
def test_an_archive_holds_the_arrays_bit_for_bit(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: int
) -> None:
    monkeypatch.setattr(stored_step, "_PART", part)
    found = told("restore", trained, 2, "--to", tmp_path / "deep" / "step.npz")
    assert found["files"] == 2
    assert found["sources"] == {"ram": 25640}
    with np.load(tmp_path / "deep" / "step.npz") as archive:
        assert sorted(archive) == ["params/b", "params/w"]
        expected = np.random.default_rng(2).standard_normal((100, 64)).astype(np.float32)
        assert archive["params/w"].tobytes() == expected.tobytes()
        assert archive["params/b"].tolist() == [2] * 5
    assert os.listdir(tmp_path / "deep") == ["step.npz"]


def test_a_folder_holds_a_file_for_each_array_and_an_index(trained: Path, tmp_path: Path) -> None:
    told("restore", trained, "--to", tmp_path / "out")
    index = json.loads((tmp_path / "out" / INDEX).read_text())
    assert index == [
        {"file": "params%2Fw.npy", "key": "params/w", "dtype": "float32", "shape": [100, 64]},
        {"file": "params%2Fb.npy", "key": "params/b", "dtype": "int64", "shape": [5]},
    ]
    assert sorted(os.listdir(tmp_path / "out")) == sorted([INDEX, *(each["file"] for each in index)])
    assert np.load(tmp_path / "out" / "params%2Fb.npy").tolist() == [3] * 5


KEYS = st.text(st.characters(), max_size=300) | st.text("./\\%~a", max_size=40)


@given(KEYS.filter(lambda key: key.isprintable()))
def test_a_name_leads_nowhere_and_gives_its_key_back(key: str) -> None:
    name = file_name(key)
    assert len(name.encode()) < 255
    assert not set("/\\\0") & set(name)
    assert name.endswith(".npy")
    assert "~" in name or unquote(name.removesuffix(".npy")) == key


@given(KEYS.filter(lambda key: key.isprintable()))
def test_a_member_of_an_archive_leads_nowhere(key: str) -> None:
    member = member_name(key)
    for path in (PurePosixPath(member), PureWindowsPath(member)):
        assert not path.is_absolute()
        assert not path.drive
        assert not path.root
        assert not {"..", "."} & set(path.parts)


def test_the_names_in_an_archive_are_the_keys(config: Path, tmp_path: Path) -> None:
    names = ["größe", "a.b", "x/y", "50%", "a b", "back\\slash", "", "..", "nul\0", "zarr.json", "層", "a:b", "d\ne"]
    save(config, {"params": {name: np.full(3, i) for i, name in enumerate(names)}})
    keys = [array["key"] for array in told("show", config)["arrays"]]
    told("restore", config, "--to", tmp_path / "out.npz")
    with np.load(tmp_path / "out.npz") as archive:
        assert list(archive) == keys
        assert [archive[key][0] for key in keys] == list(range(len(names)))
    before = os.listdir(tmp_path)
    with zipfile.ZipFile(tmp_path / "out.npz") as archive:
        archive.extractall(tmp_path / "extracted")
    assert sorted(os.listdir(tmp_path)) == sorted([*before, "extracted"])
    found = (str(path.relative_to(tmp_path / "extracted")) for path in (tmp_path / "extracted").rglob("*.npy"))
    assert sorted(found) == sorted(f"{key}.npy" for key in keys)


def test_keys_that_look_like_paths_stay_inside(config: Path, tmp_path: Path) -> None:
    keys = ["..", "../up", "/etc/passwd", "a\\b", ".", "x" * 400, "x" * 399 + "y", "nul\0", "index.json"]
    save(config, {key: np.full(3, i) for i, key in enumerate(keys)})
    out = tmp_path / "deep" / "out"
    assert told("restore", config, "--to", out)["files"] == len(keys)
    assert os.listdir(out.parent) == ["out"]
    assert sorted(np.load(path)[0] for path in out.glob("*.npy")) == list(range(len(keys)))
    told("restore", config, "--to", tmp_path / "out.npz")
    with np.load(tmp_path / "out.npz") as archive:
        assert sorted(archive[name][0] for name in archive) == list(range(len(keys)))


@pytest.mark.parametrize("name", ["out.npz", "out"])
def test_nothing_that_exists_is_replaced(trained: Path, tmp_path: Path, name: str) -> None:
    target = tmp_path / name
    (target if target.suffix else target / "mine").parent.mkdir(exist_ok=True)
    (target if target.suffix else target / "mine").write_text("mine")
    result = run("restore", trained, "--to", target)
    assert result.exit_code == 1
    assert result.stderr.startswith("Conflict: ")
    assert (target if target.suffix else target / "mine").read_text() == "mine"


@pytest.mark.parametrize("name", ["out.npz", "out"])
def test_a_damaged_step_is_extracted_not_at_all(trained: Path, tmp_path: Path, shared_memory: Path, name: str) -> None:
    for path in shared_memory.rglob("manifest.ocdbt"):
        path.unlink()
    for path in (trained.parent / "disk" / "packs").rglob("*.pack"):
        data = bytearray(path.read_bytes())
        data[100] ^= 1
        path.write_bytes(data)
    before = sorted(os.listdir(tmp_path))
    result = run("restore", trained, "--to", tmp_path / name)
    assert result.exit_code == 1
    assert result.stderr.startswith("Corrupt: array 'params/w'")
    assert sorted(os.listdir(tmp_path)) == before


def test_a_place_that_cannot_be_written_is_an_error(trained: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    result = run("restore", trained, "--to", tmp_path / "file" / "out.npz")
    assert result.exit_code == 1
    assert result.stderr.startswith("Invalid: ")


def test_a_key_that_is_not_there_names_those_near(trained: Path) -> None:
    result = run("restore", trained, "--keys", "params/q")
    assert result.exit_code == 1
    assert "'params/w'" in result.stderr


def test_scalars_are_told_of_where_arrays_are_asked_for(trained: Path) -> None:
    assert "leaves that are no arrays, not shown: 2; see `tieredckpt show`" in run("restore", trained).stderr
