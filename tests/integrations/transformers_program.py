"""A training with Hugging Face's Trainer: `python transformers_program.py FOLDER RAM KILL_AT`; prints its digest."""

from __future__ import annotations

import hashlib
import os
import signal
import sys
import warnings
from pathlib import Path
from typing import Any

warnings.simplefilter("ignore")

import torch  # noqa: E402
from transformers import TrainerCallback, TrainingArguments, set_seed  # noqa: E402

from tieredckpt import CheckpointStore, SyncStore  # noqa: E402
from tieredckpt.integrations.transformers import TieredTrainer  # noqa: E402


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Dropout(0.3), torch.nn.Linear(16, 1))

    def forward(self, x: Any) -> dict[str, Any]:
        return {"loss": self.net(x).square().mean()}


class Kill(TrainerCallback):
    def __init__(self, at: int) -> None:
        self.at = at

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self.at:
            os.kill(os.getpid(), signal.SIGKILL)


def store_of(folder: Path, ram: Path, **disk: Any) -> SyncStore:
    tiers = {
        "ram": {"kind": "ram", "path": str(ram), "capacity": "16 MiB"},
        "disk": {"kind": "posix", "path": str(folder / "disk"), "retain": "all", "fsync": False} | disk,
    }
    return CheckpointStore.open_sync({"tiers": tiers}, ranks=None)


def trainer_of(folder: Path, store: SyncStore, *callbacks: Any, **options: Any) -> TieredTrainer:
    data = [{"x": row} for row in torch.randn(40, 8, generator=torch.Generator().manual_seed(1))]
    defaults = {"max_steps": 17, "save_steps": 3, "save_total_limit": 2}
    arguments = TrainingArguments(
        str(folder / "run"),
        per_device_train_batch_size=4,
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        remove_unused_columns=False,
        logging_strategy="no",
        **(defaults | options),
    )
    return TieredTrainer(Model(), arguments, train_dataset=data, store=store, callbacks=list(callbacks))


def digest_of(trainer: Any) -> str:
    found = hashlib.sha256()
    for tensor in trainer.model.state_dict().values():
        found.update(tensor.numpy().tobytes())
    for state in trainer.optimizer.state_dict()["state"].values():
        for tensor in state.values():
            found.update(tensor.numpy().tobytes())
    return found.hexdigest()


def main() -> None:
    folder, ram, kill_at = sys.argv[1:]
    set_seed(3)
    with store_of(Path(folder), Path(ram)) as store:
        trainer = trainer_of(Path(folder), store, Kill(int(kill_at)))
        trainer.train(resume_from_checkpoint=True)
        print(digest_of(trainer), trainer.state.global_step)


if __name__ == "__main__":
    main()
