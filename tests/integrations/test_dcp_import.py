"""Folders of torch.distributed.checkpoint become steps, and forged ones run nothing."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import pytest
from support.frameworks import require
from support.scenes import config, folder, ram

from tieredckpt import CheckpointStore, Corrupt, Invalid, NotFound

torch = require("torch")
dcp = require("torch.distributed.checkpoint")
integration = require("tieredckpt.integrations.dcp_import")

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


class Forged:
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.mark}",)


def written(path: Path, state: dict[str, Any]) -> Path:
    dcp.save(state, checkpoint_id=path, no_dist=True)
    return path


def test_a_folder_becomes_a_step(tmp_path: Path, shared_memory: Path) -> None:
    weights = {"w": torch.arange(12.0).reshape(3, 4), "b": torch.ones(4, dtype=torch.bfloat16)}
    state = {"model": weights, "optim": {"groups": [{"lr": 0.1, "betas": (0.9, 0.99)}]}, "step": 7}
    written(tmp_path / "dcp", state)
    tiers = {"ram": ram(shared_memory), "disk": folder(tmp_path / "disk")}
    with CheckpointStore.open(config(tiers), ranks=None).sync() as store:
        integration.import_dcp(tmp_path / "dcp", store, 7)
        found = store.restore(as_="saved")
    assert found is not None
    assert found.tree["optim"] == state["optim"]
    assert found.tree["step"] == 7
    for name, tensor in weights.items():
        assert found.tree["model"][name].dtype == tensor.dtype
        assert torch.equal(found.tree["model"][name], tensor)


def test_a_forged_folder_runs_nothing(tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    forged = written(tmp_path / "metadata", {"w": torch.ones(2)})
    (forged / ".metadata").write_bytes(pickle.dumps(Forged(mark)))
    with pytest.raises(Invalid, match=r"names posix\.system, of which no checkpoint of DCP consists"):
        integration.read_dcp(forged)
    forged = written(tmp_path / "item", {"w": torch.ones(2), "odd": Forged(mark)})
    with pytest.raises(Invalid, match="'odd' is more than tensors and plain values"):
        integration.read_dcp(forged)
    assert not mark.exists()


def test_what_is_missing_or_malformed_is_named(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match=r"has no \.metadata"):
        integration.read_dcp(tmp_path)
    lost = written(tmp_path / "lost", {"w": torch.ones(2)})
    (lost / "__0_0.distcp").unlink()
    with pytest.raises(NotFound, match=r"and \.metadata names it"):
        integration.read_dcp(lost)
    torn = written(tmp_path / "torn", {"w": torch.ones(2)})
    (torn / ".metadata").write_bytes((torn / ".metadata").read_bytes()[:100])
    with pytest.raises(Corrupt, match="malformed"):
        integration.read_dcp(torn)
    short = written(tmp_path / "short", {"w": torch.ones(2)})
    loaded = pickle.loads((short / ".metadata").read_bytes())  # noqa: S301  # this test's own
    loaded.storage_data = {}
    (short / ".metadata").write_bytes(pickle.dumps(loaded))
    with pytest.raises(Corrupt, match="does not have all of 'w'"):
        integration.read_dcp(short)
    (index,) = pickle.loads((lost / ".metadata").read_bytes()).storage_data  # noqa: S301
    loaded.storage_data = {index: torch.distributed.checkpoint.filesystem._StorageInfo("../secret", 0, 1)}
    (short / ".metadata").write_bytes(pickle.dumps(loaded))
    with pytest.raises(Invalid, match="is not in the folder"):
        integration.read_dcp(short)
