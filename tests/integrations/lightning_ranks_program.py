"""What every rank does in `test_lightning`: trains an FSDP2 module with Lightning's Trainer, or goes on from it."""

from __future__ import annotations

import hashlib
import logging
import warnings
from pathlib import Path
from typing import Any

warnings.simplefilter("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from tieredckpt.integrations.lightning import RandomState, TieredModelParallelStrategy


class Module(pl.LightningModule):
    def __init__(self, groups: list[list[str]]) -> None:
        super().__init__()
        self.groups = groups
        self.net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 3))

    def configure_model(self) -> None:
        if not isinstance(self.net[0].weight, DTensor):
            fully_shard(self.net, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch: Any, _: int) -> torch.Tensor:
        loss = self.net(batch).square().mean()
        self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def configure_optimizers(self) -> Any:
        named = dict(self.net.named_parameters())
        groups = [{"params": [named[name] for name in group]} for group in self.groups]
        return torch.optim.AdamW(groups, lr=1e-2)


def digest_of(module: Any, optimizer: Any) -> str:
    found = hashlib.sha256()
    for tensor in module.parameters():
        for each in (tensor, *(optimizer.state[tensor][name] for name in ("exp_avg", "exp_avg_sq"))):
            found.update(each.detach().full_tensor().numpy().tobytes())
    return found.hexdigest()


class Told(pl.Callback):
    """The digest with which the training begins, and that with which it ends."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        if trainer.optimizers[0].state:
            self.loaded = digest_of(pl_module, trainer.optimizers[0])

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.ended = digest_of(pl_module, trainer.optimizers[0])
        self.step = trainer.global_step


def train(arguments: dict[str, Any], size: int) -> dict[str, Any]:
    pl.seed_everything(7)
    config = {
        "tiers": {
            "ram": {"kind": "ram", "path": arguments["ram"], "capacity": "16 MiB", "on_close": "keep"},
            "disk": {"kind": "posix", "path": arguments["disk"], "retain": "all", "fsync": False},
        }
    }
    folder, told = Path(arguments["named"]), Told()
    trainer = pl.Trainer(
        max_epochs=arguments["epochs"],
        accelerator="cpu",
        devices=size,
        strategy=TieredModelParallelStrategy(config, data_parallel_size=size, tensor_parallel_size=1),
        callbacks=[
            RandomState(),
            ModelCheckpoint(folder, monitor="loss", save_last=True, save_top_k=1),
            ModelCheckpoint(arguments["weights"], mode="max", save_weights_only=True, save_top_k=-1),
            told,
        ],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )
    data = torch.randn(24, 8, generator=torch.Generator().manual_seed(1))
    module = Module(arguments.get("groups", [["0.weight", "0.bias", "2.weight", "2.bias"]]))
    trainer.fit(module, torch.utils.data.DataLoader(data, batch_size=4), ckpt_path="last")
    names = sorted(path.name for path in folder.iterdir())
    return {"loaded": getattr(told, "loaded", None), "ended": told.ended, "step": told.step, "names": names}
