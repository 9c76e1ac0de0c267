"""A PyTorch training in three lines: its parts, the resume, and the save. Run it twice."""

from __future__ import annotations

import sys

from tieredckpt import CheckpointStore

STEPS_PER_RUN = 25


def main() -> None:
    """Train some steps more than the last run did."""
    try:
        import torch

        from tieredckpt.integrations.torch import TrainingState
    except ImportError:
        print("PyTorch is not installed: pip install torch")
        return
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(32, 256), torch.nn.ReLU(), torch.nn.Linear(256, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 1000)

    with CheckpointStore.open(sys.argv[1] if len(sys.argv) > 1 else "torch-checkpoints").sync() as store:
        state = TrainingState(model=model, optimizer=optimizer, scheduler=scheduler)
        first = (state.restore(store) or 0) + 1
        if first > 1:
            print(f"restored step {first - 1}, learning rate {scheduler.get_last_lr()[0]:.6f}")
        for step in range(first, first + STEPS_PER_RUN):
            inputs = torch.randn(64, 32)
            loss = torch.nn.functional.mse_loss(model(inputs), inputs.square().sum(1, keepdim=True))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            if store.due(step):
                state.save(store, step, metrics={"loss": loss.item()})
        store.flush()
        print(f"trained to step {step}, saved {[info.step for info in store.steps()]}")


if __name__ == "__main__":
    main()
