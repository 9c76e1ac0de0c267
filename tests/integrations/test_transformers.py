"""Hugging Face's Trainer over a store: killed and resumed, and its folders agree with what the store has."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from distributed.launch import SOON
from reliability.tiers import FaultyTiers
from support.frameworks import require

from tieredckpt import NotFound, TierUnavailable

torch = require("torch")
require("transformers")
require("accelerate")

from integrations import transformers_program as program  # noqa: E402

pytestmark = [pytest.mark.timeout(4 * SOON), pytest.mark.filterwarnings("ignore")]


def started(folder: Path, ram: Path, kill_at: int) -> subprocess.Popen[str]:
    command = [sys.executable, str(program.__file__), str(folder), str(ram), str(kill_at)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def folders(folder: Path) -> set[int]:
    return {int(path.name.partition("-")[2]) for path in (folder / "run").glob("checkpoint-*")}


def test_a_training_that_was_killed_ends_as_one_that_was_not(tmp_path: Path, shared_memory: Path) -> None:
    whole = started(tmp_path / "whole", shared_memory / "whole", -1)
    killed = started(tmp_path / "killed", shared_memory / "killed", 14)
    assert "17" not in killed.communicate(timeout=SOON)[0]
    assert killed.returncode == -signal.SIGKILL
    resumed = started(tmp_path / "killed", shared_memory / "killed", -1)
    expected, found = (each.communicate(timeout=SOON)[0].splitlines()[-1] for each in (whole, resumed))
    assert expected.endswith(" 17")
    assert found == expected


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


def test_where_the_store_has_no_step_of_the_folders_no_training_begins_anew(
    tmp_path: Path, shared_memory: Path
) -> None:
    with program.store_of(tmp_path, shared_memory / "ram") as store:
        program.trainer_of(tmp_path, store, max_steps=6).train()
    with program.store_of(tmp_path / "another", shared_memory / "another") as store:
        with pytest.raises(NotFound, match="the store has none of their steps"):
            program.trainer_of(tmp_path, store).train(resume_from_checkpoint=True)
        assert program.trainer_of(tmp_path / "new", store)._newest_whole() is None


def test_a_failing_tier_ends_no_training(tmp_path: Path, shared_memory: Path, faults: FaultyTiers) -> None:
    class Pull(program.TrainerCallback):  # type: ignore[misc, name-defined]
        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == 5:
                faults.kill("disk", TierUnavailable("the cable was pulled"))

    with program.store_of(tmp_path, shared_memory / "ram") as store:
        trainer = program.trainer_of(tmp_path, store, Pull())
        trainer.train()
        assert trainer.state.global_step == 17
        assert store.where(17) == ("ram",)
        faults.revive("disk")
