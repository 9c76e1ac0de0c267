"""Hugging Face accelerate with a store: the calls that save and load change. Run it twice."""

from __future__ import annotations

import torch
from accelerate import Accelerator

from tieredckpt import CheckpointStore
from tieredckpt.integrations.accelerate import load_state, save_state


def main() -> None:
    """Train ten steps more than the last run did."""
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(16, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    with CheckpointStore.open_sync("accelerate-checkpoints") as store:
        first = (load_state(accelerator, store) or 0) + 1  # for accelerator.load_state(folder)
        for step in range(first, first + 10):
            accelerator.backward(model(torch.ones(4, 16)).square().mean())
            optimizer.step()
            optimizer.zero_grad()
            if store.due(step):
                save_state(accelerator, store, step)  # for accelerator.save_state(folder)
    print(f"trained to step {step}")


if __name__ == "__main__":
    main()
