"""The calls of torch_checkpointing's manager over a store: killed and resumed, on any number of ranks."""

from __future__ import annotations

import asyncio
import inspect
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from distributed.launch import SOON, launch
from reliability.tiers import FaultyTiers
from support.cohort import cohort
from support.frameworks import require
from support.scenes import config, folder, ram

from tieredckpt import CheckpointStore, Conflict, Invalid, NoSpace, NotFound, SyncStore, TierUnavailable

torch = require("torch")
integration = require("tieredckpt.integrations.torch_checkpointing")

from integrations.torch_checkpointing_program import train
from integrations.torch_program import store_in

PROGRAM = Path(__file__).with_name("torch_checkpointing_program.py")


@pytest.fixture
def store(tmp_path: Path, shared_memory: Path, faults: FaultyTiers) -> Iterator[SyncStore]:
    tiers = {"ram": ram(shared_memory), "disk": folder(tmp_path / "disk")}
    with CheckpointStore.open(config(tiers), ranks=None).sync() as opened:
        yield opened


@pytest.fixture
def manager(store: SyncStore) -> Any:
    return integration.TieredCheckpointManager(store)


def test_it_has_the_calls_of_their_manager() -> None:
    theirs = require("torch_checkpointing").CheckpointManager
    for name in ("save", "load", "prewarm_staging", "lock", "close"):
        ours = inspect.signature(getattr(integration.TieredCheckpointManager, name)).parameters
        assert list(ours) == list(inspect.signature(getattr(theirs, name)).parameters)


def test_a_training_that_was_killed_ends_as_one_that_was_not(shared_memory: Path) -> None:
    command = [sys.executable, str(PROGRAM), str(shared_memory / "killed"), "5"]
    modules = os.environ | {"PYTHONPATH": str(PROGRAM.parents[1])}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=modules) as killed:
        through = train(shared_memory / "through")
        _, problem = killed.communicate(timeout=SOON)
    assert killed.returncode == -signal.SIGKILL, problem
    assert train(shared_memory / "killed") == through


def test_a_step_keeps_its_bytes_while_training_goes_on(manager: Any) -> None:
    weights = {"w": torch.zeros(3000), "list": [torch.zeros(2), 0], "pair": (torch.zeros(2), "text")}
    for step in (1, 2):
        weights["w"].fill_(step)
        weights["list"][0].fill_(step)
        future = manager.save(f"step_{step}", {"model": weights, "step": step, "raw": b"x" * step})
        weights["w"].fill_(-1)
    future.result(SOON)
    assert manager.store.where(2) == ("ram", "disk")
    for step in (1, 2):
        model = {"w": torch.zeros(3000), "list": [torch.zeros(2), 0], "pair": (torch.zeros(2), "")}
        tensor = model["w"]
        loaded = manager.load(f"step_{step}", into={"model": model, "step": 0})
        assert loaded["model"]["w"] is tensor
        assert (tensor.unique().tolist(), model["list"][0].tolist(), loaded["step"]) == ([step], [step] * 2, step)
        assert loaded["model"]["pair"][1] == "text"
        assert manager.load(f"step_{step}")["raw"] == b"x" * step


def test_what_the_step_lacks_stays_and_what_does_not_fit_is_named(manager: Any, caplog: Any) -> None:
    manager.save("step_1", {"model": {"a": torch.ones(2), "b": torch.ones(2)}})
    target = {"model": {"a": torch.zeros(2, dtype=torch.float64), "new": torch.zeros(2)}, "more": 5}
    loaded = manager.load("step_1", into=target)
    assert loaded["model"]["a"].tolist() == [1, 1]
    assert loaded["model"]["new"].tolist() == [0, 0]
    assert "step 1 lacks 'model/new', 'more'" in caplog.text or "step 1 lacks 'more', 'model/new'" in caplog.text
    with pytest.raises(NotFound, match="'model/new'"):
        manager.load("step_1", into=target, strict=True)
    with pytest.raises(Invalid, match="'model/a'"):
        manager.load("step_1", into={"model": {"a": torch.zeros(3)}})
    with pytest.raises(NotFound):
        manager.load("step_7", into=target)
    with pytest.raises(Invalid, match="no number"):
        manager.save("newest", {})
    with pytest.raises(Conflict, match="step 1"):
        manager.save("again_1", {})


def test_a_failing_tier_ends_no_training_and_the_future_tells_of_it(
    manager: Any, faults: FaultyTiers, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults.kill("disk", TierUnavailable("the cable was pulled"))
    with pytest.raises(TierUnavailable, match="the cable was pulled"):
        manager.save("step_1", {"w": torch.ones(2)}).result(SOON)
    with monkeypatch.context() as patched:
        patched.setattr(manager.store, "save", lambda *_: (_ for _ in ()).throw(NoSpace("no tier can take it")))
        assert isinstance(manager.save("step_2", {"w": torch.ones(2)}).exception(SOON), NoSpace)
    manager.close()
    assert manager.load("step_1")["w"].tolist() == [1, 1]
    faults.revive("disk")


def test_ranks_load_their_parts_and_one_process_all_of_it(tmp_path: Path, shared_memory: Path) -> None:
    with launch("torch", PROGRAM, ranks=2, folder=tmp_path, arguments={"folder": str(shared_memory)}) as job:
        job.succeed()
        assert [job.told(rank) for rank in range(2)] == [[True, {"at": 0}], [True, {"at": 1}]]
    with store_in(shared_memory) as store:
        manager = integration.TieredCheckpointManager(store, per_rank=["data"])
        loaded = manager.load("step_1", into={"model": {"w": torch.zeros(60, 10)}, "data": None})
    assert torch.equal(loaded["model"]["w"], torch.arange(600.0).reshape(60, 10))
    assert loaded["data"] == {"at": 0}


class Moments(NamedTuple):
    first: Any
    count: int  # type: ignore[assignment]  # hides tuple.count, as optax's do


def test_a_named_tuple_is_filled_from_a_tuple(manager: Any) -> None:
    manager.save("step_1", {"pair": (torch.ones(2), 3)}).result(SOON)
    pair = manager.load("step_1", into={"pair": Moments(torch.zeros(2), 0)})["pair"]
    assert isinstance(pair, Moments)
    assert (pair.first.tolist(), pair.count) == ([1, 1], 3)


def test_a_dtensor_of_another_dtype_is_named(manager: Any) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, distribute_tensor

    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        manager.save("step_1", {"model": {"w": distribute_tensor(torch.ones(4), mesh, [Replicate()])}}).result(SOON)
        other = distribute_tensor(torch.zeros(4, dtype=torch.bfloat16), mesh, [Replicate()])
        with pytest.raises(Invalid, match=r"'model/w' is a DTensor of torch.bfloat16, and was saved as float32"):
            manager.load("step_1", into={"model": {"w": other}})
    finally:
        torch.distributed.destroy_process_group()


async def test_a_rank_that_misses_something_keeps_no_other_from_loading(shared_memory: Path, tmp_path: Path) -> None:
    async with cohort(2, shared_memory, tmp_path) as ranks:
        managers = [integration.TieredCheckpointManager(store.sync()) for store in ranks.stores]
        saves = [asyncio.to_thread(each.save, "step_1", {"w": torch.ones(4)}) for each in managers]
        for future in await asyncio.gather(*saves):
            await asyncio.to_thread(future.result, SOON)
        ranks.let_wait(3.0)
        intos: list[dict[str, Any]] = [{"w": torch.zeros(4)}, {"w": torch.zeros(4), "more": 1}]
        loads = [
            asyncio.to_thread(each.load, "step_1", into, strict=True)
            for each, into in zip(managers, intos, strict=True)
        ]
        loaded: list[Any] = await asyncio.gather(*loads, return_exceptions=True)
        found, missed = loaded
        assert found["w"].tolist() == [1] * 4
        assert isinstance(missed, NotFound)
