"""What `test_torch` and its children do: train, alone or as ranks, die by SIGKILL, and resume."""

from __future__ import annotations

import hashlib
import os
import random
import signal
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tieredckpt import CheckpointStore
from tieredckpt.integrations.torch import TrainingState

STEPS, KILLED_AT, BATCHES = 13, 7, 5
"""Steps in all; the one after which a training is killed, in the middle of its second pass over the data."""


def store_in(folder: Path) -> Any:
    """RAM and a folder, which outlive the process."""
    tiers = {
        "ram": {"kind": "ram", "path": str(folder / "ram"), "capacity": "16 MiB", "on_close": "keep"},
        "disk": {"kind": "posix", "path": str(folder / "disk"), "fsync": False},
    }
    return CheckpointStore.open({"store": {"name": folder.name}, "tiers": tiers}).sync()


def seed(number: int) -> None:
    """Of all generators that a training may draw from."""
    torch.manual_seed(number)
    random.seed(number)
    np.random.seed(number)


def digest(*tensors: Any) -> str:
    """SHA-256 over tensors and the states of the generators."""
    found = hashlib.sha256()
    for tensor in tensors:
        local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        found.update(local.detach().contiguous().numpy().tobytes())
    found.update(torch.get_rng_state().numpy().tobytes())
    found.update(repr((random.getstate(), np.random.get_state())).encode())
    return found.hexdigest()


def moments(optimizer: Any) -> Iterator[Any]:
    """The tensors of an optimizer's state."""
    for state in optimizer.state_dict()["state"].values():
        yield from (value for value in state.values() if isinstance(value, torch.Tensor))


def trained(folder: Path, *, plain: bool, kill_at: int = 0) -> str:
    """Train as far as it goes, with a save after each step, or of a plain loader after each pass; the digest."""
    seed(1)
    data = torch.utils.data.TensorDataset(torch.randn(4 * BATCHES, 8))
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Dropout(0.5), torch.nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=50)
    if plain:
        loader: Any = torch.utils.data.DataLoader(data, batch_size=4, shuffle=True)
        state = TrainingState(model=model, optimizer=optimizer, scheduler=scheduler)
    else:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torchdata calls what torch has deprecated
            from torchdata.stateful_dataloader import StatefulDataLoader

            loader = StatefulDataLoader(data, batch_size=4, shuffle=True)
        state = TrainingState(model=model, optimizer=optimizer, scheduler=scheduler, dataloader=loader)
    with store_in(folder) as store:
        step = state.restore(store) or 0
        while step < STEPS:
            for (inputs,) in loader:
                noise = random.random() + float(np.random.rand())
                loss = model(inputs + noise).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                scheduler.step()
                step += 1
                if not plain:
                    state.save(store, step)
                if step == kill_at:
                    os.kill(os.getpid(), signal.SIGKILL)
                if step == STEPS:
                    break
            if plain and step < STEPS:
                state.save(store, step)
        if not plain:  # what a third party has stored is loaded without a pattern
            found = store.restore(as_="saved", resume=False)
            assert found is not None
            loader.load_state_dict(found.tree["ranks"][0]["dataloader"])
            next(iter(loader))
            seed(2)
    return digest(*model.state_dict().values(), *moments(optimizer)) + str(scheduler.get_last_lr())


class Augmented(torch.utils.data.Dataset):
    """Draws in the process that loads an item, and tells its generator."""

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> Any:
        return index + torch.rand(1)

    def state_dict(self) -> dict[str, Any]:
        return {"rng": torch.get_rng_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        torch.set_rng_state(state["rng"])


def model_of_ranks(seed: int, *, norm: bool = False) -> Any:
    """What ranks train together, whole; its buffer, and the statistics of a norm, become others in training."""
    torch.manual_seed(seed)
    middle = [torch.nn.Dropout(0.5), *([torch.nn.BatchNorm1d(14)] if norm else [])]
    model = torch.nn.Sequential(torch.nn.Linear(8, 14), *middle, torch.nn.Linear(14, 3))
    model.register_buffer("seen", torch.zeros(2048))  # too large for a step's index, so that it could be divided
    return model


def weights_of(model: Any) -> str:
    """SHA-256 over whole weights."""
    whole = [weight.full_tensor() if hasattr(weight, "full_tensor") else weight for weight in model.parameters()]
    return hashlib.sha256(b"".join(weight.detach().numpy().tobytes() for weight in whole)).hexdigest()


def buffers_of(model: Any) -> str:
    """SHA-256 over the buffers."""
    return hashlib.sha256(b"".join(buffer.numpy().tobytes() for buffer in model.buffers())).hexdigest()


def parallel(kind: str) -> Any:
    """A new model, as FSDP2, tensor parallel or DDP have it."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    model = model_of_ranks(7, norm=kind == "ddp")
    if kind == "ddp":
        return torch.nn.parallel.DistributedDataParallel(model)
    if kind == "tp":
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        return parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    for layer in (model[0], model[2]):
        fully_shard(layer)
    return fully_shard(model)


def trained_together(folder: Path, rank: int, kind: str, *, until: int = STEPS, kill_at: int = 0) -> dict[str, str]:
    """The same by ranks, which have generators of their own unless they must compute alike."""
    model = parallel(kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    seed(100 + (rank if kind != "tp" else 0))
    state = TrainingState(model=model, optimizer=optimizer, epoch=0)
    with store_in(folder) as store:
        step = state.restore(store) or 0
        buffers = buffers_of(model)
        while step < until:
            next(buffer for name, buffer in model.named_buffers() if name.endswith("seen")).add_(
                1 + rank * (kind == "ddp")
            )
            loss = model(torch.randn(4, 8)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            state["epoch"] = step // BATCHES
            # Replicas are compared in the first half, and shared out in the second.
            replicated = ["model", "optimizer"] if kind == "ddp" and step > KILLED_AT else ()
            checkpoint = state.save(store, step, replicated=replicated)
            if step == kill_at:
                checkpoint.reached("disk")
                os.kill(os.getpid(), signal.SIGKILL)
    assert state["epoch"] == until // BATCHES
    return {
        "digest": digest(*model.parameters(), *model.buffers(), *moments(optimizer)),
        "weights": weights_of(model),
        "restored": buffers,
        "buffers": buffers_of(model),
    }


def ranks() -> None:
    """``die`` trains without a break, and FSDP2 again until it is killed; else that, and others half-way, go on."""
    from distributed.launch import rank_of_this_process

    with rank_of_this_process() as me:
        folder = Path(me.arguments["folder"])
        if me.arguments["task"] == "die":
            told = {"fsdp": trained_together(folder / "through", me.rank, "fsdp")}
            for kind in ("tp", "ddp"):
                told[kind] = trained_together(folder / f"through-{kind}", me.rank, kind)
            me.tell(told)
            trained_together(folder / "killed", me.rank, "fsdp", kill_at=KILLED_AT)
        told = {"fsdp": trained_together(folder / "killed", me.rank, "fsdp")}
        for kind in ("tp", "ddp"):
            trained_together(folder / kind, me.rank, kind, until=KILLED_AT)
            told[kind] = trained_together(folder / kind, me.rank, kind)
        me.tell(told)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        is_plain = sys.argv[2] == "plain"
        trained(Path(sys.argv[1]) / f"killed-{is_plain}", plain=is_plain, kill_at=KILLED_AT)
    else:
        ranks()
