"""Hugging Face accelerate over a store: what the Accelerator holds is saved and comes back, after a kill too."""

from __future__ import annotations

import collections
import hashlib
import itertools
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from distributed.launch import SOON
from support.forked import Start, forking, ranks
from support.frameworks import lazily, need_modules, require

from tieredckpt import CheckpointStore, Invalid

need_modules("accelerate")
torch = require("torch")
accelerate = lazily("accelerate")
integration = lazily("tieredckpt.integrations.accelerate")

pytestmark = [pytest.mark.timeout(4 * SOON), pytest.mark.filterwarnings("ignore")]


@pytest.fixture(scope="module")
def start() -> Iterator[Start]:
    with forking("tieredckpt.integrations.accelerate", "integrations.test_accelerate") as started:
        yield started


def train(folder: Path, kill_at: int) -> str:
    """Three epochs, saved after each second step; the digest of what was trained."""
    tiers = {
        "ram": {"kind": "ram", "path": str(folder / "ram"), "capacity": "16 MiB"},
        "disk": {"kind": "posix", "path": str(folder / "disk"), "fsync": False},
    }
    torch.manual_seed(5)
    loaders = accelerate.utils.DataLoaderConfiguration(use_stateful_dataloader=True, use_seedable_sampler=True)
    accelerator = accelerate.Accelerator(cpu=True, dataloader_config=loaders)
    data = torch.utils.data.TensorDataset(torch.randn(20, 4, generator=torch.Generator().manual_seed(1)))
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.3), torch.nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.9)
    loader = torch.utils.data.DataLoader(data, batch_size=4, shuffle=True)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    position = Position()
    accelerator.register_for_checkpointing(position)
    with CheckpointStore.open_sync({"tiers": tiers}, ranks=None) as store:
        integration.load_state(accelerator, store)
        for epoch in range(position.epoch, 3):
            for (batch,) in loader:
                loss = model(batch).square().mean()
                accelerator.backward(loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
                position.step += 1
                if position.step % 2 == 0:
                    integration.save_state(accelerator, store, position.step)
                if position.step == kill_at:
                    os.kill(os.getpid(), signal.SIGKILL)
            position.epoch = epoch + 1
    found = hashlib.sha256()
    for state in (model.state_dict(), *optimizer.state_dict()["state"].values()):
        for tensor in state.values():
            found.update(tensor.numpy().tobytes())
    return f"{found.hexdigest()} {position.step}"


class Position:
    def __init__(self) -> None:
        self.epoch = self.step = 0

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epoch, self.step = state["epoch"], state["step"]


def test_a_training_that_was_killed_ends_as_one_that_was_not(start: Start, tmp_path: Path) -> None:
    pytest.importorskip("torchdata")
    (tmp_path / "whole").mkdir()
    (tmp_path / "killed").mkdir()
    whole, killed = start(train, tmp_path / "whole", -1), start(train, tmp_path / "killed", 9)
    assert killed.killed() == signal.SIGKILL
    resumed = start(train, tmp_path / "killed", -1)
    expected = whole.result()
    assert expected.endswith(" 15")
    assert resumed.result() == expected


def sampled(folder: Path, ram: Path, *, save: bool) -> list[Any]:
    """Save after an epoch, or load; the seed and epoch of this process's sampler, and what it draws next."""
    tiers = {
        "ram": {"kind": "ram", "path": str(ram), "capacity": "16 MiB", "on_close": "keep"},
        "disk": {"kind": "posix", "path": str(folder / "disk"), "fsync": False},
    }
    loaders = accelerate.utils.DataLoaderConfiguration(use_seedable_sampler=True)
    accelerator = accelerate.Accelerator(cpu=True, dataloader_config=loaders)
    # Of processes that load, other seeds than of those that saved.
    accelerate.utils.set_seed(7 if save else 99, device_specific=True)
    data = torch.utils.data.TensorDataset(torch.arange(24.0))
    model = torch.nn.Linear(1, 1)
    with torch.no_grad():
        model.weight.fill_(2.0)
        model.bias.fill_(1.0)
    loader = torch.utils.data.DataLoader(data, batch_size=2, shuffle=True)
    model, loader = accelerator.prepare(model, loader)
    with CheckpointStore.open_sync({"tiers": tiers}, ranks="auto") as store:
        if save:
            list(loader)
            integration.save_state(accelerator, store, 1).reached("disk")
        else:
            assert integration.load_state(accelerator, store) == 1
        (sampler,) = integration._samplers(accelerator)
        found = [sampler.initial_seed, sampler.epoch, [batch.tolist() for (batch,) in loader]]
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    return found


def _save(folder: Path, ram: Path) -> list[Any]:
    return sampled(folder, ram, save=True)


def _load(folder: Path, ram: Path) -> list[Any]:
    return sampled(folder, ram, save=False)


class Average:
    """A registered object that has numbers of each process, and shards of one array."""

    def __init__(self, process: int) -> None:
        self.number, self.noise = 10 + process, torch.full((3000,), float(process))
        mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (torch.distributed.get_world_size(),))
        whole = torch.arange(4.0)
        self.shards = torch.distributed.tensor.distribute_tensor(whole, mesh, [torch.distributed.tensor.Shard(0)])
        self.loaded: dict[str, Any] = {}

    def state_dict(self) -> Any:
        return collections.OrderedDict(number=self.number, of={"noise": self.noise, "shards": self.shards})

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loaded = state


def _registered(folder: Path, ram: Path) -> list[Any]:
    tiers = {"ram": {"kind": "ram", "path": str(ram)}, "disk": {"kind": "posix", "path": str(folder / "disk")}}
    accelerator = accelerate.Accelerator(cpu=True)
    mine = Average(accelerator.process_index)
    accelerator.register_for_checkpointing(mine)
    with CheckpointStore.open_sync({"tiers": tiers}, ranks="auto") as store:
        integration.save_state(accelerator, store, 1).reached("disk")
        assert integration.load_state(accelerator, store) == 1
        found = [mine.loaded["number"], mine.loaded["of"]["noise"].unique().tolist()]
        found += [mine.loaded["of"]["shards"].tolist(), store.where(1)]
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    return found


def _normalised(folder: Path, ram: Path) -> list[Any]:
    """Save and load a model whose statistics differ between processes; this process's before and after."""
    tiers = {"ram": {"kind": "ram", "path": str(ram)}, "disk": {"kind": "posix", "path": str(folder / "disk")}}
    accelerator = accelerate.Accelerator(cpu=True)
    model = accelerator.prepare(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2)))
    model(torch.randn(4, 2) + 10.0 * accelerator.process_index)
    statistics = accelerator.unwrap_model(model)[1].running_mean
    before = statistics.tolist()
    with CheckpointStore.open_sync({"tiers": tiers}, ranks="auto") as store:
        integration.save_state(accelerator, store, 1).reached("disk")
        statistics.zero_()
        assert integration.load_state(accelerator, store) == 1
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    return [before, statistics.tolist()]


def test_of_statistics_that_differ_under_ddp_the_first_ones_are_saved(
    start: Start, tmp_path: Path, shared_memory: Path
) -> None:
    told = [child.result() for child in ranks(start, 2, _normalised, tmp_path, shared_memory / "ram")]
    assert told[0][0] != told[1][0]
    assert [after for _, after in told] == [told[0][0]] * 2


def test_of_registered_objects_that_differ_the_first_ones_is_saved(
    start: Start, tmp_path: Path, shared_memory: Path
) -> None:
    told = [child.result() for child in ranks(start, 2, _registered, tmp_path, shared_memory / "ram")]
    for number, noise, shards, where in told:
        assert (number, noise, shards) == (10, [0.0], [0.0, 1.0, 2.0, 3.0])
        assert "disk" in where


def test_seeds_of_samplers_come_back_on_any_number_of_processes(
    start: Start, tmp_path: Path, shared_memory: Path
) -> None:
    """Each process its own on as many, though each draws in another order; those of the first on another number."""
    saved = [child.result() for child in ranks(start, 2, _save, tmp_path, shared_memory / "ram")]
    assert saved[0][0] != saved[1][0]
    assert [child.result() for child in ranks(start, 2, _load, tmp_path, shared_memory / "ram")] == saved
    (alone,) = (child.result() for child in ranks(start, 1, _load, tmp_path, shared_memory / "ram"))
    assert alone[:2] == saved[0][:2]


def _two_models(folder: Path, ram: Path, seed: int, steps: int) -> list[Any]:
    """Train two models with one optimizer and save, or load with 0 steps; what models and optimizer have then."""
    tiers = {
        "ram": {"kind": "ram", "path": str(ram), "capacity": "16 MiB", "on_close": "keep"},
        "disk": {"kind": "posix", "path": str(folder / "disk"), "fsync": False},
    }
    accelerator = accelerate.Accelerator(cpu=True)
    torch.manual_seed(seed)
    models = torch.nn.Linear(3, 4), torch.nn.Linear(4, 1)
    optimizer = torch.optim.AdamW([{"params": model.parameters()} for model in models], lr=0.1)
    first, second, optimizer = accelerator.prepare(*models, optimizer)
    with CheckpointStore.open_sync({"tiers": tiers}, ranks=None) as store:
        for _ in range(steps):
            optimizer.zero_grad()
            accelerator.backward(second(first(torch.randn(8, 3))).square().mean())
            optimizer.step()
        if steps:
            integration.save_state(accelerator, store, 1).reached("disk")
        else:
            assert integration.load_state(accelerator, store) == 1
        found = [tensor.tolist() for model in (first, second) for tensor in model.parameters()]
        found += [state["exp_avg"].tolist() for state in optimizer.state_dict()["state"].values()]
    return found


def test_models_that_one_optimizer_trains_together_are_saved(start: Start, tmp_path: Path, shared_memory: Path) -> None:
    """As the encoder of texts and the network that generates images."""
    saved = start(_two_models, tmp_path, shared_memory / "ram", 1, 2).result()
    assert start(_two_models, tmp_path, shared_memory / "ram", 2, 0).result() == saved


def _other_loaders(folder: Path) -> list[str]:
    """What `load_state` says of a step with one data loader, with none prepared, and with two."""
    data = torch.utils.data.TensorDataset(torch.arange(4.0))
    told = []
    with CheckpointStore.open_sync({"tiers": {"disk": {"kind": "posix", "path": str(folder / "disk")}}}) as store:
        for number in (1, 0, 2):
            accelerator = accelerate.Accelerator(cpu=True)
            accelerator.free_memory()
            for _ in range(number):
                accelerator.prepare(torch.utils.data.DataLoader(data, shuffle=True))
            if number == 1:
                integration.save_state(accelerator, store, 1)
                continue
            with pytest.raises(Invalid) as found:
                integration.load_state(accelerator, store)
            told.append(str(found.value))
    return told


def test_another_number_of_data_loaders_is_named(start: Start, tmp_path: Path) -> None:
    told = start(_other_loaders, tmp_path).result()
    assert [text.partition(":")[0] for text in told] == [
        "step 1 has 1 data loaders, and 0 are prepared",
        "step 1 has 1 data loaders, and 2 are prepared",
    ]


def test_a_store_whose_calls_are_awaited_is_refused(tmp_path: Path) -> None:
    accelerator, awaited = accelerate.Accelerator(cpu=True), CheckpointStore.open(tmp_path / "store")
    with pytest.raises(Invalid, match=r"takes a SyncStore, not .*CheckpointStore\.open_sync"):
        integration.save_state(accelerator, awaited, 1)
    with pytest.raises(Invalid, match=r"takes a SyncStore, not .*CheckpointStore\.open_sync"):
        integration.load_state(accelerator, awaited)


@pytest.mark.parametrize(
    ("seedable", "stateful", "told"), [(False, False, True), (True, False, False), (False, True, False)]
)
def test_an_order_of_the_data_that_is_not_saved_is_told_at_the_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, *, seedable: bool, stateful: bool, told: bool
) -> None:
    torchdata = pytest.importorskip("torchdata.stateful_dataloader")
    cls = torchdata.StatefulDataLoader if stateful else torch.utils.data.DataLoader
    loader = cls(torch.utils.data.TensorDataset(torch.ones(8)), batch_size=2, shuffle=True)
    loaders = accelerate.utils.DataLoaderConfiguration(use_stateful_dataloader=True, use_seedable_sampler=seedable)
    accelerator = accelerate.Accelerator(cpu=True, dataloader_config=loaders)
    accelerator.prepare(loader)
    tiers = {"disk": {"kind": "posix", "path": str(tmp_path / "disk"), "fsync": False}}
    with CheckpointStore.open_sync({"tiers": tiers}, ranks=None) as store:
        assert integration.load_state(accelerator, store) is None
    assert ("use_seedable_sampler=True" in caplog.text) == told


class Endless:
    """A sampler without a length, and without a truth value."""

    def __iter__(self) -> Iterator[int]:
        return itertools.cycle(range(8))

    def __bool__(self) -> bool:
        raise TypeError("no truth value")


@pytest.mark.parametrize("stateful", [False, True])
def test_samplers_of_any_kind_are_taken(tmp_path: Path, *, stateful: bool) -> None:
    pytest.importorskip("torchdata.stateful_dataloader")
    data = torch.utils.data.TensorDataset(torch.ones(8))
    loaders = accelerate.utils.DataLoaderConfiguration(use_stateful_dataloader=stateful)
    accelerator = accelerate.Accelerator(cpu=True, dataloader_config=loaders)
    accelerator.prepare(torch.utils.data.DataLoader(data, sampler=Endless()))
    tiers = {"disk": {"kind": "posix", "path": str(tmp_path / "disk"), "fsync": False}}
    with CheckpointStore.open_sync({"tiers": tiers}, ranks=None) as store:
        assert integration.load_state(accelerator, store) is None


@pytest.mark.parametrize("kind", ["DEEPSPEED", "MEGATRON_LM", "FSDP"])
def test_engines_that_keep_their_state_are_refused(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator = accelerate.Accelerator(cpu=True)
    engine = accelerate.utils.DistributedType[kind]
    monkeypatch.setitem(accelerator.state._shared_state, "distributed_type", engine)
    tiers = {"disk": {"kind": "posix", "path": str(tmp_path / "disk"), "fsync": False}}
    with CheckpointStore.open_sync({"tiers": tiers}, ranks=None) as store:
        with pytest.raises(Invalid, match=r"is not saved to a store, .*use FSDP2"):
            integration.save_state(accelerator, store, 1)
        with pytest.raises(Invalid, match=r"is not saved to a store, .*use FSDP2"):
            integration.load_state(accelerator, store)
        assert store.all_steps() == ()
