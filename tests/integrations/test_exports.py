"""Exports behind the training, read by the libraries whose formats they are."""

from __future__ import annotations

import gc
import time
import weakref
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.frameworks import need_modules, require
from support.scenes import SOON

from tieredckpt import CheckpointStore
from tieredckpt.config.formats import format_named, formats
from tieredckpt.engine.exporting.held_step import HeldStep


def state() -> dict[str, Any]:
    rng = np.random.default_rng(3)
    params = {"w": rng.standard_normal((70, 33)).astype(np.float32), "b": np.arange(7), "scale": np.array(0.5)}
    return {"params": params, "count": 3}


def of_dcp(folder: Path) -> dict[str, Any]:
    torch = require("torch")
    dcp = require("torch.distributed.checkpoint")
    into = {"params": {name: torch.zeros_like(torch.from_numpy(value)) for name, value in state()["params"].items()}}
    dcp.load(into, checkpoint_id=folder, no_dist=True)
    return {name: value.numpy() for name, value in into["params"].items()}


def of_orbax(folder: Path) -> dict[str, Any]:
    orbax = require("orbax.checkpoint")
    with orbax.StandardCheckpointer() as reader:
        found = reader.restore(folder)
    assert found["count"] == 3
    return {name: np.asarray(value) for name, value in found["params"].items()}


def of_npy(folder: Path) -> dict[str, Any]:
    return {name: np.load(folder / f"params%2F{name}.npy") for name in state()["params"]}


def of_npz(folder: Path) -> dict[str, Any]:
    with np.load(folder / "arrays.npz") as archive:
        return {name: archive[f"params/{name}"] for name in state()["params"]}


def of_safetensors(folder: Path) -> dict[str, Any]:
    load = require("safetensors.numpy").load_file
    return {name.removeprefix("params."): value for name, value in load(folder / "model.safetensors").items()}


READERS = {
    "dcp": of_dcp,
    "npy": of_npy,
    "npz": of_npz,
    "orbax": of_orbax,
    "safetensors": of_safetensors,
}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize("name", sorted(READERS))
def test_each_format_is_read_by_its_library(name: str, tmp_path: Path, shared_memory: Path) -> None:
    require({"dcp": "torch", "orbax": "orbax.checkpoint"}.get(name, "numpy"))
    source = {
        "tiers": {
            "ram": {"kind": "ram", "path": str(shared_memory / "ram"), "capacity": "16 MiB"},
            "disk": {"kind": "posix", "path": str(tmp_path / "disk"), "fsync": False},
        },
        "exports": {"out": {"format": name, "to": str(tmp_path / "out")}},
    }
    with CheckpointStore.open(source).sync() as store:
        store.save(7, state())
        store.flush()
    found = READERS[name](tmp_path / "out" / "step-7")
    assert found.keys() == state()["params"].keys()
    for key, value in state()["params"].items():
        np.testing.assert_array_equal(found[key], value)


def test_every_format_that_is_exported_has_a_reader_here() -> None:
    need_modules("torch")
    assert {name for name in formats() if format_named(name).writes} == set(READERS)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore::FutureWarning", "ignore::UserWarning")
def test_an_export_of_dcp_holds_one_array_at_a_time_beside_those_of_a_tuple(
    tmp_path: Path, shared_memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DCP writes a tuple before everything else, whatever lies before it in the tree."""
    require("torch")
    alive, most = Counter[str](), 0
    read = HeldStep.read

    def counted(self: HeldStep, arrays: Any = None) -> Any:
        nonlocal most
        for info, array in read(self, arrays):
            alive[info.key] += 1
            weakref.finalize(array, alive.__delitem__, info.key)
            until = time.monotonic() + SOON
            while len(alive) > 2 >= most and time.monotonic() < until:
                time.sleep(0.01)  # the engine's loop lets go of the part that it has read a moment later
            most = max(most, len(alive))
            yield info, array

    monkeypatch.setattr(HeldStep, "read", counted)
    source = {
        "tiers": {
            "ram": {"kind": "ram", "path": str(shared_memory / "ram"), "capacity": "16 MiB"},
            "disk": {"kind": "posix", "path": str(tmp_path / "disk"), "fsync": False},
        },
        "exports": {"out": {"format": "dcp", "to": str(tmp_path / "out")}},
    }
    params = {f"w{at}": np.full(10_000, at, np.float32) for at in range(9)}
    gc.disable()  # no collection that happens to come frees what should not be kept
    try:
        with CheckpointStore.open(source).sync() as store:
            store.save(7, {"params": params, "rest": (np.ones(3), np.zeros(2)), "z": np.ones(5)})
            store.flush()
        assert not alive
    finally:
        gc.enable()
    assert most <= 2  # that which is written, and the next one; and before them, both of the tuple
    read_back = format_named("dcp").read
    assert read_back is not None
    found = read_back(tmp_path / "out" / "step-7")
    for name, value in params.items():
        np.testing.assert_array_equal(found["params"][name].numpy(), value)
    assert [part.tolist() for part in found["rest"]] == [[1, 1, 1], [0, 0]]
