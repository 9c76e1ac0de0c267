"""The verbs `plan` and `simulate`: what they print, and what they refuse."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Told = Callable[..., Any]
JOB = ("--nodes", 100, "--state", "1TB", "--step-time", "10s", "--mtbf", "20min", "--bandwidth", "disk=20GB/s/node")


@pytest.fixture
def settings(tmp_path: Path) -> Path:
    path = tmp_path / "job.toml"
    path.write_text(
        """
        [store]
        schedule = { kind = "every", interval = "1 min" }
        [tiers.ram]
        kind = "ram"
        [tiers.disk]
        kind = "posix"
        path = "disk"
        """
    )
    return path


def test_plan_and_simulation_expect_the_same(told: Told, settings: Path) -> None:
    planned, simulated = told("plan", settings, *JOB), told("simulate", settings, *JOB, "--days", 3)
    assert simulated["ettr"] == pytest.approx(planned["ettr"], abs=0.02)
    assert simulated["restores"].keys() == {"disk"}  # all failures are nodes', whose RAM is gone
    assert planned["losses"][1]["tier"] == "disk"


def test_people_get_tables(run: Callable[..., Any], settings: Path) -> None:
    planned, simulated = run("plan", settings, *JOB), run("simulate", settings, *JOB, "--days", 1)
    assert planned.exit_code == simulated.exit_code == 0
    assert "expected ETTR" in planned.stdout
    assert "dedupe: brings nothing" in planned.stdout
    assert "where the time went" in simulated.stdout


def test_an_interval_of_the_command_line_replaces_the_schedule(told: Told, settings: Path) -> None:
    found = told("simulate", settings, *JOB, "--days", 1, "--interval", "5min")
    assert found["interval"] == pytest.approx(300, rel=0.2)


def test_a_simulation_draws_its_picture(told: Told, settings: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    found = told("simulate", settings, *JOB, "--days", 0.1, "--picture", tmp_path / "ettr.svg")
    assert len(found["sweep"]) > 3
    text = (tmp_path / "ettr.svg").read_text()
    assert "ETTR" in text
    assert "by formula" in text


def test_a_plan_measures_what_is_not_told(told: Told, settings: Path, tmp_path: Path) -> None:
    found = told("plan", settings, "--measure", "--size", "1MiB")
    assert [tier["assumed"] for tier in found["tiers"]] == [False, False]
    assert not [path for path in tmp_path.rglob("checkup/*") if path.is_file()]


@pytest.mark.parametrize(
    ("options", "what"),
    [
        (("--bandwidth", "disc=1GB/s"), "no tier 'disc'"),
        (("--bandwidth", "disk"), "TIER=RATE"),
        (("--bandwidth", "disk=0"), "more than 0"),
        (("--mtbf", "1h", "--node-mtbf", "1y"), "one of them"),
        (("--mtbf", "0s"), "more than 0 s"),
        (("--mtbf", "1h", "--failures", "meteor=1"), "process, node, rack, site"),
        (("--mtbf", "1h", "--failures", "node=0"), "all 0"),
    ],
)
def test_what_cannot_be_is_refused_with_what_to_write(
    run: Callable[..., Any], settings: Path, options: tuple[str, ...], what: str
) -> None:
    for verb in ("plan", "simulate"):
        result = run(verb, settings, *options)
        assert result.exit_code == 1
        assert what in result.stderr


def test_a_picture_that_cannot_be_drawn_is_refused_before_the_work(
    run: Callable[..., Any], settings: Path, tmp_path: Path
) -> None:
    for path in (tmp_path / "no" / "x.svg", tmp_path / "x.txt"):
        result = run("simulate", settings, "--picture", path, "--days", 100_000)
        assert result.exit_code == 1


@pytest.mark.parametrize(
    ("missing", "options"), [("simpy", ()), ("matplotlib", ("--picture", "x.svg"))], ids=["simpy", "matplotlib"]
)
def test_a_missing_extra_is_named(settings: Path, tmp_path: Path, missing: str, options: tuple[str, ...]) -> None:
    code = (
        f"import sys; sys.modules[{missing!r}] = None; sys.argv[0] = 'tieredckpt';"
        "from tieredckpt.cli import main; import tieredckpt.plan.model; main()"
    )
    command = [sys.executable, "-c", code, "simulate", str(settings), "--days", "0.01", *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 1
    assert f"needs {missing}: pip install 'tieredckpt[simulate]'" in done.stderr


def test_the_command_line_starts_without_what_only_a_simulation_needs() -> None:
    code = "import sys, tieredckpt.cli.app; print(sorted({'simpy', 'matplotlib'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
