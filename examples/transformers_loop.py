"""Hugging Face's Trainer with a store: the class and one argument change. Run it twice."""

from __future__ import annotations

import sys

import torch
from transformers import TrainingArguments

from tieredckpt import CheckpointStore
from tieredckpt.integrations.transformers import TieredTrainer


class Model(torch.nn.Module):
    """A model."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(16, 1)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        """The loss of a batch."""
        return {"loss": self.layer(x).square().mean()}


def main() -> None:
    """Train to the step that the command line names, or to 10."""
    last = int(sys.argv[1]) if len(sys.argv) > 1 else 10
    arguments = TrainingArguments(
        "transformers-run", max_steps=last, save_steps=5, save_total_limit=2, report_to="none", use_cpu=True
    )
    with CheckpointStore.open_sync("transformers-checkpoints") as store:
        trainer = TieredTrainer(Model(), arguments, train_dataset=[{"x": torch.ones(16)}] * 64, store=store)
        trainer.train(resume_from_checkpoint=True)
        print(f"trained to step {trainer.state.global_step}, saved {list(store.all_steps())}")


if __name__ == "__main__":
    main()
