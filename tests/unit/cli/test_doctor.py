"""`doctor` tries what a configuration names, says what is wrong, and changes nothing."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from typer.testing import Result

from tieredckpt import SyncStore

Run = Callable[..., Result]
Told = Callable[..., Any]


def outcomes(told: list[dict[str, Any]]) -> dict[str, bool]:
    return {check["name"]: check["ok"] for check in told}


def test_the_machine_alone_can_be_looked_at(told: Told) -> None:
    assert outcomes(told("doctor")["machine"])["memory"]


def test_every_tier_is_tried_and_left_as_it_was(told: Told, trained: Path) -> None:
    def files() -> dict[Path, bytes]:
        return {path: path.read_bytes() for path in trained.parent.rglob("*") if path.is_file()}

    before = files()
    tiers = told("doctor", trained, "--size", "2 MiB")["tiers"]
    assert set(tiers) == {"ram", "disk", "archive"}
    assert {"open", "large write", "large read", "list", "delete"} <= outcomes(tiers["disk"]).keys()
    assert all(check["ok"] for checks in tiers.values() for check in checks)
    assert files() == before


def test_it_runs_beside_a_trainer(run: Run, config: Path, training: SyncStore) -> None:
    result = run("doctor", config, "--size", "1 MiB")
    assert result.exit_code == 0, result.output
    assert "all is well" in result.stdout
    training.verify()


def test_a_tier_that_cannot_be_used_is_named_and_the_others_are_tried(run: Run, config: Path) -> None:
    (config.parent / "disk").write_text("a file where the tier's folder belongs")
    result = run("doctor", config, "--size", "1 MiB")
    assert result.exit_code == 1
    wrong = [line for line in result.stdout.splitlines() if "WRONG" in line]
    assert len(wrong) == 1
    assert str(config.parent / "disk") in wrong[0]
    assert "all is well" not in result.stdout
    archive = result.stdout.partition("tier archive")[2]
    assert "large read" in archive


def test_one_tier_may_be_chosen(told: Told, run: Run, config: Path) -> None:
    assert set(told("doctor", config, "--tier", "disk", "--size", "1 MiB")["tiers"]) == {"disk"}
    result = run("doctor", config, "--tier", "dsik")
    assert result.exit_code == 2
    assert "archive" in result.output


def test_more_ram_than_there_is_is_told(run: Run, config: Path) -> None:
    config.write_text(re.sub(r"(?m)^capacity = .*$", 'capacity = "4000 TiB"', config.read_text()))
    result = run("doctor", config, "--tier", "ram")
    assert result.exit_code == 1
    assert "3.91 PiB" in result.stdout
