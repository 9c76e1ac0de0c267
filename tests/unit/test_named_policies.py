"""Policies that a configuration names are found by every process that reads it; what a step tells imports nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tieredckpt import CheckpointStore
from tieredckpt.config import load
from tieredckpt.errors import Invalid
from tieredckpt.policy.base import offer

MODULE = """
import pathlib
from typing import Literal
from tieredckpt.policy import Promotion, Retention, register

pathlib.Path(__file__).with_suffix(".ran").touch()

@register
class Odd(Promotion):
    kind: Literal["odd"] = "odd"

    def promotes(self, step, tier, store):
        return step.step % 2 == 1

class Keeper(Retention):
    kind: Literal["keeper"] = "keeper"

    def retains(self, tier, store):
        return frozenset(step.serial for step in store.steps)
"""

TRAINER = """
from tieredckpt import CheckpointStore
import numpy as np, os

with CheckpointStore.open("ckpt.toml").sync() as store:
    for step in (1, 2, 3):
        store.save(step, {"w": np.full(4, step)})
    store.flush()
"""


@pytest.fixture
def folder(tmp_path: Path, shared_memory: Path) -> Path:
    (tmp_path / "named_here.py").write_text(MODULE)
    (tmp_path / "train.py").write_text(TRAINER)
    (tmp_path / "ckpt.toml").write_text(
        """
        [store]
        policies = ["named_here", "named_here:Keeper"]
        [tiers.ram]
        kind = "ram"
        capacity = "32 MiB"
        [tiers.disk]
        kind = "posix"
        path = "disk"
        promote = "odd"
        retain = "keeper"
        """
    )
    return tmp_path


def run(folder: Path, *command: str, elsewhere: bool = False) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *command],
        cwd="/" if elsewhere else folder,
        env=os.environ | {"PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_the_command_line_finds_the_policies_that_a_configuration_names(folder: Path) -> None:
    done = run(folder, "train.py")
    assert done.returncode == 0, done.stderr
    config = str(folder / "ckpt.toml")
    for verb in (("ls", config), ("verify", config, "--all"), ("plan", config), ("agent", config, "--once")):
        done = run(folder, "-P", "-m", "tieredckpt", *verb, elsewhere=True)
        assert done.returncode == 0, done.stderr
    steps = {int(path.name[:10]) for path in (folder / "disk" / "steps").iterdir()}
    assert steps == {1, 3}


def test_an_agent_that_a_store_starts_finds_them(folder: Path) -> None:
    config = folder / "ckpt.toml"
    config.write_text(config.read_text().replace("[store]", "[store]\npromote_in = 'agent'"))
    done = run(folder, "train.py")
    assert done.returncode == 0, done.stderr
    assert {int(path.name[:10]) for path in (folder / "disk" / "steps").iterdir()} == {1, 3}


def test_a_script_that_names_itself_runs_once(folder: Path) -> None:
    (folder / "both.py").write_text(MODULE + "\nprint('ran')\n" + TRAINER)
    config = folder / "ckpt.toml"
    config.write_text(config.read_text().replace("named_here", "both"))
    done = run(folder, "both.py")
    assert (done.returncode, done.stdout) == (0, "ran\n"), done.stderr


def test_what_cannot_be_imported_is_told_with_its_line(folder: Path) -> None:
    config = folder / "ckpt.toml"
    text = config.read_text()
    for name, told in (("not_there_at_all", "No module named"), ("named_here:Missing", "no attribute")):
        config.write_text(text.replace('"named_here:Keeper"', f'"{name}"'))
        done = run(folder, "-m", "tieredckpt", "ls", str(config))
        assert done.returncode == 1
        assert f"{config}:3: store.policies: `{name}` cannot be imported" in done.stderr
        assert told in done.stderr
    with pytest.raises(Invalid, match="is not a class derived from"):
        offer(["pathlib:Path"])


def test_what_a_step_tells_imports_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(folder, "train.py").returncode == 0
    ran = folder / "named_here.ran"
    ran.unlink()
    monkeypatch.syspath_prepend(folder)
    settings = {"policies": ["named_here"], "tiers": [{"kind": "posix", "name": "disk", "path": str(folder / "disk")}]}
    config = load(settings)  # as a step could tell it
    assert load(config.model_dump(mode="json")) == config
    with CheckpointStore.open(config, read_only=True).sync() as store:
        assert store.describe(3).policy
        assert np.array_equal(store.restore().tree["w"], np.full(4, 3))
    for verb in ("ls", "show", "restore"):
        assert run(folder, "-m", "tieredckpt", verb, "disk").returncode == 0
    assert not ran.exists()
    assert "named_here" not in sys.modules
