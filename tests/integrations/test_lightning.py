"""Lightning over a store: its Trainer is killed and resumes, and names, removes and loads checkpoints as ever."""

from __future__ import annotations

import errno
import os
import pickle
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from distributed.launch import SOON
from reliability.tiers import FaultyTiers
from support.forked import Start, forking, ranks
from support.frameworks import lazily, need_modules, require

from tieredckpt import CheckpointStore, Invalid, NotFound, TierUnavailable

need_modules("lightning", "torchdata")
torch = require("torch")
lightning = lazily("lightning")
program = lazily("integrations.lightning_program")
ranks_program = lazily("integrations.lightning_ranks_program")
named_steps = lazily("tieredckpt.integrations._named_steps")

pytestmark = [
    pytest.mark.timeout(4 * SOON),
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning"),
]


@pytest.fixture(scope="module")
def start() -> Iterator[Start]:
    with forking("integrations.lightning_program", "integrations.lightning_ranks_program") as started:
        yield started


@pytest.mark.parametrize("loader", ["plain", "stateful"])
def test_a_training_that_was_killed_ends_as_one_that_was_not(
    start: Start, loader: str, tmp_path: Path, shared_memory: Path
) -> None:
    """With two further callbacks that save weights only, of the same steps."""
    whole = start(program.train, tmp_path / "whole", shared_memory / "whole", 3, -1, loader)
    killed = start(program.train, tmp_path / "killed", shared_memory / "killed", 3, 13, loader)
    assert killed.killed() == signal.SIGKILL
    resumed = start(program.train, tmp_path / "killed", shared_memory / "killed", 3, -1, loader)
    expected = whole.result()
    assert expected.endswith(" 15")
    assert resumed.result() == expected


def fit(folder: Path, ram: Path, epochs: int, *callbacks: Any, io: Any = None) -> Any:
    io = program.TieredCheckpointIO(program.store_of(folder, ram)) if io is None else io
    trainer = program.trainer_of(folder, io, epochs, *callbacks)
    torch.manual_seed(1)  # the loss falls in each epoch, so that the last is among the best
    trainer.fit(program.Module(), program.loader_of("plain"), ckpt_path="last")
    return trainer


def test_what_lightning_names_is_there_and_what_it_removes_is_gone(tmp_path: Path, shared_memory: Path) -> None:
    trainer = fit(tmp_path, shared_memory / "ram", 5)
    io = trainer.strategy.checkpoint_io
    (monitored,) = (each for each in trainer.checkpoint_callbacks if each.monitor)
    best, last = monitored.best_model_path, monitored.last_model_path
    assert len(list((tmp_path / "named").iterdir())) == 3  # the best two, and the last
    steps = set()
    for path in (tmp_path / "named").iterdir():
        loaded = io.load_checkpoint(path)
        steps.add(loaded["global_step"])
        assert loaded["optimizer_states"]
        if path.stem != "last":
            assert path.stem.endswith(f"step={loaded['global_step']}")
    assert steps <= {5, 10, 15, 20, 25}
    for folder in ("before", "after"):  # weights only, of every epoch
        for path in (tmp_path / folder).iterdir():
            loaded = io.load_checkpoint(path)
            assert "optimizer_states" not in loaded
            assert "callbacks" not in loaded
            assert path.stem.endswith(f"step={loaded['global_step']}")
        assert len(list((tmp_path / folder).iterdir())) == 5
    store = io._opened().store
    assert store.all_steps() == (5, 10, 15, 20, 25)
    for path in (*(tmp_path / "before").iterdir(), *(tmp_path / "after").iterdir()):
        io.remove_checkpoint(path)
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


def test_a_step_has_as_metrics_what_lightning_chose_it_by(tmp_path: Path, shared_memory: Path) -> None:
    """So that a policy, here of an export, can choose the best; no step has the score of another one."""

    class Log(program.pl.Callback):
        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            pl_module.log("rising", float(trainer.current_epoch))
            pl_module.log("undefined", float("nan"))

    others = [program.ModelCheckpoint(tmp_path / name, monitor=name) for name in ("rising", "undefined")]
    trainer = fit(tmp_path, shared_memory / "ram", 2, Log(), *others)
    (monitored,) = (each for each in trainer.checkpoint_callbacks if each.monitor == "loss")
    losses = {named_steps.reference_at(path).step: score for path, score in monitored.best_k_models.items()}
    for each in others:
        assert named_steps.reference_at(each.best_model_path).step == 5
    store = trainer.strategy.checkpoint_io._opened().store
    metrics = {info.step: info.metrics for info in store.steps()}
    assert metrics == {
        5: {"loss": losses[5].item(), "rising": 0.0, "undefined": float("inf")},  # as Lightning has it instead of NaN
        10: {"loss": losses[10].item()},
    }
    store.close()


def test_a_later_training_over_the_same_store_replaces_no_step(
    tmp_path: Path, shared_memory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def saved(value: float) -> dict[str, Any]:
        return {"global_step": 1, "w": torch.full((3,), value)}

    old, final, new = (tmp_path / name / "step=1.ckpt" for name in ("old", "final", "new"))
    io = program.TieredCheckpointIO(program.store_of(tmp_path, shared_memory / "ram"))
    io.save_checkpoint(saved(1.0), old)
    assert torch.equal(io.load_checkpoint(old, map_location="cpu")["w"], torch.ones(3))
    io.teardown()
    io.save_checkpoint(saved(1.0), final)  # as after fit: the same weights, and both paths mean them
    assert not caplog.records
    io._opened().store.close()
    io = program.TieredCheckpointIO(program.store_of(tmp_path, shared_memory / "ram"))
    io.save_checkpoint(saved(2.0), new)
    assert "the store has a step 1 already, of an earlier training" in caplog.text
    for path, value in ((old, 1.0), (final, 1.0), (new, 2.0)):
        assert torch.equal(io.load_checkpoint(path)["w"], saved(value)["w"])
    for path in (old, final):
        path.rename(path.with_suffix(".moved"))
    io.save_checkpoint(saved(3.0), tmp_path / "third.ckpt")
    assert torch.equal(io.load_checkpoint(tmp_path / "third.ckpt")["w"], saved(3.0)["w"])
    assert torch.equal(io.load_checkpoint(old.with_suffix(".moved"))["w"], torch.ones(3))
    io._opened().store.close()


def test_a_file_whose_step_the_store_has_not_says_so(tmp_path: Path, shared_memory: Path) -> None:
    io = program.TieredCheckpointIO(program.store_of(tmp_path, shared_memory / "ram"))
    for step in (1, 2):
        io.save_checkpoint({"global_step": step, "w": torch.ones(3)}, tmp_path / f"{step}.ckpt")
    io.teardown()
    io._opened().store.delete(1)
    with pytest.raises(NotFound, match=r"1\.ckpt names step 1 \(serial 1\), which the store does not have"):
        io.load_checkpoint(tmp_path / "1.ckpt")
    io.remove_checkpoint(tmp_path / "1.ckpt")
    with pytest.raises(FileNotFoundError):
        io.load_checkpoint(tmp_path / "1.ckpt")
    io._opened().store.close()


def rarely_on_disk(tmp_path: Path, ram: Path) -> dict[str, Any]:
    store = program.store_of(tmp_path, ram)
    store["tiers"]["disk"]["promote"] = {"kind": "every_n_steps", "n": 2}
    return store


def test_after_the_loss_of_a_node_a_path_means_what_it_named_before(
    tmp_path: Path, shared_memory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    io = program.TieredCheckpointIO(rarely_on_disk(tmp_path, shared_memory / "first"))
    for step in (1, 2, 3):
        io.save_checkpoint({"global_step": step, "w": torch.full((3,), float(step))}, tmp_path / "last.ckpt")
        io.save_checkpoint({"global_step": step, "w": torch.full((3,), float(step))}, tmp_path / f"{step}.ckpt")
    io.teardown()
    io._opened().store.close()
    io = program.TieredCheckpointIO(rarely_on_disk(tmp_path, shared_memory / "of another node"))
    assert io.load_checkpoint(tmp_path / "last.ckpt")["global_step"] == 2
    assert "last.ckpt names step 3, which the store does not have: it takes step 2" in caplog.text
    with pytest.raises(NotFound, match=r"3\.ckpt names step 3"):
        io.load_checkpoint(tmp_path / "3.ckpt")
    io._opened().store.close()


@pytest.mark.parametrize("later", ["last", "3"], ids=["written over", "removed"])
def test_what_was_removed_while_it_was_needed_is_deleted_by_a_later_process(
    later: str, tmp_path: Path, shared_memory: Path
) -> None:
    io = program.TieredCheckpointIO(rarely_on_disk(tmp_path, shared_memory / "ram"))
    for step, name in ((2, "last"), (3, later)):
        io.save_checkpoint({"global_step": step, "w": torch.ones(3)}, tmp_path / f"{name}.ckpt")
    if later != "last":
        io.remove_checkpoint(tmp_path / "last.ckpt")
    io.teardown()
    assert io._opened().store.all_steps() == (2, 3)  # step 3 is in RAM alone
    io._opened().store.close()
    io = program.TieredCheckpointIO(rarely_on_disk(tmp_path, shared_memory / "ram"))
    io.save_checkpoint({"global_step": 4, "w": torch.ones(3)}, tmp_path / "4.ckpt")
    io.teardown()
    assert io._opened().store.all_steps() == (3, 4)
    assert {path.name for path in tmp_path.iterdir()} == {"disk", f"{later}.ckpt", "4.ckpt"}
    io._opened().store.close()


@pytest.mark.parametrize("lossy", [False, True], ids=["", "also with a nearer tier of lossy copies"])
def test_the_checkpoint_before_slurm_ends_the_job_outlives_the_node(
    tmp_path: Path, shared_memory: Path, lossy: bool
) -> None:
    store = rarely_on_disk(tmp_path, shared_memory / "first")
    if lossy:
        rules = [{"keys": ["**"], "max_error": "1%"}]
        small = {"kind": "posix", "path": str(tmp_path / "small"), "fsync": False, "lossy": rules}
        store["tiers"] = {"ram": store["tiers"]["ram"], "small": small, "disk": store["tiers"]["disk"]}
    io = program.TieredCheckpointIO(store)
    io.save_checkpoint({"global_step": 1, "w": torch.ones(3)}, tmp_path / "last.ckpt")
    io.save_checkpoint({"global_step": 3, "w": torch.zeros(3)}, tmp_path / "hpc_ckpt_1.ckpt")
    assert io._opened().store.where(1) == ("ram",)
    assert "disk" in io._opened().store.where(3)
    io._opened().store.close()


@pytest.mark.parametrize(
    ("names", "told"), [(["ram"], "no tier outlives it"), (["ram", "disk"], "is not on tier 'disk': ")], ids=len
)
def test_the_checkpoint_before_the_end_of_a_job_that_is_lost_with_the_node_is_told(
    tmp_path: Path, shared_memory: Path, faults: FaultyTiers, caplog: pytest.LogCaptureFixture, names: Any, told: str
) -> None:
    store = rarely_on_disk(tmp_path, shared_memory / "ram")
    io = program.TieredCheckpointIO({"store": {"name": "run"}, "tiers": {name: store["tiers"][name] for name in names}})
    io.save_checkpoint({"global_step": 1, "w": torch.ones(3)}, tmp_path / "last.ckpt")
    if "disk" in names:
        faults.kill("disk")
    io.save_checkpoint({"global_step": 3, "w": torch.zeros(3)}, tmp_path / "hpc_ckpt_1.ckpt")
    assert "step 3, the last before the job ends," in caplog.text
    assert told in caplog.text
    if "disk" in names:
        faults.revive("disk")
    io._opened().store.close()


def test_hyperparameters_that_no_store_takes_are_left_out_and_told_once(
    tmp_path: Path, shared_memory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    io = program.TieredCheckpointIO(program.store_of(tmp_path, shared_memory / "ram"))
    given = {"hyper_parameters": {"rate": 0.1, "loss": torch.nn.MSELoss()}, "hparams_type": dict, "w": torch.ones(3)}
    for step in (1, 2):
        io.save_checkpoint({"global_step": step, **given}, tmp_path / f"{step}.ckpt")
    found = io.load_checkpoint(tmp_path / "2.ckpt")
    assert found["hyper_parameters"] == {"rate": 0.1}
    assert "hparams_type" not in found
    told = [record.getMessage() for record in caplog.records if "is left out" in record.getMessage()]
    assert sorted(message.partition(",")[0] for message in told) == ["hparams_type", "hyper_parameters/loss"]
    with pytest.raises(Invalid, match="callbacks/mine"):  # a state is never left out
        io.save_checkpoint({"global_step": 3, "callbacks": {"mine": object()}}, tmp_path / "3.ckpt")
    io._opened().store.close()


def test_a_step_that_is_saved_again_takes_no_path_back_from_a_later_step(tmp_path: Path, shared_memory: Path) -> None:
    io = program.TieredCheckpointIO(program.store_of(tmp_path, shared_memory / "ram"))
    for step, name in ((1, "1.ckpt"), (1, "last.ckpt"), (2, "last.ckpt"), (1, "again.ckpt")):
        io.save_checkpoint({"global_step": step, "w": torch.ones(3)}, tmp_path / name)
    steps = {name: io.load_checkpoint(tmp_path / f"{name}.ckpt")["global_step"] for name in ("1", "again", "last")}
    assert steps == {"1": 1, "again": 1, "last": 2}
    io._opened().store.close()


def test_a_path_on_an_object_store_is_refused(tmp_path: Path, shared_memory: Path) -> None:
    io = program.TieredCheckpointIO(program.store_of(tmp_path, shared_memory / "ram"))
    with pytest.raises(Invalid, match=r"s3://bucket/run/1\.ckpt.*as a tier"):
        io.save_checkpoint({"global_step": 1, "w": torch.ones(3)}, "s3://bucket/run/1.ckpt")


def test_a_step_stays_whose_names_cannot_be_read(
    tmp_path: Path, shared_memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    io = program.TieredCheckpointIO(program.store_of(tmp_path, shared_memory / "ram"))
    for path in ("1.ckpt", "also.ckpt"):
        io.save_checkpoint({"global_step": 1, "w": torch.ones(3)}, tmp_path / path)
    io.save_checkpoint({"global_step": 2, "w": torch.ones(3)}, tmp_path / "2.ckpt")
    io.teardown()
    read = open

    def stale(path: Any, *arguments: Any, **options: Any) -> Any:
        if Path(path).name == "also.ckpt":
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(path))
        return read(path, *arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(named_steps, "open", stale, raising=False)
        io.remove_checkpoint(tmp_path / "1.ckpt")
    assert torch.equal(io.load_checkpoint(tmp_path / "also.ckpt")["w"], torch.ones(3))
    io._opened().store.close()


def test_a_checkpoint_of_lightnings_own_is_read_without_running_it(tmp_path: Path, shared_memory: Path) -> None:
    io = program.TieredCheckpointIO(program.store_of(tmp_path, shared_memory / "ram"))
    torch.save({"global_step": 4, "w": torch.ones(2)}, tmp_path / "own.ckpt")
    assert io.load_checkpoint(tmp_path / "own.ckpt")["global_step"] == 4
    torch.save({"f": subprocess.run}, tmp_path / "forged.ckpt")
    with pytest.raises(Invalid, match=r"forged\.ckpt is more than tensors and plain values; nothing was run: "):
        io.load_checkpoint(tmp_path / "forged.ckpt")


def test_of_two_stores_with_names_in_one_folder_each_deletes_its_own_steps_alone(
    tmp_path: Path, shared_memory: Path
) -> None:
    first, second = (
        program.TieredCheckpointIO(rarely_on_disk(tmp_path / name, shared_memory / name)) for name in ("a", "b")
    )
    for step, name in ((2, "a2"), (3, "a3")):
        first.save_checkpoint({"global_step": step, "w": torch.ones(3)}, tmp_path / f"{name}.ckpt")
    first.remove_checkpoint(tmp_path / "a2.ckpt")  # which the store still needs
    for step in (2, 3, 4):
        second.save_checkpoint({"global_step": step, "w": torch.ones(3)}, tmp_path / f"b{step}.ckpt")
    second.teardown()
    assert second._opened().store.all_steps() == (2, 3, 4)
    second._opened().store.close()
    first.save_checkpoint({"global_step": 4, "w": torch.ones(3)}, tmp_path / "a4.ckpt")
    first.teardown()
    assert first._opened().store.all_steps() == (3, 4)
    first._opened().store.close()


def test_a_plugin_can_be_sent_to_processes_that_are_spawned(tmp_path: Path) -> None:
    assert pickle.dumps(program.TieredCheckpointIO(tmp_path))


def test_saves_in_a_thread_of_lightning_and_removals_beside_them_open_one_store(
    tmp_path: Path, shared_memory: Path
) -> None:
    io = program.TieredCheckpointIO(program.store_of(tmp_path, shared_memory / "ram"))
    behind = lightning.pytorch.plugins.io.AsyncCheckpointIO(io)
    for step in (1, 2, 3):
        behind.save_checkpoint({"global_step": step, "w": torch.full((3,), float(step))}, tmp_path / f"{step}.ckpt")
        behind.remove_checkpoint(tmp_path / "absent.ckpt")
    behind.teardown()
    assert io._opened().store.all_steps() == (1, 2, 3)
    io._opened().store.close()


def test_a_failing_tier_ends_no_training(tmp_path: Path, shared_memory: Path, faults: FaultyTiers) -> None:
    class Pull(program.pl.Callback):
        def on_train_epoch_start(self, trainer: Any, *_: Any) -> None:
            if trainer.current_epoch == 1:
                faults.kill("disk", TierUnavailable("the cable was pulled"))

    trainer = fit(tmp_path, shared_memory / "ram", 3, Pull())
    assert trainer.global_step == 15
    store = trainer.strategy.checkpoint_io._opened().store
    assert store.where(15) == ("ram",)
    faults.revive("disk")
    store.close()


def test_a_checkpoint_that_no_tier_takes_has_no_name_and_ends_no_training(
    tmp_path: Path, faults: FaultyTiers, caplog: pytest.LogCaptureFixture
) -> None:
    disk = {"kind": "posix", "path": str(tmp_path / "disk"), "fsync": False, "retries": 0}
    io = program.TieredCheckpointIO({"tiers": {"disk": disk}})
    io.save_checkpoint({"global_step": 1, "w": torch.ones(3)}, tmp_path / "1.ckpt")
    faults.kill("disk")
    io.save_checkpoint({"global_step": 2, "w": torch.zeros(3)}, tmp_path / "2.ckpt")
    assert "step 2 was not saved" in caplog.text
    assert not (tmp_path / "2.ckpt").exists()
    faults.revive("disk")
    while not all(tier.healthy for tier in io._opened().store.tier_infos()):
        time.sleep(0.01)
    io.save_checkpoint({"global_step": 3, "w": torch.zeros(3)}, tmp_path / "3.ckpt")
    assert io.load_checkpoint(tmp_path / "3.ckpt")["w"].tolist() == [0, 0, 0]
    io._opened().store.close()


def test_fabric_saves_and_loads(tmp_path: Path, shared_memory: Path) -> None:
    io = program.TieredCheckpointIO(program.store_of(tmp_path, shared_memory / "ram"))
    fabric = lightning.Fabric(accelerator="cpu", devices=1, plugins=[io, program.LightningEnvironment()])
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


def test_fabric_may_name_the_step_in_the_folder_of_the_file(
    tmp_path: Path, shared_memory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As litgpt does; its last checkpoint has no number at all, and ends no training."""
    io = program.TieredCheckpointIO(program.store_of(tmp_path, shared_memory / "ram"))
    fabric = lightning.Fabric(accelerator="cpu", devices=1, plugins=[io, program.LightningEnvironment()])
    folders = {"step-00000002": 2, "iter_4": 4, "global_step6": 6, "Checkpoint-8": 8}
    for folder, step in folders.items():
        fabric.save(tmp_path / folder / "lit_model.pth", {"count": step})
    assert io._opened().store.all_steps() == tuple(folders.values())
    assert "not to the store" not in caplog.text
    for folder in ("final", "version_3", "42"):
        fabric.save(tmp_path / folder / "lit_model.pth", {"count": 11})
        assert f"{folder}/lit_model.pth is written by Lightning alone, not to the store" in caplog.text
        assert torch.load(tmp_path / folder / "lit_model.pth") == {"count": 11}
    for folder, count in (folders | {"final": 11}).items():
        state = {"count": 0}
        fabric.load(tmp_path / folder / "lit_model.pth", state)
        assert state == {"count": count}
    assert io._opened().store.all_steps() == tuple(folders.values())
    io._opened().store.close()


@pytest.mark.parametrize(
    ("state", "path", "step"),
    [
        ({"step": 5}, "step-100/model-7.pth", 5),
        ({"step": np.int64(5)}, "model.pth", 5),
        ({"step": torch.tensor(5)}, "model.pth", 5),
        ({"global_step": 6, "step": 5}, "model.pth", 6),
        ({"step": True}, "model-7.pth", 7),
        ({"step": torch.tensor(True)}, "model-7.pth", 7),
        ({"step": 0.5}, "model-7.pth", 7),
        ({}, "model-7.pth", 7),
        ({}, "runs/42/model-7.pth", 7),
        ({}, "epoch=3-step=40.ckpt", 40),
        ({}, "step-100/epoch=3-step=40-v1.ckpt", 40),
        ({}, "step-100/model_v2.pth", 100),
        ({}, "step-100/rank_0.pt", 100),
        ({}, "epoch=3-STEP=40/model_v2.pth", 40),
        ({}, "step-99999999999999999999/model_v2.pth", 2),
        ({}, "runs/42/last.pth", None),
        ({}, "20240101/last.pth", None),
    ],
)
def test_the_number_of_a_step_is_where_it_is_told_most_plainly(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, state: dict[str, Any], path: str, step: int | None
) -> None:
    io = program.TieredCheckpointIO({"tiers": {"disk": {"kind": "posix", "path": str(tmp_path / "store")}}})
    io.save_checkpoint(state | {"w": torch.ones(2)}, tmp_path / path)
    assert io._opened().store.all_steps() == (() if step is None else (step,))
    assert ("not to the store" in caplog.text) == (step is None)
    assert io.load_checkpoint(tmp_path / path)["w"].tolist() == [1, 1]
    io._opened().store.close()


def test_sharded_checkpoints_are_loaded_by_another_number_of_ranks(
    start: Start, tmp_path: Path, shared_memory: Path
) -> None:
    arguments: dict[str, Any] = {name: str(tmp_path / name) for name in ("disk", "named", "weights")}
    arguments["ram"] = str(shared_memory / "ram")
    before = None
    for number, epochs in ((2, 1), (1, 2)):
        told = [
            child.result()
            for child in ranks(start, number, ranks_program.train, arguments | {"epochs": epochs}, number)
        ]
        assert [each["loaded"] for each in told] == [before] * number
        before = told[0]["ended"]
        assert told[0]["names"][-1] == "last.ckpt"
        assert len(told[0]["names"]) == 2
    other = arguments | {name: str(tmp_path / "other" / name) for name in ("named", "weights")}
    children = ranks(start, 2, ranks_program.train, other | {"epochs": 1}, 2)  # anew, and in the same store
    assert [child.result()["loaded"] for child in children] == [None] * 2
    for path in (tmp_path / "other" / "named").iterdir():
        assert (path / "meta.pt").exists()  # a sharded checkpoint of Lightning's own
    children = ranks(start, 2, ranks_program.train, other | {"epochs": 2}, 2)
    assert all(child.result()["loaded"] for child in children)
    assert all(path.is_file() for path in (tmp_path / "other" / "named").iterdir())
    with CheckpointStore.open(tmp_path / "disk", read_only=True).sync() as store:
        assert {info.step: info.serial for info in store.steps()}.items() >= {
            named_steps.reference_at(path)[:2] for path in (tmp_path / "named").iterdir()
        }
        assert all(info.metrics.keys() == {"loss"} for info in store.steps() if info.tiers)
        (step,) = store.all_steps()[-1:]
        arrays = [array.key for array in store.describe(step).arrays]
        assert arrays[0] == "state_dict/net.0.weight"
        assert any(key.startswith("optimizer_states/") for key in arrays)


@pytest.mark.parametrize(
    "live",
    [
        [["0.weight", "2.bias"], ["2.weight", "0.bias"]],
        [["0.bias", "2.weight", "2.bias"], ["0.weight"]],
        [["0.weight", "0.bias"], ["2.weight", "2.bias"], []],
    ],
)
def test_an_optimizer_of_other_groups_than_the_saved_ones_is_refused(
    start: Start, tmp_path: Path, shared_memory: Path, live: list[list[str]]
) -> None:
    """Promise 4: a group had the settings of another then."""
    arguments: dict[str, Any] = {name: str(tmp_path / name) for name in ("disk", "named", "weights")}
    arguments |= {"ram": str(shared_memory / "ram"), "groups": [["0.weight", "0.bias"], ["2.weight", "2.bias"]]}
    ranks(start, 1, ranks_program.train, arguments | {"epochs": 1}, 1)[0].result()
    with pytest.raises(AssertionError, match=r"'optimizer_states/0': its parameters are in other groups"):
        ranks(start, 1, ranks_program.train, arguments | {"epochs": 2, "groups": live}, 1)[0].result()


def test_weights_that_are_not_those_of_the_step_are_not_taken_for_them(tmp_path: Path, shared_memory: Path) -> None:
    """As of a callback that puts averaged weights in their place."""
    io = program.TieredCheckpointIO(program.store_of(tmp_path, shared_memory / "ram"))
    full = {"global_step": 1, "state_dict": {"w": torch.ones(3)}, "optimizer_states": [{"m": torch.ones(3)}]}
    io.save_checkpoint(full, tmp_path / "full.ckpt")
    io.save_checkpoint({"global_step": 1, "state_dict": {"w": torch.ones(3)}}, tmp_path / "same.ckpt")
    io.save_checkpoint({"global_step": 1, "state_dict": {"w": torch.zeros(3)}}, tmp_path / "mean.ckpt")
    io.save_checkpoint({"global_step": 1, "other": 2}, tmp_path / "other.ckpt")
    assert list(io.load_checkpoint(tmp_path / "full.ckpt")) == list(full)
    assert list(io.load_checkpoint(tmp_path / "same.ckpt")) == ["global_step", "state_dict"]
    assert torch.equal(io.load_checkpoint(tmp_path / "full.ckpt")["state_dict"]["w"], torch.ones(3))
    assert torch.equal(io.load_checkpoint(tmp_path / "mean.ckpt")["state_dict"]["w"], torch.zeros(3))
    assert io.load_checkpoint(tmp_path / "other.ckpt") == {"global_step": 1, "other": 2}
    io.save_checkpoint({"global_step": 2, "state_dict": {}}, tmp_path / "next.ckpt")
    io.remove_checkpoint(tmp_path / "full.ckpt")  # and another name still means its weights
    assert io._opened().store.all_steps() == (1, 2)
    for name in ("same", "mean", "other"):
        io.remove_checkpoint(tmp_path / f"{name}.ckpt")
        assert not (tmp_path / f"{name}.ckpt").exists()
    io.teardown()
    assert io._opened().store.all_steps() == (2,)
    io._opened().store.close()


@pytest.mark.parametrize("form", ["plain", "strided", "conjugate"])
def test_other_tensors_under_the_same_names_replace_no_step_that_another_path_names(
    tmp_path: Path, shared_memory: Path, form: str
) -> None:
    """As of Fabric, which saves a model and then the mean of its weights."""
    ones = {
        "plain": torch.ones(3),
        "strided": torch.ones(3)[1::2],  # of one item, which is contiguous
        "conjugate": torch.ones(3, dtype=torch.complex64).conj(),
    }[form]
    io = program.TieredCheckpointIO(program.store_of(tmp_path, shared_memory / "ram"))
    io.save_checkpoint({"step": 1, "model": {"w": ones}, "loss": 1.0}, tmp_path / "model.ckpt")
    io.save_checkpoint({"step": 1, "model": {"w": 0 * ones}, "loss": 1.0}, tmp_path / "mean.ckpt")
    assert torch.equal(io.load_checkpoint(tmp_path / "model.ckpt")["model"]["w"], ones)
    assert torch.equal(io.load_checkpoint(tmp_path / "mean.ckpt")["model"]["w"], 0 * ones)
    io.save_checkpoint({"step": 1, "model": {"w": ones}, "loss": 2.0}, tmp_path / "last.ckpt")
    for name in ("model", "last"):  # the same tensors: both mean the last save
        assert io.load_checkpoint(tmp_path / f"{name}.ckpt")["loss"] == 2.0
    io.save_checkpoint({"step": 2, "model": {"w": ones}}, tmp_path / "one.ckpt")
    io.save_checkpoint({"step": 2, "model": {"w": 0 * ones}}, tmp_path / "one.ckpt")  # written over, as a file is
    assert torch.equal(io.load_checkpoint(tmp_path / "one.ckpt")["model"]["w"], 0 * ones)
    assert io._opened().store.all_steps() == (1, 2)
    io._opened().store.close()


def test_what_one_callback_keeps_is_not_replaced_and_what_a_foreign_one_monitors_ends_no_training(
    tmp_path: Path, shared_memory: Path
) -> None:
    """Only ModelCheckpoints keep what differs between the saves of one step."""
    io = program.TieredCheckpointIO(program.store_of(tmp_path, shared_memory / "ram"))
    for step, foreign in enumerate(([], {"path": "x"}, {str(tmp_path / "0.ckpt"): torch.ones(2)})):
        for value in range(2):
            callbacks = {"Mean": {"w": torch.full((3,), value)}, "Best": {"monitor": "loss", "best_k_models": foreign}}
            checkpoint = {"global_step": step, "state_dict": {"w": torch.ones(3)}, "callbacks": callbacks}
            io.save_checkpoint(checkpoint, tmp_path / f"{value}.ckpt")
        for value in range(2):
            loaded = io.load_checkpoint(tmp_path / f"{value}.ckpt")
            assert torch.equal(loaded["callbacks"]["Mean"]["w"], torch.full((3,), value))
    io._opened().store.close()


def test_weights_saved_before_the_whole_stay_what_they_were(tmp_path: Path, shared_memory: Path) -> None:
    io = program.TieredCheckpointIO(program.store_of(tmp_path, shared_memory / "ram"))
    for step, mean in ((1, torch.ones(3)), (2, torch.zeros(3))):
        io.save_checkpoint({"global_step": step, "state_dict": {"w": mean}}, tmp_path / f"mean-{step}.ckpt")
        whole = {"global_step": step, "state_dict": {"w": torch.ones(3)}, "optimizer_states": [{"m": torch.ones(3)}]}
        io.save_checkpoint(whole, tmp_path / f"whole-{step}.ckpt")
        assert torch.equal(io.load_checkpoint(tmp_path / f"mean-{step}.ckpt")["state_dict"]["w"], mean)
        assert list(io.load_checkpoint(tmp_path / f"mean-{step}.ckpt")) == ["global_step", "state_dict"]
        loaded = io.load_checkpoint(tmp_path / f"whole-{step}.ckpt")
        assert list(loaded) == list(whole)
        assert torch.equal(loaded["state_dict"]["w"], torch.ones(3))
    io._opened().store.close()


def test_a_step_whose_only_name_becomes_a_file_of_torch_is_deleted(tmp_path: Path, shared_memory: Path) -> None:
    io = program.TieredCheckpointIO(program.store_of(tmp_path, shared_memory / "ram"))
    io.save_checkpoint({"global_step": 1, "w": torch.ones(3)}, tmp_path / "last.ckpt")
    io.save_checkpoint({"global_step": 2, "w": torch.ones(3)}, tmp_path / "step-2.ckpt")
    io.save_checkpoint({"global_step": 2, "other": 1}, tmp_path / "last.ckpt")
    assert io.load_checkpoint(tmp_path / "last.ckpt") == {"global_step": 2, "other": 1}
    io.teardown()
    assert io._opened().store.all_steps() == (2,)
    io._opened().store.close()


def test_a_configuration_that_does_not_fit_is_refused_at_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for make in (program.TieredCheckpointIO, ranks_program.TieredModelParallelStrategy):
        with pytest.raises(NotFound, match=r"ckpt\.toml"):
            make(tmp_path / "ckpt.toml")
        with pytest.raises(Invalid, match="lustr"):
            make({"tiers": {"disk": {"kind": "lustr", "path": str(tmp_path)}}})
    (tmp_path / "ckpt.toml").write_text(f'[tiers.disk]\nkind = "posix"\npath = "{tmp_path}/disk"\n')
    program.TieredCheckpointIO(tmp_path / "ckpt.toml")
    assert 'tiers disk retain some steps only, and may remove what "best"' in caplog.text
    assert not (tmp_path / "disk").exists()
