"""Files of torch and its distributed checkpoints come in and go out bit for bit; forged ones are refused."""

from __future__ import annotations

import os
import subprocess
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.command_line import run
from support.frameworks import require
from support.interchange import STATE, equal, restored, save, written

from tieredckpt import CheckpointStore, Corrupt, Invalid, NotFound
from tieredckpt.interchange import import_step

torch = require("torch")
dcp = require("torch.distributed.checkpoint")

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore::FutureWarning")


def test_dcp_goes_in_and_out_again_to_the_last_bit(store: Path, tmp_path: Path) -> None:
    written(tmp_path / "checkpoint-7", STATE)
    result = run("import", f"dcp:{tmp_path / 'checkpoint-7'}", store)
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("step 7 (serial ")
    assert result.stdout.endswith("imported, and verified on tier disk\n")
    equal(restored(store, 7), STATE)
    result = run("export", store, 7, "--to", f"dcp:{tmp_path / 'out'}")
    assert result.exit_code == 0, result.output
    template: dict[str, Any] = {
        "model": {name: torch.empty_like(value) for name, value in STATE["model"].items()},
        "optim": {"state": [{"m": torch.empty(3)}, {"m": torch.empty(3)}], "groups": None},
        "pair": None,
        "step": 0,
        "note": 0,
    }
    template["optim"]["groups"] = [{"lr": 0.0, "betas": None}]
    dcp.load(template, checkpoint_id=tmp_path / "out", no_dist=True)  # the stock reader
    equal(template, STATE)
    result = run("import", f"dcp:{tmp_path / 'out'}", store, "--step", 8)
    assert result.exit_code == 0, result.output
    equal(restored(store, 8), STATE)


def test_arrays_of_numpy_become_tensors_of_dcp(store: Path, tmp_path: Path) -> None:
    save(store, {"w": np.arange(6.0).reshape(2, 3), "n": np.float32(2), "day": date(2026, 1, 2)})
    assert run("export", store, "--to", f"dcp:{tmp_path / 'out'}").exit_code == 0
    state = {"w": torch.empty(2, 3, dtype=torch.float64), "n": torch.empty(())}
    dcp.load(state, checkpoint_id=tmp_path / "out", no_dist=True)
    assert state["w"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert state["n"].item() == 2
    save(store, {"times": np.array(["2026-01-02"], "datetime64[D]")}, 2)
    result = run("export", store, 2, "--to", f"dcp:{tmp_path / 'times'}")
    assert "array 'times': torch has no dtype datetime64[D]" in result.stderr
    assert not (tmp_path / "times").exists()


def test_arrays_that_are_all_empty_become_tensors_of_dcp(store: Path, tmp_path: Path) -> None:
    save(store, {"w": np.empty((3, 0), np.float32), "step": 3})
    assert run("export", store, "--to", f"dcp:{tmp_path / 'out'}").exit_code == 0
    state = {"w": torch.empty(3, 0), "step": 0}
    dcp.load(state, checkpoint_id=tmp_path / "out", no_dist=True)
    assert state["step"] == 3


def test_arrays_in_another_byte_order_become_the_same_numbers(store: Path, tmp_path: Path) -> None:
    numbers = {f"{order}{kind}": np.arange(5).astype(order + kind) for order in "<>" for kind in ("f4", "i4")}
    save(store, numbers)
    for scheme in ("dcp", "safetensors"):
        out = tmp_path / scheme
        assert run("export", store, "--to", f"{scheme}:{out}").exit_code == 0
        with CheckpointStore.open(store).sync() as opened:
            import_step(f"{scheme}:{out}", opened, 2, overwrite=True)
            found = opened.restore(2, as_="torch")
        assert found is not None
        assert all(found.tree[name].tolist() == [0, 1, 2, 3, 4] for name in numbers)


def test_files_of_torch_save_come_in_as_weights_only(store: Path, tmp_path: Path) -> None:
    torch.save(STATE, tmp_path / "step_7.pt")
    old = {"model": STATE["model"] | {"eighth": None}}  # of which the old format knows nothing
    torch.save(old, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    assert run("import", f"torch:{tmp_path / 'step_7.pt'}", store).exit_code == 0
    assert run("import", f"torch:{tmp_path / 'old.pt'}", store, "--step", 8).exit_code == 0
    equal(restored(store, 7), STATE)
    equal(restored(store, 8), old)


class Forged:
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.mark}",)


def test_a_forged_file_of_torch_runs_nothing(store: Path, tmp_path: Path) -> None:
    torch.save({"odd": Forged(tmp_path / "ran")}, tmp_path / "forged.pt")
    result = run("import", f"torch:{tmp_path / 'forged.pt'}", store, "--step", 1)
    assert result.exit_code == 1
    assert result.stderr.startswith("Invalid: ")
    assert "is more than tensors and plain values; nothing was run" in result.stderr
    assert "posix" in result.stderr
    torch.save({"f": subprocess.run}, tmp_path / "function.pt")
    assert run("import", f"torch:{tmp_path / 'function.pt'}", store, "--step", 1).exit_code == 1
    assert not (tmp_path / "ran").exists()


def test_a_value_that_is_no_weight_is_named_without_the_advice_of_torch(store: Path, tmp_path: Path) -> None:
    """As the best loss of many a training."""
    torch.save({"best": np.float64(1)}, tmp_path / "step_1.pt")
    told = run("import", f"torch:{tmp_path / 'step_1.pt'}", store).stderr
    assert "scalar was not an allowed global by default. If you trust its source, load it with PyTorch" in told
    assert "Please" not in told


def test_damaged_and_missing_files_of_torch_are_told(tmp_path: Path) -> None:
    read = require("tieredckpt.interchange.torch_files").TORCH.read
    with pytest.raises(NotFound, match="is not there"):
        read(tmp_path / "none.pt")
    with pytest.raises(Invalid, match="is it dcp:"):
        read(tmp_path)
    torch.save(STATE, tmp_path / "cut.pt")
    (tmp_path / "cut.pt").write_bytes((tmp_path / "cut.pt").read_bytes()[:900])
    with pytest.raises(Corrupt, match=r"cut\.pt is damaged"):
        read(tmp_path / "cut.pt")


def test_a_small_file_of_torch_becomes_no_large_step(tmp_path: Path) -> None:
    read = require("tieredckpt.interchange.torch_files").TORCH.read
    torch.save({"model": [torch.ones(1).expand(1 << 40)]}, tmp_path / "large.pt")
    with pytest.raises(Invalid, match=r"large\.pt has a tensor of shape \[1099511627776\] in 4 bytes"):
        read(tmp_path / "large.pt")
    tree: Any = 1
    for _ in range(60):
        tree = [tree, tree]
    torch.save(tree, tmp_path / "many.pt")
    with pytest.raises(Invalid, match=r"many\.pt has more values than bytes"):
        read(tmp_path / "many.pt")
    weight = torch.ones(8, 8)
    torch.save({"a": weight, "b": weight, "half": weight[:4]}, tmp_path / "tied.pt")
    assert torch.equal(read(tmp_path / "tied.pt")["b"], weight)
