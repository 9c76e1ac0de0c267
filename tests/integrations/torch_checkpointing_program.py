"""What `test_torch_checkpointing` and its children do: train until they are killed, or to the end; or as ranks."""

from __future__ import annotations

import hashlib
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from integrations.torch_program import store_in

from tieredckpt.integrations.torch_checkpointing import TieredCheckpointManager

STEPS = 9


def train(folder: Path, kill_at: int = 0) -> str:
    """Train with dropout and saves after each step; SHA-256 of all that it ends with."""
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(8, 900), torch.nn.Dropout(0.5), torch.nn.Linear(900, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def state(step: int) -> dict[str, Any]:
        moments, noise = optimizer.state_dict(), torch.get_rng_state()
        return {"model": model.state_dict(), "optimizer": moments, "noise": noise, "step": step}

    with store_in(folder) as store:
        manager = TieredCheckpointManager(store)
        done = store.latest_step() or 0
        if done:
            loaded = manager.load(f"/runs/1/step_{done}", into={**state(0), "optimizer": None})
            optimizer.load_state_dict(loaded["optimizer"])
            torch.set_rng_state(loaded["noise"])
            assert loaded["step"] == done
        for step in range(done + 1, STEPS + 1):
            model(torch.randn(4, 8)).square().mean().backward()
            with manager.lock():
                optimizer.step()
            optimizer.zero_grad()
            manager.save(f"/runs/1/step_{step}", state(step))
            if step == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
        manager.close()
    tensors = [*model.parameters(), *(value for each in optimizer.state.values() for value in each.values())]
    return hashlib.sha256(b"".join(tensor.detach().numpy().tobytes() for tensor in tensors)).hexdigest()


def ranks() -> None:
    """Save DTensors and items of each rank, and load them."""
    from distributed.launch import rank_of_this_process
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    with rank_of_this_process() as me, store_in(Path(me.arguments["folder"])) as store:
        mesh = init_device_mesh("cpu", (me.size,))
        manager = TieredCheckpointManager(store, per_rank=["data"])
        expected = torch.arange(600.0).reshape(60, 10)
        state = {"model": {"w": distribute_tensor(expected, mesh, [Shard(0)])}, "data": {"at": me.rank}}
        manager.save("step_1", state).result()
        blank = distribute_tensor(torch.zeros(60, 10), mesh, [Shard(0)])
        loaded = manager.load("step_1", into={"model": {"w": blank}, "data": {"at": -1}})
        assert loaded["model"]["w"] is blank
        me.tell([torch.equal(blank.full_tensor(), expected), loaded.get("data")])


if __name__ == "__main__":
    if len(sys.argv) > 1:
        train(Path(sys.argv[1]), int(sys.argv[2]))
    else:
        ranks()
