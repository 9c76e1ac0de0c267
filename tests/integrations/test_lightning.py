"""Lightning over a store: its Trainer is killed and resumes, and names, removes and loads checkpoints as ever."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from distributed.launch import SOON, launch
from reliability.tiers import FaultyTiers
from support.frameworks import require

from tieredckpt import CheckpointStore, NotFound, TierUnavailable

require("lightning")
require("torchdata")
torch = require("torch")

from integrations import lightning_program as program  # noqa: E402
from lightning.fabric import Fabric  # noqa: E402

from tieredckpt.integrations.lightning import TieredCheckpointIO  # noqa: E402

pytestmark = [
    pytest.mark.timeout(4 * SOON),
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning"),
]

PROGRAM = Path(program.__file__)
RANKS = PROGRAM.with_name("lightning_ranks_program.py")


def started(folder: Path, ram: Path, kill_at: int, loader: str) -> subprocess.Popen[str]:
    arguments = [str(folder), str(ram), "3", str(kill_at), loader]
    return subprocess.Popen([sys.executable, str(PROGRAM), *arguments], stdout=subprocess.PIPE, text=True)


@pytest.mark.parametrize("loader", ["plain", "stateful"])
def test_a_training_that_was_killed_ends_as_one_that_was_not(loader: str, tmp_path: Path, shared_memory: Path) -> None:
    whole = started(tmp_path / "whole", shared_memory / "whole", -1, loader)
    killed = started(tmp_path / "killed", shared_memory / "killed", 13, loader)
    assert killed.communicate(timeout=SOON)[0] == ""
    assert killed.returncode == -signal.SIGKILL
    resumed = started(tmp_path / "killed", shared_memory / "killed", -1, loader)
    expected, found = (each.communicate(timeout=SOON)[0] for each in (whole, resumed))
    assert expected.endswith(" 15\n")
    assert found == expected


def fit(folder: Path, ram: Path, epochs: int, *callbacks: Any, module: Any = None, io: Any = None) -> Any:
    io = TieredCheckpointIO(program.store_of(folder, ram)) if io is None else io
    trainer = program.trainer_of(folder, io, epochs, *callbacks)
    torch.manual_seed(1)  # the loss falls in each epoch, so that the last is among the best
    trainer.fit(program.Module() if module is None else module, program.loader_of("plain"), ckpt_path="last")
    return trainer


def test_what_lightning_names_is_there_and_what_it_removes_is_gone(tmp_path: Path, shared_memory: Path) -> None:
    trainer = fit(tmp_path, shared_memory / "ram", 5)
    io = trainer.strategy.checkpoint_io
    best, last = trainer.checkpoint_callback.best_model_path, trainer.checkpoint_callback.last_model_path
    named = sorted(path.name for path in (tmp_path / "named").iterdir())
    assert len(named) == 3  # the best two, and the last
    steps = set()
    for path in (tmp_path / "named").iterdir():
        loaded = io.load_checkpoint(path)
        steps.add(loaded["global_step"])
        if path.stem != "last":
            assert path.stem.endswith(f"step={loaded['global_step']}")
    store = io._opened().store
    assert set(store.all_steps()) == steps
    assert io.load_checkpoint(last)["global_step"] == 25
    with pytest.raises(RuntimeError, match="size mismatch"):  # its hyperparameters are known, and can be given anew
        program.Module.load_from_checkpoint(io.as_file(best), width=8)
    module = program.Module.load_from_checkpoint(io.as_file(last))
    assert all(
        torch.equal(one, other) for one, other in zip(module.parameters(), trainer.model.parameters(), strict=True)
    )
    again = fit(tmp_path, shared_memory / "ram", 6, io=io)  # fit twice, over one store
    assert again.global_step == 30
    store.close()


def test_a_file_whose_step_was_saved_again_by_another_training_says_so(tmp_path: Path, shared_memory: Path) -> None:
    io = TieredCheckpointIO(program.store_of(tmp_path, shared_memory / "ram"))
    old, new = tmp_path / "old" / "step=1.ckpt", tmp_path / "new" / "step=1.ckpt"
    io.save_checkpoint({"global_step": 1, "w": torch.ones(3)}, old)
    assert torch.equal(io.load_checkpoint(old, map_location="cpu")["w"], torch.ones(3))
    io.save_checkpoint({"global_step": 1, "w": torch.zeros(3)}, new)  # as of the same training: both mean the newer
    assert torch.equal(io.load_checkpoint(old)["w"], torch.zeros(3))
    io._opened().store.close()
    io = TieredCheckpointIO(program.store_of(tmp_path, shared_memory / "ram"))
    io.save_checkpoint({"global_step": 1, "w": torch.full((3,), 2.0)}, new)
    with pytest.raises(NotFound, match="or a later training saved the step again"):
        io.load_checkpoint(old)
    for path in (old, new):
        io.remove_checkpoint(path)
        assert not path.exists()
    with pytest.raises(FileNotFoundError):
        io.load_checkpoint(new)
    io._opened().store.close()


def test_a_checkpoint_of_lightnings_own_is_read_without_running_it(tmp_path: Path, shared_memory: Path) -> None:
    io = TieredCheckpointIO(program.store_of(tmp_path, shared_memory / "ram"))
    torch.save({"global_step": 4, "w": torch.ones(2)}, tmp_path / "own.ckpt")
    assert io.load_checkpoint(tmp_path / "own.ckpt")["global_step"] == 4
    torch.save({"f": subprocess.run}, tmp_path / "forged.ckpt")
    with pytest.raises(Exception, match="Weights only load failed"):
        io.load_checkpoint(tmp_path / "forged.ckpt")


def test_a_failing_tier_ends_no_training(tmp_path: Path, shared_memory: Path, faults: FaultyTiers) -> None:
    class Pull(program.pl.Callback):  # type: ignore[misc, name-defined]
        def on_train_epoch_start(self, trainer: Any, *_: Any) -> None:
            if trainer.current_epoch == 1:
                faults.kill("disk", TierUnavailable("the cable was pulled"))

    trainer = fit(tmp_path, shared_memory / "ram", 3, Pull())
    assert trainer.global_step == 15
    store = trainer.strategy.checkpoint_io._opened().store
    assert store.where(15) == ("ram",)
    faults.revive("disk")
    store.close()


def test_fabric_saves_and_loads(tmp_path: Path, shared_memory: Path) -> None:
    io = TieredCheckpointIO(program.store_of(tmp_path, shared_memory / "ram"))
    fabric = Fabric(accelerator="cpu", devices=1, plugins=[io, program.LightningEnvironment()])
    model = fabric.setup(torch.nn.Linear(3, 2))
    weight = model.weight.detach().clone()
    fabric.save(tmp_path / "step-7.ckpt", {"model": model, "epoch": 2})
    torch.nn.init.zeros_(model.weight)
    state = {"model": model, "epoch": 0}
    fabric.load(tmp_path / "step-7.ckpt", state)
    assert state["epoch"] == 2
    assert torch.equal(model.weight, weight)
    assert io._opened().store.all_steps() == (7,)
    io._opened().store.close()


def test_sharded_checkpoints_are_loaded_by_another_number_of_ranks(tmp_path: Path, shared_memory: Path) -> None:
    arguments: dict[str, Any] = {name: str(tmp_path / name) for name in ("disk", "named")}
    arguments["ram"] = str(shared_memory / "ram")
    before = None
    for ranks, epochs in ((2, 1), (1, 2)):
        told = arguments | {"epochs": epochs}
        with launch("torch", RANKS, ranks=ranks, folder=tmp_path / str(ranks), arguments=told) as job:
            job.succeed()
            for rank in range(ranks):
                assert job.told(rank)["loaded"] == before
            before = job.told(0)["ended"]
            assert job.told(0)["names"][-1] == "last.ckpt"
            assert len(job.told(0)["names"]) == 2
    with CheckpointStore.open(tmp_path / "disk", read_only=True).sync() as store:
        (step,) = store.all_steps()[-1:]
        assert store.describe(step).arrays[0].key == "state_dict/net.0.weight"
