"""torch.distributed.checkpoint with a store: three lines of PyTorch's own recipe change. Run it twice."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from tieredckpt import CheckpointStore
from tieredckpt.integrations.dcp import TieredReader, TieredWriter


def main() -> None:
    """Train ten steps more than the last run did, on as many processes as torchrun starts."""
    dist.init_process_group("gloo", store=None if dist.is_torchelastic_launched() else dist.HashStore(), **alone())
    torch.manual_seed(0)  # the ranks begin with the same weights
    model = torch.nn.Linear(16, 16)
    optimizer = torch.optim.AdamW(model.parameters())
    done, saved = 0, None
    with CheckpointStore.open_sync("dcp-checkpoints") as store:  # 1
        if store.latest_step() is not None:
            weights, moments = get_state_dict(model, optimizer)
            state = {"model": weights, "optim": moments, "step": done}
            dcp.load(state, storage_reader=TieredReader(store))  # 2: for checkpoint_id=...
            set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
            done = state["step"]
        for step in range(done + 1, done + 11):
            model(torch.ones(4, 16)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            weights, moments = get_state_dict(model, optimizer)
            state = {"model": weights, "optim": moments, "step": step}
            if saved is not None:
                saved.result()  # DCP's messages of two saves would be mixed up
            saved = dcp.async_save(state, storage_writer=TieredWriter(store, step))  # 3
        saved.result()  # it is durable
    print(f"trained to step {step}")
    dist.destroy_process_group()


def alone() -> dict[str, int]:
    """Rank and size of a process without torchrun."""
    return {} if dist.is_torchelastic_launched() else {"rank": 0, "world_size": 1}


if __name__ == "__main__":
    main()
