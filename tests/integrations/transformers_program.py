"""A training with Hugging Face's Trainer, for processes of `test_transformers`."""

from __future__ import annotations

import hashlib
import os
import signal
import warnings
from pathlib import Path
from typing import Any

warnings.simplefilter("ignore")

import torch
from transformers import TrainerCallback, TrainingArguments, set_seed

from tieredckpt import CheckpointStore, NoSpace, SyncStore
from tieredckpt.integrations.transformers import TieredTrainer


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Dropout(0.3), torch.nn.Linear(16, 1))

    def forward(self, x: Any) -> dict[str, Any]:
        return {"loss": self.net(x).square().mean()}


class Normed(Model):
    """With statistics of BatchNorm, which each rank has of its own data."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16), torch.nn.Linear(16, 1))


class Kill(TrainerCallback):
    def __init__(self, at: int) -> None:
        self.at = at

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self.at:
            os.kill(os.getpid(), signal.SIGKILL)


class Note(TrainerCallback):
    """Adds to what the Trainer has logged, as users do."""

    def on_evaluate(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        state.log_history += [{"note": 1.0}, {"step": state.global_step, "text": "no number"}]


def store_of(folder: Path, ram: Path, *, ranks: Any = None, **disk: Any) -> SyncStore:
    tiers = {
        "ram": {"kind": "ram", "path": str(ram), "capacity": "16 MiB"},
        "disk": {"kind": "posix", "path": str(folder / "disk"), "retain": "all", "fsync": False} | disk,
    }
    return CheckpointStore.open_sync({"tiers": tiers}, ranks=ranks)


def arguments_of(folder: Path, **options: Any) -> TrainingArguments:
    defaults = {"max_steps": 17, "save_steps": 3, "save_total_limit": 2, "logging_strategy": "no"}
    return TrainingArguments(
        str(folder / "run"),
        per_device_train_batch_size=4,
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        remove_unused_columns=False,
        **(defaults | options),
    )


def trainer_of(
    folder: Path, store: SyncStore, *callbacks: Any, model: Any = None, optimizers: Any = (None, None), **options: Any
) -> TieredTrainer:
    data = [{"x": row} for row in torch.randn(40, 8, generator=torch.Generator().manual_seed(1))]
    return TieredTrainer(
        model or Model(),
        arguments_of(folder, **options),
        train_dataset=data,
        eval_dataset=data[:4],
        store=store,
        callbacks=list(callbacks),
        optimizers=optimizers,
    )


class Unstorable(torch.optim.lr_scheduler.ConstantLR):
    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"schedule": object()}


def digest_of(trainer: Any) -> str:
    found = hashlib.sha256()
    for tensor in trainer.model.state_dict().values():
        found.update(tensor.numpy().tobytes())
    for state in trainer.optimizer.state_dict()["state"].values():
        for tensor in state.values():
            found.update(tensor.numpy().tobytes())
    return found.hexdigest()


def train(folder: Path, ram: Path, kill_at: int) -> str:
    """Train to the end, or until this process is killed; what was trained, and how many steps."""
    set_seed(3)
    with store_of(folder, ram) as store:
        trainer = trainer_of(folder, store, Kill(kill_at))
        trainer.train(resume_from_checkpoint=True)
        return f"{digest_of(trainer)} {trainer.state.global_step}"


class Full(TrainerCallback):
    """One rank is told at a step that its memory is full."""

    def __init__(self, rank: int, at: int, store: SyncStore) -> None:
        self.rank, self.at, self.store, self.save = rank, at, store, store.save

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        def full(step: int, *arguments: Any, **options: Any) -> Any:
            self.save(step, *arguments, **options)
            raise NoSpace("the memory of this rank is full")

        here = state.global_step == self.at and args.process_index == self.rank
        self.store.save = full if here else self.save


def train_ranks(folder: Path, ram: Path, full_at: int, steps: int) -> dict[str, Any]:
    """What every rank of DDP does; on rank 1 a save fails."""
    set_seed(3)
    torch.distributed.init_process_group("gloo")
    with store_of(folder, ram, ranks="auto") as store:
        options = {"save_total_limit": 3, "ddp_backend": "gloo", "max_steps": steps, "save_steps": 2}
        trainer = trainer_of(folder, store, Full(1, full_at, store), **options)
        trainer.train(resume_from_checkpoint=True)
        found = {"digest": digest_of(trainer), "first": trainer._initial_global_step, "steps": store.all_steps()}
    torch.distributed.destroy_process_group()
    return found


def train_normed(folder: Path, ram: Path, steps: int) -> dict[str, Any]:
    """What every rank of DDP does with a model that has BatchNorm; its buffers after the last step."""
    set_seed(3)
    torch.distributed.init_process_group("gloo")
    with store_of(folder, ram, ranks="auto") as store:
        options = {"ddp_backend": "gloo", "max_steps": steps, "save_steps": 2, "lr_scheduler_type": "constant"}
        trainer = trainer_of(folder, store, model=Normed(), **options)
        trainer.train(resume_from_checkpoint=True)
        buffers = hashlib.sha256(b"".join(each.numpy().tobytes() for each in trainer.model.buffers())).hexdigest()
        found = {"digest": digest_of(trainer), "buffers": buffers, "first": trainer._initial_global_step}
        found["steps"] = store.all_steps()
    torch.distributed.destroy_process_group()
    return found
