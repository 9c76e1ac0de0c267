"""Hugging Face's Trainer over a store: killed and resumed, and its folders agree with what the store has."""

from __future__ import annotations

import json
import shutil
import signal
import threading
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from distributed.launch import SOON
from reliability.tiers import FaultyTiers
from support.forked import Start, forking, ranks
from support.frameworks import lazily, need_modules, require

from tieredckpt import CheckpointStore, Closed, Invalid, NotFound, SyncStore, TierUnavailable
from tieredckpt.events import TierRecovered

need_modules("transformers", "accelerate")
torch = require("torch")
program = lazily("integrations.transformers_program")

pytestmark = [pytest.mark.timeout(4 * SOON), pytest.mark.filterwarnings("ignore")]


@pytest.fixture(scope="module")
def start() -> Iterator[Start]:
    with forking("integrations.transformers_program") as started:
        yield started


def folders(folder: Path) -> set[int]:
    return {int(path.name.partition("-")[2]) for path in (folder / "run").glob("checkpoint-*")}


def test_a_training_that_was_killed_ends_as_one_that_was_not(start: Start, tmp_path: Path, shared_memory: Path) -> None:
    whole = start(program.train, tmp_path / "whole", shared_memory / "whole", -1)
    killed = start(program.train, tmp_path / "killed", shared_memory / "killed", 14)
    assert killed.killed() == signal.SIGKILL
    resumed = start(program.train, tmp_path / "killed", shared_memory / "killed", -1)
    expected = whole.result()
    assert expected.endswith(" 17")
    assert resumed.result() == expected


def test_what_one_rank_could_not_save_is_a_checkpoint_of_none(
    start: Start, tmp_path: Path, shared_memory: Path
) -> None:
    """DDP: the ranks agree on what was saved, and on the checkpoint from which they resume."""
    told = [child.result() for child in ranks(start, 2, program.train_ranks, tmp_path, shared_memory / "ram", 4, 6)]
    assert told[0] == told[1]
    assert folders(tmp_path) == {2, 6}
    shutil.rmtree(tmp_path / "run" / "checkpoint-6")  # as on a node that is slow to see it
    told = [child.result() for child in ranks(start, 2, program.train_ranks, tmp_path, shared_memory / "ram", 8, 9)]
    assert told[0] == told[1]
    assert told[0]["first"] == 2


def test_a_ddp_training_with_batchnorm_is_saved_and_resumed(start: Start, tmp_path: Path, shared_memory: Path) -> None:
    """Each rank has statistics of its own; those of the first rank are saved, as DDP gives them to all."""

    def trained(name: str, steps: int) -> list[Any]:
        run = ranks(start, 2, program.train_normed, tmp_path / name, shared_memory / name, steps)
        return [child.result() for child in run]

    whole, _, resumed = trained("whole", 6), trained("parts", 4), trained("parts", 6)
    assert whole[0]["buffers"] != whole[1]["buffers"]
    assert [each["first"] for each in resumed] == [4, 4]
    assert [each["steps"] for each in resumed] == [(4, 6)] * 2
    assert [each["digest"] for each in resumed] == [each["digest"] for each in whole]


def test_the_store_has_the_steps_of_the_folders_and_no_others(tmp_path: Path, shared_memory: Path) -> None:
    with program.store_of(tmp_path, shared_memory / "ram") as store:
        trainer = program.trainer_of(tmp_path, store)
        trainer.train()
        assert folders(tmp_path) == set(store.all_steps()) == {15, 17}
        assert not list((tmp_path / "run").rglob("*.safetensors")) + list((tmp_path / "run").rglob("*.pt"))
        trained = trainer.model.net[0].weight.clone()
        trainer._load_from_checkpoint(str(tmp_path / "run" / "checkpoint-15"))
        assert not torch.equal(trainer.model.net[0].weight, trained)
        again = program.trainer_of(tmp_path, store, max_steps=20)
        again.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-15"))
        assert store.all_steps()[-1] == 20


@pytest.mark.parametrize("only_then", [True, False])
def test_checkpoints_of_the_model_alone_are_saved_and_gone_on_from(
    tmp_path: Path, shared_memory: Path, only_then: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with program.store_of(tmp_path, shared_memory / "ram") as store:
        program.trainer_of(tmp_path, store, save_only_model=True, save_total_limit=None, max_steps=9).train()
        assert store.restore(as_="specs").tree.keys() == {"model", "ranks", "about"}
        trainer = program.trainer_of(tmp_path, store, save_only_model=only_then, save_total_limit=None, max_steps=12)
        trainer.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-3"))
        assert trainer.state.global_step == 12
        assert "has the model only" in caplog.text
        assert store.describe(6).info.restored_from == 1
        trainer = program.trainer_of(tmp_path, store, save_only_model=True, max_steps=15)
        trainer.train(resume_from_checkpoint=True)
        assert trainer.state.global_step == 15


def test_a_training_that_saves_the_model_alone_resumes_all_that_a_step_has(tmp_path: Path, shared_memory: Path) -> None:
    with program.store_of(tmp_path, shared_memory / "ram") as store:
        program.trainer_of(tmp_path, store, save_total_limit=None, max_steps=3).train()
        trainer = program.trainer_of(tmp_path, store, save_only_model=True, save_total_limit=None, max_steps=6)
        trainer.train(resume_from_checkpoint=True)
        assert trainer.lr_scheduler.last_epoch == 6
        assert {int(state["step"]) for state in trainer.optimizer.state_dict()["state"].values()} == {6}
        assert trainer._random.loaded is not None
        trainer.args.max_steps = 9
        trainer.train(resume_from_checkpoint=True)
        assert trainer._random.loaded is None  # those of the step before


def test_what_the_stores_retention_took_is_not_resumed_from(tmp_path: Path, shared_memory: Path) -> None:
    retain = {"kind": "last_n", "n": 2}
    with program.store_of(tmp_path, shared_memory / "ram", retain=retain) as store:
        program.trainer_of(tmp_path, store, save_total_limit=None).train()
        gone = tmp_path / "run" / "checkpoint-3"
        store.evict(3, "ram")  # where it was still, as there was room
        trainer = program.trainer_of(tmp_path, store, max_steps=18, save_total_limit=None)
        trainer.train(resume_from_checkpoint=True)
        assert trainer.state.global_step == 18
        assert not gone.exists()
        (tmp_path / "run" / "checkpoint-99").mkdir()  # as of a process that was killed while it wrote
        (tmp_path / "run" / "checkpoint-99" / "tieredckpt.json").write_text('{"step": 99, "serial": 99}')
        assert trainer._newest_whole() == str(tmp_path / "run" / "checkpoint-18")
        with pytest.raises(NotFound, match="means step 99"):
            trainer._load_from_checkpoint(str(tmp_path / "run" / "checkpoint-99"))


def test_no_training_goes_on_by_itself_from_what_is_left_as_a_lossy_copy(tmp_path: Path) -> None:
    tiers = {
        "disk": {"kind": "posix", "path": str(tmp_path / "disk"), "retain": "all", "fsync": False},
        "rounded": {
            "kind": "posix",
            "path": str(tmp_path / "rounded"),
            "retain": "all",
            "fsync": False,
            "codec": "small",
            "lossy": [{"keys": ["**"], "max_error": "0.4%"}],
        },
    }
    with CheckpointStore.open_sync({"tiers": tiers}) as store:
        trainer = program.trainer_of(tmp_path, store, max_steps=6)
        trainer.train()
        assert trainer._newest_whole() == str(tmp_path / "run" / "checkpoint-6")
    for folder in (tmp_path / "disk" / "steps").glob("0000000006-*"):
        shutil.rmtree(folder)
    with CheckpointStore.open_sync({"tiers": tiers}) as store:
        assert [(info.step, info.tiers) for info in store.steps()] == [(3, ("disk",)), (6, ())]
        trainer = program.trainer_of(tmp_path, store, max_steps=6)
        assert trainer._newest_whole() == str(tmp_path / "run" / "checkpoint-3")


def test_where_the_store_has_no_step_of_the_folders_no_training_begins_anew(
    tmp_path: Path, shared_memory: Path
) -> None:
    with program.store_of(tmp_path, shared_memory / "ram") as store:
        program.trainer_of(tmp_path, store, max_steps=6).train()
    with program.store_of(tmp_path / "another", shared_memory / "another") as store:
        with pytest.raises(NotFound, match="the store has none of their steps"):
            program.trainer_of(tmp_path, store).train(resume_from_checkpoint=True)
        assert program.trainer_of(tmp_path / "new", store)._newest_whole() is None


def rarely_on_disk(folder: Path, ram: Path) -> Any:
    tiers = {
        "ram": {"kind": "ram", "path": str(ram)},
        "disk": {"kind": "posix", "path": str(folder / "disk"), "promote": {"kind": "every_n_steps", "n": 100}},
    }
    return CheckpointStore.open({"tiers": tiers}).sync()


def test_the_checkpoint_that_sigterm_asks_for_outlives_the_node(tmp_path: Path, shared_memory: Path) -> None:
    with rarely_on_disk(tmp_path, shared_memory / "ram") as store:
        trainer = program.trainer_of(tmp_path, store, enable_jit_checkpoint=True, max_steps=20, save_steps=2)
        manager = next(each.jit_manager for each in trainer.callback_handler.callbacks if hasattr(each, "jit_manager"))
        asked = trainer.callback_handler.on_step_end

        def at_the_third(args: Any, state: Any, control: Any) -> Any:
            manager.is_checkpoint_requested = state.global_step == 3  # as its handler of SIGTERM does, seconds later
            return asked(args, state, control)

        trainer.callback_handler.on_step_end = at_the_third
        trainer.train()
        assert trainer.state.global_step == 3
        assert store.where(2) == ("ram",)
        assert "disk" in store.where(3)


class Hub:
    """In the place of Hugging Face's: what was in the folders that were pushed."""

    def __init__(self) -> None:
        self.pushed: list[set[str]] = []

    def create_repo(self, name: str, **_: Any) -> Any:
        return types.SimpleNamespace(repo_id=name)

    def upload_folder(self, *, folder_path: str, **_: Any) -> Any:
        self.pushed.append({path.name for path in Path(folder_path).iterdir()})
        return types.SimpleNamespace(done=lambda: True, result=lambda: None)


def test_a_model_is_pushed_with_each_checkpoint(
    tmp_path: Path, shared_memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = Hub()
    monkeypatch.setattr("transformers.trainer.hf_api", lambda: hub)
    with program.store_of(tmp_path, shared_memory / "ram") as store:
        trainer = program.trainer_of(tmp_path, store, push_to_hub=True, max_steps=4, save_steps=2)
        monkeypatch.setattr(trainer, "create_model_card", lambda **_: None)
        trainer.train()
    assert len(hub.pushed) >= 2
    assert all("model.safetensors" in pushed for pushed in hub.pushed)


def test_a_failing_tier_ends_no_training(tmp_path: Path, shared_memory: Path, faults: FaultyTiers) -> None:
    class Pull(program.TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == 5:
                faults.kill("disk", TierUnavailable("the cable was pulled"))

    with program.store_of(tmp_path, shared_memory / "ram") as store:
        trainer = program.trainer_of(tmp_path, store, Pull())
        trainer.train()
        assert trainer.state.global_step == 17
        assert store.where(17) == ("ram",)
        faults.revive("disk")


def test_a_step_goes_before_its_folder(tmp_path: Path, shared_memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that ends between the two leaves a folder without a step, and never a step that nobody knows."""

    class Ended(BaseException):
        pass

    def ends(*_: Any, **options: Any) -> None:
        raise Ended

    with program.store_of(tmp_path, shared_memory / "ram") as store:
        trainer = program.trainer_of(tmp_path, store)
        with monkeypatch.context() as patched:
            patched.setattr(shutil, "rmtree", ends)
            with pytest.raises(Ended):
                trainer.train()
        assert folders(tmp_path) == {3, 6, 9}
        assert set(store.all_steps()) == {6, 9}
        trainer = program.trainer_of(tmp_path, store)
        trainer.train(resume_from_checkpoint=True)
        assert folders(tmp_path) == set(store.all_steps()) == {15, 17}


def test_a_folder_stays_while_its_step_cannot_be_deleted(
    tmp_path: Path, shared_memory: Path, faults: FaultyTiers
) -> None:
    with program.store_of(tmp_path, shared_memory / "ram") as store:

        class Pull(program.TrainerCallback):
            def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
                if state.global_step == 7:
                    store.flush()  # step 6 is on the disk
                    faults.kill("disk", TierUnavailable("the cable was pulled"))

        trainer = program.trainer_of(tmp_path, store, Pull())
        trainer.train()
        assert folders(tmp_path) >= {6, 17}
        assert folders(tmp_path) >= set(store.all_steps())
        recovered = threading.Event()
        store.subscribe(lambda event: recovered.set() if isinstance(event, TierRecovered) else None)
        faults.revive("disk")
        assert recovered.wait(SOON)
        store.flush()
        trainer._rotate(tmp_path / "run")
        assert folders(tmp_path) == set(store.all_steps()) == {15, 17}


def test_a_number_that_was_saved_again_is_another_checkpoint(
    tmp_path: Path, shared_memory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Folders are of saves, not of numbers: a copy of an older run's folder gives nothing of this one's."""
    with program.store_of(tmp_path, shared_memory / "ram") as store:
        trainer = program.trainer_of(tmp_path, store, max_steps=6, save_total_limit=None)
        trainer.train()
        old = tmp_path / "another" / "checkpoint-6"
        shutil.copytree(tmp_path / "run" / "checkpoint-6", old)
        assert "of an earlier training" not in caplog.text
        program.trainer_of(tmp_path, store, max_steps=6, save_total_limit=None).train()  # from the beginning
        assert "the store has steps of an earlier training (2), and this one begins anew" in caplog.text
        serials = [
            json.loads((path / "tieredckpt.json").read_text())["serial"]
            for path in (old, tmp_path / "run" / "checkpoint-6")
        ]
        assert serials[0] < serials[1]
        with pytest.raises(NotFound, match="another training saved the step again"):
            program.trainer_of(tmp_path, store).train(resume_from_checkpoint=str(old))
        trainer = program.trainer_of(tmp_path / "another", store)
        trainer._rotate(tmp_path / "another")
        assert not old.exists()  # as its step is there no more
        assert 6 in store.all_steps()  # which is the other run's


def test_folders_of_another_store_are_neither_resumed_from_nor_removed(tmp_path: Path, shared_memory: Path) -> None:
    """Two stores count their saves alike; the folders say which of them is meant."""
    with program.store_of(tmp_path / "one", shared_memory / "one") as store:
        program.trainer_of(tmp_path, store, max_steps=6, save_total_limit=None).train()
    theirs = tmp_path / "run" / "checkpoint-6"
    with program.store_of(tmp_path / "two", shared_memory / "two") as store:
        trainer = program.trainer_of(tmp_path / "two", store, max_steps=9, save_total_limit=None)
        trainer.train()
        with pytest.raises(Invalid, match=r"checkpoint-6 means a step of another store \("):
            trainer._load_from_checkpoint(str(theirs))
        with pytest.raises(NotFound, match="the store has none of their steps"):
            program.trainer_of(tmp_path, store).train(resume_from_checkpoint=True)
        trainer._rotate(tmp_path / "run")
        trainer.args.save_total_limit = 1
        trainer._rotate(tmp_path / "run")
        assert folders(tmp_path) == {3, 6}
        assert set(store.all_steps()) == {3, 6, 9}


def test_the_best_model_is_kept_and_loaded_at_the_end(
    tmp_path: Path, shared_memory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Worse(program.TrainerCallback):
        """Step 6 is the best."""

        def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any, **_: Any) -> None:
            metrics["eval_score"] = float(state.global_step == 6)

    options = {
        "eval_strategy": "steps",
        "eval_steps": 3,
        "load_best_model_at_end": True,
        "metric_for_best_model": "score",
        "greater_is_better": True,
        "save_total_limit": 1,
        "max_steps": 12,
    }
    with program.store_of(tmp_path, shared_memory / "ram") as store:
        trainer = program.trainer_of(tmp_path, store, Worse(), **options)
        trainer.train()
        assert folders(tmp_path) == set(store.all_steps()) == {6, 12}  # the best, and the newest to resume from
        found = store.restore(6, keys=["model"], as_="torch", resume=False)
        assert found is not None
        for name, value in trainer.model.state_dict().items():
            assert torch.equal(value, found.tree["model"][name])
        assert "may be gone" not in caplog.text
        trainer._load_from_checkpoint(str(tmp_path / "run" / "checkpoint-12"))
        weight = trainer.model.net[0].weight.detach().clone()
        store.delete(6)
        trainer._load_best_model()
        assert "the best model is not loaded" in caplog.text
        assert torch.equal(trainer.model.net[0].weight, weight)
    with program.store_of(tmp_path / "few", shared_memory / "few", retain={"kind": "last_n", "n": 2}) as store:
        program.trainer_of(tmp_path / "few", store, **options)
        assert "the best may be gone by then" in caplog.text


def test_a_step_has_the_metrics_that_the_trainer_logged_at_it(tmp_path: Path, shared_memory: Path) -> None:
    """So that a policy, here of an export, can choose the best; what users note beside is no obstacle."""
    options = {"eval_strategy": "steps", "eval_steps": 3, "logging_strategy": "steps", "logging_steps": 3}
    options["label_names"] = ["x"]  # or the Trainer computes no loss of an evaluation
    with program.store_of(tmp_path, shared_memory / "ram") as store:
        trainer = program.trainer_of(tmp_path, store, **options, max_steps=6, save_total_limit=None)
        trainer.add_callback(program.Note)
        trainer.train()
        logged = {entry["step"]: entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry}
        metrics = {info.step: info.metrics for info in store.steps()}
    assert metrics.keys() == logged.keys() == {3, 6}
    for step, found in metrics.items():
        assert found["eval_loss"] == logged[step]
        assert set(found) == {"eval_loss", "loss", "grad_norm", "learning_rate", "epoch"}


def test_a_store_that_cannot_save_is_refused_before_the_training(tmp_path: Path, shared_memory: Path) -> None:
    for store in (CheckpointStore.open(tmp_path / "store"), str(tmp_path / "store")):
        with pytest.raises(Invalid, match=r"takes a SyncStore, not .*CheckpointStore\.open_sync"):
            program.trainer_of(tmp_path, store)
    with program.store_of(tmp_path, shared_memory / "ram") as closed:
        trainer = program.trainer_of(tmp_path, closed)
    with pytest.raises(Closed):
        trainer.train()
    assert trainer.state.global_step == 0


def test_what_cannot_be_saved_is_refused_before_the_first_step(tmp_path: Path, shared_memory: Path) -> None:
    model = program.Model()
    own, others = (torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, torch.nn.Linear(2, 2)))
    with program.store_of(tmp_path, shared_memory / "ram") as store:
        for optimizer, scheduler, error in (
            (others, None, "'optimizer': no module of this state has all of its parameters"),
            (own, program.Unstorable(own), "scheduler/schedule"),
        ):
            trainer = program.trainer_of(tmp_path, store, model=model, optimizers=(optimizer, scheduler))
            with pytest.raises(Invalid, match=error):
                trainer.train()
            assert trainer.state.global_step == 0
        unsaved = program.trainer_of(
            tmp_path, store, model=model, optimizers=(own, program.Unstorable(own)), save_strategy="no", max_steps=2
        )
        unsaved.train()
        assert unsaved.state.global_step == 2


def test_fsdp_and_deepspeed_are_refused_before_the_training(
    tmp_path: Path, shared_memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def told(store: SyncStore) -> None:
        with pytest.raises(Invalid, match=r"with FSDP2, write the loop with accelerate"):
            program.trainer_of(tmp_path, store)

    with program.store_of(tmp_path, shared_memory / "ram") as store:
        created = program.TieredTrainer.create_accelerator_and_postprocess

        def create(kind: str) -> Any:
            def changed(self: Any) -> None:
                created(self)
                setattr(self, f"is_{kind}_enabled", True)

            return changed

        for kind in ("fsdp", "deepspeed"):
            with monkeypatch.context() as patched:
                patched.setattr(program.TieredTrainer, "create_accelerator_and_postprocess", create(kind))
                told(store)
