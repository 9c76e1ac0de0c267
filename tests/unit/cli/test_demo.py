"""`demo`: a real kill, the same bits afterwards, and nothing left behind however it ends."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.command_line import run
from support.scenes import SOON

from tieredckpt.blobs.ram.folder import shared_memory_root
from tieredckpt.cli import demo
from tieredckpt.cli.demo_training import digest, initial_state, train_step

SAME = "The weights are bit for bit those of the training that was never interrupted."

HELD_IN_PART_3 = f"""
import time
from tieredckpt.cli import demo, main

def hold(*_):
    for _ in range({SOON * 100:.0f}):
        time.sleep(0.01)

demo._tell_restored = hold
main()
"""
"""The command, whose third part lasts until a signal ends it, however late that comes."""


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where the demo makes its folder; afterwards there is none, here and in shared memory."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr("tempfile.tempdir", None)
    before = set(shared_memory_root().glob("tieredckpt-demo-*"))
    yield folder
    assert set(shared_memory_root().glob("tieredckpt-demo-*")) - before == set()


@given(st.integers(6, 100_000))
def test_the_plan_kills_half_way_with_ram_ahead_of_the_disk(steps: int) -> None:
    plan = demo.Plan.of(steps)
    assert plan.kill_at % plan.save_every == 0
    assert plan.kill_at % plan.disk_every != 0
    assert plan.on_disk % plan.disk_every == 0
    assert 0 < plan.on_disk < plan.kill_at <= steps / 2
    assert plan.kill_at >= steps / 4


def test_the_training_gives_the_same_bits_every_time() -> None:
    digests = set()
    for _ in range(2):
        state = initial_state()
        losses = [train_step(state, step) for step in range(1, 31)]
        digests.add(digest(state))
    assert len(digests) == 1
    assert losses[-1] < losses[0]
    before = digest(state)
    state["params"]["b2"][0] = np.nextafter(state["params"]["b2"][0], np.float32(9))
    assert digest(state) != before


def test_a_killed_training_goes_on_from_ram_to_the_same_bits(temporary: Path) -> None:
    command = [sys.executable, "-P", "-m", "tieredckpt", "demo", "--steps", "12"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "restored step 5: 4.55 MiB from ram" in done.stdout
    assert SAME in done.stdout
    assert done.stderr == ""
    assert list(temporary.iterdir()) == []


def test_where_ram_ends_with_the_process_the_disk_is_used_and_said(monkeypatch: pytest.MonkeyPatch) -> None:
    kill = demo._Training.kill

    def kill_with_memory(training: demo._Training) -> None:
        kill(training)
        for folder in shared_memory_root().glob("tieredckpt-demo-*"):
            shutil.rmtree(folder)

    monkeypatch.setattr(demo._Training, "kill", kill_with_memory)
    result = run("demo", "--steps", 12)
    assert result.exit_code == 0, result.output
    assert "restored step 4: 4.55 MiB from disk" in result.stdout
    assert "(step 5 was in RAM, which here ends with the process" in result.stdout
    assert SAME in result.stdout


def test_other_bits_are_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    train = demo._training

    @contextmanager
    def train_longer_for_reference(steps: int, *options: str) -> Iterator[Any]:
        with train(steps if options else steps + 1, *options) as training:
            yield training

    monkeypatch.setattr(demo, "_training", train_longer_for_reference)
    result = run("demo", "--steps", 6)
    assert result.exit_code == 1
    assert "the weights differ" in result.stdout
    assert SAME not in result.stdout


def test_a_training_that_does_not_start_is_an_error_with_its_own_words(
    monkeypatch: pytest.MonkeyPatch, temporary: Path
) -> None:
    monkeypatch.setenv("PYTHONHOME", str(temporary))
    result = run("demo", "--steps", 6)
    assert result.exit_code == 1
    assert "the training ended early, with code 1" in result.stderr
    assert "encodings" in result.stderr
    assert list(temporary.iterdir()) == []


def test_keep_leaves_a_store_to_look_at(temporary: Path) -> None:
    result = run("demo", "--steps", 6, "--keep")
    assert result.exit_code == 0, result.output
    (folder,) = temporary.iterdir()
    assert f"tieredckpt ls {folder / 'ckpt.toml'}" in result.stdout
    assert run("verify", folder / "ckpt.toml", "--all").exit_code == 0


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize(
    ("at", "ending"),
    [("1.", signal.SIGINT), ("2.", signal.SIGTERM), ("3.", signal.SIGINT), ("3.", signal.SIGHUP)],
)
def test_what_ends_it_leaves_nothing_behind(temporary: Path, at: str, ending: signal.Signals) -> None:
    command = [sys.executable, "-P", "-u", "-c", HELD_IN_PART_3, "demo", "--steps", "12"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith(at):
                if ending == signal.SIGINT:
                    os.killpg(process.pid, ending)  # as a terminal does
                else:
                    process.send_signal(ending)
                break
        process.stdout.read()
    assert process.returncode not in (0, None)
    assert list(temporary.iterdir()) == []
