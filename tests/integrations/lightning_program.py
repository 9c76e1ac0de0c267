"""A training with Lightning, for processes of `test_lightning`."""

from __future__ import annotations

import hashlib
import logging
import os
import signal
import warnings
from pathlib import Path
from typing import Any

warnings.simplefilter("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.environments import LightningEnvironment
from torchdata.stateful_dataloader import StatefulDataLoader

from tieredckpt.integrations.lightning import RandomState, TieredCheckpointIO


class Module(pl.LightningModule):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = torch.nn.Sequential(torch.nn.Linear(8, width), torch.nn.Dropout(0.3), torch.nn.Linear(width, 1))

    def training_step(self, batch: Any, _: int) -> torch.Tensor:
        loss = self.net(batch[0]).square().mean()
        self.log("loss", loss, on_step=True)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)}


class Kill(pl.Callback):
    """Ends the process as a machine does that fails, when so many steps were made."""

    def __init__(self, at: int) -> None:
        self.at = at

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == self.at:
            os.kill(os.getpid(), signal.SIGKILL)


def store_of(folder: Path, ram: Path) -> dict[str, Any]:
    return {
        "tiers": {
            "ram": {"kind": "ram", "path": str(ram), "capacity": "16 MiB"},
            "disk": {"kind": "posix", "path": str(folder / "disk"), "retain": "all", "fsync": False},
        }
    }


def trainer_of(folder: Path, io: TieredCheckpointIO, epochs: int, *callbacks: Any, every: int | None = None) -> Any:
    checkpoints = ModelCheckpoint(
        folder / "named",
        monitor="loss",
        save_top_k=2,
        save_last=True,
        filename="{epoch}-{step}",
        every_n_train_steps=every,
    )
    # Of the same steps, before the other one saves them and after it.
    weights = [
        ModelCheckpoint(folder / name, mode=mode, save_weights_only=True, save_top_k=-1, every_n_train_steps=every)
        for name, mode in (("before", "min"), ("after", "max"))  # Lightning tells callbacks apart by their settings
    ]
    return pl.Trainer(
        max_epochs=epochs,
        plugins=[io, LightningEnvironment()],  # it would look for an MPI
        callbacks=[RandomState(), weights[0], checkpoints, weights[1], *callbacks],
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )


class Noisy(torch.utils.data.Dataset):
    """Each item with some noise, as of an augmentation."""

    def __init__(self) -> None:
        self.items = torch.randn(40, 8, generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> tuple[torch.Tensor]:
        return (self.items[index] + 0.1 * torch.randn(8),)


def loader_of(kind: str) -> Any:
    data = Noisy()
    cls = StatefulDataLoader if kind == "stateful" else torch.utils.data.DataLoader
    return cls(data, batch_size=8, shuffle=True)


def digest_of(module: Any, optimizer: Any) -> str:
    found = hashlib.sha256()
    for tensor in module.state_dict().values():
        found.update(tensor.numpy().tobytes())
    for state in optimizer.state_dict()["state"].values():
        for tensor in state.values():
            found.update(tensor.numpy().tobytes())
    return found.hexdigest()


def train(folder: Path, ram: Path, epochs: int, kill_at: int, kind: str) -> str:
    """Train to the end, or until this process is killed; what was trained, and how many steps."""
    pl.seed_everything(7)
    module = Module()
    io = TieredCheckpointIO(store_of(folder, ram))
    trainer = trainer_of(folder, io, epochs, Kill(kill_at), every=3 if kind == "stateful" else None)
    trainer.fit(module, loader_of(kind), ckpt_path="last")
    return f"{digest_of(module, trainer.optimizers[0])} {trainer.global_step}"
