"""What every rank does in `test_dcp`: trains an FSDP2 model and saves it through DCP, or loads it and trains on."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from distributed.launch import Rank, rank_of_this_process
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from tieredckpt import CheckpointStore, SyncStore
from tieredckpt.integrations.dcp import TieredReader, TieredWriter


def config_of(me: Rank) -> dict[str, Any]:
    return {
        "store": {"name": "dcp", "rank_deadline": 120.0},
        "tiers": {
            "ram": {"kind": "ram", "path": me.arguments["ram"], "capacity": "16 MiB", "on_close": "keep"},
            "disk": {"kind": "posix", "path": me.arguments["disk"], "fsync": False},
        },
    }


class App:
    """Model and optimizer, as PyTorch's tutorial has them."""

    def __init__(self, size: int) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(torch.nn.Linear(31, 64), torch.nn.ReLU(), torch.nn.Linear(64, 7))
        fully_shard(self.model, mesh=init_device_mesh("cpu", (size,)))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optim": optimizer}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])

    def train(self, step: int) -> None:
        inputs = torch.randn(12, 31, generator=torch.Generator().manual_seed(step))  # the same on every rank
        self.optimizer.zero_grad()
        self.model(inputs).square().mean().backward()
        self.optimizer.step()

    def digest(self) -> str:
        found = hashlib.sha256()
        flat, _ = dcp._nested_dict.flatten_state_dict(self.state_dict())
        for name in sorted(flat):
            value = flat[name]
            found.update(name.encode())
            if isinstance(value, torch.Tensor):
                whole = value.full_tensor() if isinstance(value, DTensor) else value
                found.update(whole.detach().numpy().tobytes())
            else:
                found.update(repr(value).encode())
        return found.hexdigest()


def train(me: Rank, app: App, store: SyncStore) -> None:
    """Save steps 1 to 3; of each, training changes the weights while it goes to the disk."""
    group = dist.new_group(backend="gloo")  # for DCP's thread: the training uses the other one meanwhile
    for step in range(1, 4):
        app.train(step)
        future = dcp.async_save(
            {"app": app, "step": step}, storage_writer=TieredWriter(store, step), process_group=group
        )
        digest = app.digest()
        app.train(100 + step)  # neither seen by the step that is being saved, nor by the run that resumes
        if step < 3:
            future.result()
            dist.barrier()
            dcp.load({"app": app}, storage_reader=TieredReader(store))
            assert app.digest() == digest
    future.result()
    me.tell({"digest": digest, "where": list(store.where(3))})
    me.mark("saved")
    dist.barrier()
    while True:  # until it is killed
        app.train(1000)


def go_on(me: Rank, app: App, store: SyncStore) -> None:
    """Load, tell what that was, train one step more and save it."""
    app.train(77)
    state: dict[str, Any] = {"app": app, "step": -1}
    dcp.load(state, storage_reader=TieredReader(store))
    loaded, step = app.digest(), state["step"] + 1
    app.train(step)
    dcp.save({"app": app, "step": step}, storage_writer=TieredWriter(store, step))
    store.flush()
    refused = ""
    try:  # of DCP alone, one rank's would be kept
        writer = TieredWriter(store, step + 1, reached="disk")
        dcp.save({"mine": torch.tensor([me.rank])}, storage_writer=writer)
    except dcp.api.CheckpointException as error:
        refused = str(error)
    me.tell({"loaded": loaded, "saved": app.digest(), "step": step, "refused": "'mine'" in refused})


if __name__ == "__main__":
    with rank_of_this_process() as me, CheckpointStore.open(config_of(me)).sync() as store:
        {"train": train, "go_on": go_on}[me.arguments["task"]](me, App(me.size), store)
