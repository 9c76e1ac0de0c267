"""One command tries everything, and tells what was tried and what was lost."""

from __future__ import annotations

import json
import logging
from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from reliability import figures
from reliability.commands import app
from reliability.decoders import DECODERS
from reliability.figures import Budget
from reliability.replay import Lost
from typer.testing import CliRunner

LEAST = Budget(every=10_000, every_of_ranks=10_000, kills=2, agent_kills=1, seconds=0.0, pace=0.0, times=1, inputs=3)
"""One of everything."""


@pytest.fixture(autouse=True)
def _least(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(figures, "BUDGETS", {"short": LEAST})
    monkeypatch.setattr(figures, "ERRORS", figures.ERRORS[:1])
    monkeypatch.setattr(figures, "KINDS", ["object"])  # the replay has tests of its own


@pytest.fixture(autouse=True)
def _loggers_as_before() -> Any:
    levels = {name: logging.getLogger(name).level for name in ("tieredckpt", "stamina")}
    yield
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)


def printed(*arguments: str, code: int = 0) -> str:
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == code, result.output
    return result.stdout


def test_everything_is_tried_and_told_in_numbers() -> None:
    found = json.loads(printed("all", "--budget", "short", "--json"))
    assert found["losses"] == []
    assert found["crash_points"] > 1000
    assert {(each["life"], each["failure"]) for each in found["crashes"]} == {
        *(("object", failure) for failure in ("process", "node")),
        *(("3 ranks, object", death) for death in ("all processes", "one node", "all nodes")),
    }
    assert sum(found["kills"].values()) == LEAST.kills + LEAST.agent_kills
    assert found["faults"]
    assert found["system_calls"]["fsync"]
    assert found["decoders"].keys() == {decoder.name for decoder in DECODERS}
    assert found["inputs_fuzzed"] == sum(found["decoders"].values()) >= len(DECODERS)
    assert found["soak"]["saves"]
    assert "bytes_healed" in found


def test_what_is_lost_in_one_part_is_told_beside_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(*_: Any, **__: Any) -> None:
        raise Lost("serial 3 was acknowledged, and is held nowhere")

    for part in ("_crash", "_crash_ranks", "kill", "fail_calls", "run_soak"):
        monkeypatch.setattr(figures, part, lost)
    output = printed("all", "--budget", "short", code=1)
    assert "serial 3 was acknowledged" in output
    assert "inputs fuzzed" in output


def test_each_part_is_a_command_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    crash = figures.crash
    monkeypatch.setattr(figures, "crash", lambda *every: islice(crash(*every), 1))  # `all` tries the other lives
    assert "crash points" in printed("replay", "--every", "10000", "--every-of-ranks", "10000")
    assert "saves acknowledged" in printed("kills", "--kills", "1")
    assert "fsync" in printed("calls", "--times", "1")
    assert "the marker" in printed("fuzz", "--inputs", "2")
    found = json.loads(printed("soak", "--seconds", "1", "--pace", "0", "--disk", str(tmp_path), "--json"))
    assert found["saves"]
    assert list(tmp_path.iterdir()) == []


def test_a_soak_that_loses_or_grows_ends_with_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    found = figures.Soaked(faults=Counter({("hang", "put"): 2}), lost=["serial 7 is not what was saved"])
    monkeypatch.setattr(figures, "run_soak", lambda *_: found)
    output = printed("soak", code=1)
    assert "2 (put 2)" in output
    assert "serial 7 is not what was saved" in output
