"""Hugging Face accelerate over a store: what the Accelerator holds is saved and comes back, after a kill too."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from distributed.launch import SOON
from support.frameworks import require

from tieredckpt import CheckpointStore

torch = require("torch")
require("accelerate")
integration = require("tieredckpt.integrations.accelerate")

from accelerate import Accelerator  # noqa: E402
from accelerate.utils import DataLoaderConfiguration  # noqa: E402

pytestmark = [pytest.mark.timeout(4 * SOON), pytest.mark.filterwarnings("ignore")]


def train(folder: Path, kill_at: int) -> str:
    """Three epochs, saved after each second step; the digest of what was trained."""
    tiers = {
        "ram": {"kind": "ram", "path": str(folder / "ram"), "capacity": "16 MiB"},
        "disk": {"kind": "posix", "path": str(folder / "disk"), "fsync": False},
    }
    torch.manual_seed(5)
    loaders = DataLoaderConfiguration(use_stateful_dataloader=True, use_seedable_sampler=True)
    accelerator = Accelerator(cpu=True, dataloader_config=loaders)
    data = torch.utils.data.TensorDataset(torch.randn(20, 4, generator=torch.Generator().manual_seed(1)))
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.3), torch.nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.9)
    loader = torch.utils.data.DataLoader(data, batch_size=4, shuffle=True)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    position = Position()
    accelerator.register_for_checkpointing(position)
    with CheckpointStore.open_sync({"tiers": tiers}, ranks=None) as store:
        integration.load_state(accelerator, store)
        for epoch in range(position.epoch, 3):
            for (batch,) in loader:
                loss = model(batch).square().mean()
                accelerator.backward(loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
                position.step += 1
                if position.step % 2 == 0:
                    integration.save_state(accelerator, store, position.step)
                if position.step == kill_at:
                    os.kill(os.getpid(), signal.SIGKILL)
            position.epoch = epoch + 1
    found = hashlib.sha256()
    for state in (model.state_dict(), *optimizer.state_dict()["state"].values()):
        for tensor in state.values():
            found.update(tensor.numpy().tobytes())
    return f"{found.hexdigest()} {position.step}"


class Position:
    def __init__(self) -> None:
        self.epoch = self.step = 0

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epoch, self.step = state["epoch"], state["step"]


def started(folder: Path, kill_at: int) -> subprocess.Popen[str]:
    path = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, __file__, str(folder), str(kill_at)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": path})


def test_a_training_that_was_killed_ends_as_one_that_was_not(tmp_path: Path, shared_memory: Path) -> None:
    (tmp_path / "whole").mkdir()
    (tmp_path / "killed").mkdir()
    whole, killed = started(tmp_path / "whole", -1), started(tmp_path / "killed", 9)
    killed.communicate(timeout=SOON)
    assert killed.returncode == -signal.SIGKILL
    resumed = started(tmp_path / "killed", -1)
    expected, found = (each.communicate(timeout=SOON)[0].splitlines()[-1] for each in (whole, resumed))
    assert expected.endswith(" 15")
    assert found == expected


if __name__ == "__main__":
    sys.stdout.write(train(Path(sys.argv[1]), int(sys.argv[2])) + "\n")
