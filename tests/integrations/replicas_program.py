"""What every rank does in `test_replicas`: saves replicas of three kinds, in one of which a bit was flipped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from distributed.launch import Rank, rank_of_this_process
from integrations.torch_program import store_in
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, distribute_tensor

from tieredckpt import ReplicasDiffer
from tieredckpt.integrations.torch import TrainingState


def flip(tensor: torch.Tensor) -> None:
    """One bit of the memory of this process."""
    tensor.detach().reshape(-1).view(torch.uint8)[-1] ^= 1


def run(me: Rank) -> None:
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(300, 200))
    optimizer = torch.optim.AdamW(model.parameters())
    everywhere = distribute_tensor(torch.ones(300, 200), init_device_mesh("cpu", (me.size,)), [Replicate()])
    state = TrainingState(model=model, optimizer=optimizer, table=everywhere)

    def moments() -> Any:
        return optimizer.state[model.module.weight]["exp_avg"]

    # By step: what is divided among the ranks, and what differs on rank 1.
    cases: list[tuple[tuple[str, ...], Any]] = [
        ((), None),
        ((), lambda: model.module.weight),
        (("model", "optimizer"), moments),
        ((), everywhere.to_local),
    ]
    heard: list[Any] = []
    with store_in(Path(me.arguments["folder"])) as store:
        store.subscribe(lambda event: heard.append(event) if isinstance(event, ReplicasDiffer) else None)
        for step, (replicated, wrong) in enumerate(cases):
            model(torch.randn(4, 300)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if wrong is not None and me.rank == 1:
                flip(wrong())
            state.save(store, step, replicated=replicated)
            store.flush()
            if wrong is not None and me.rank == 1:
                flip(wrong())
        me.tell({"heard": [(event.step, event.key, event.ranks) for event in heard], "steps": store.all_steps()})


if __name__ == "__main__":
    with rank_of_this_process() as me:
        run(me)
