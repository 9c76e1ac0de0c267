"""A PyTorch training: module and optimizer as they are, the blocking face, and resuming. Run it twice."""

from __future__ import annotations

import sys
from typing import Any

from tieredckpt import CheckpointStore

STEPS_PER_RUN = 25


def main() -> None:
    """Train some steps more than the last run did."""
    try:
        import torch
    except ImportError:
        print("PyTorch is not installed: pip install torch")
        return
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(32, 256), torch.nn.ReLU(), torch.nn.Linear(256, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def state() -> dict[str, Any]:
        return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "rng": torch.get_rng_state()}

    with CheckpointStore.open(sys.argv[1] if len(sys.argv) > 1 else "torch-checkpoints").sync() as store:
        first = 1
        restored = store.restore()
        if restored:
            tensors = as_tensors(restored.tree)
            model.load_state_dict(tensors["model"])
            optimizer.load_state_dict(tensors["optimizer"])
            torch.set_rng_state(tensors["rng"])
            first = restored.step + 1
            print(f"restored step {restored.step}, loss {restored.metrics['loss']:.6f}")
        for step in range(first, first + STEPS_PER_RUN):
            inputs = torch.randn(64, 32)
            loss = torch.nn.functional.mse_loss(model(inputs), inputs.square().sum(1, keepdim=True))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if store.due(step):
                store.save(step, state(), metrics={"loss": loss.item()})
        store.flush()
        print(f"trained to step {step}, saved {[info.step for info in store.steps()]}")


def as_tensors(tree: Any) -> Any:
    """The restored tree with tensors for its arrays: a new optimizer has no state yet to be a pattern."""
    import torch

    if isinstance(tree, dict):
        return {key: as_tensors(value) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)(as_tensors(value) for value in tree)
    return torch.from_numpy(tree) if hasattr(tree, "__array__") else tree


if __name__ == "__main__":
    main()
