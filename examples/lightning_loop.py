"""Lightning with a store: only the list of plugins and a callback change in a program. Run it twice."""

from __future__ import annotations

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from tieredckpt.integrations.lightning import RandomState, TieredCheckpointIO


class Module(pl.LightningModule):
    """A model."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(16, 1)

    def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
        """The loss of a batch."""
        return self.layer(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """The optimizer."""
        return torch.optim.AdamW(self.parameters())


def main() -> None:
    """Train two epochs; a second run trains two more."""
    checkpoints = ModelCheckpoint("lightning-names", save_last=True, every_n_epochs=1)
    trainer = pl.Trainer(
        max_epochs=-1,
        plugins=[TieredCheckpointIO("lightning-checkpoints")],
        callbacks=[RandomState(), checkpoints, TwoEpochs()],
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
    )
    trainer.fit(Module(), torch.utils.data.DataLoader(torch.ones(32, 16), batch_size=4), ckpt_path="last")
    print(f"trained to step {trainer.global_step}")


class TwoEpochs(pl.Callback):
    """Stops after two epochs of this run."""

    left = 2

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Count the epochs."""
        self.left -= 1
        trainer.should_stop = self.left == 0


if __name__ == "__main__":
    main()
