"""The example of torch_checkpointing with a store: three lines change. Run it twice."""

from __future__ import annotations

import torch

from tieredckpt.integrations.torch_checkpointing import TieredCheckpointManager  # 1: for CheckpointManager


def main() -> None:
    """Train ten steps more than the last run did."""
    torch.manual_seed(0)
    model = torch.nn.Linear(16, 16)
    optimizer = torch.optim.AdamW(model.parameters())
    manager = TieredCheckpointManager("manager-checkpoints")  # 2: for CheckpointManager()
    newest = manager.store.latest_step()  # 3: for a look at the folder
    done = 0
    if newest is not None:
        loaded = manager.load(f"step_{newest}", into={"model": model.state_dict(), "optimizer": None, "step": 0})
        optimizer.load_state_dict(loaded["optimizer"])
        done = loaded["step"]
    for step in range(done + 1, done + 11):
        model(torch.ones(4, 16)).square().mean().backward()
        with manager.lock():
            optimizer.step()
        optimizer.zero_grad()
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
        manager.save(f"step_{step}", state)
    manager.close()
    print(f"trained to step {step}")


if __name__ == "__main__":
    main()
