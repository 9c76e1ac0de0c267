"""`doctor` tries what a configuration names, says what is wrong, and changes nothing."""

from __future__ import annotations

import importlib.util
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from support.command_line import run, told
from support.lookalike import missing

from tieredckpt import SyncStore
from tieredckpt.blobs.chfs import choice
from tieredckpt.cli import doctor as cli
from tieredckpt.config import load, to_toml
from tieredckpt.devices.examine import page_locking
from tieredckpt.testing.devices import FakeDriver


def outcomes(told: list[dict[str, Any]]) -> dict[str, bool]:
    return {check["name"]: check["ok"] for check in told}


def test_the_machine_alone_can_be_looked_at() -> None:
    assert outcomes(told("doctor")["machine"])["memory"]


def test_a_driver_that_refuses_shared_memory_is_not_ok_but_slower(monkeypatch: pytest.MonkeyPatch) -> None:
    with FakeDriver(lockable=0) as driver:
        monkeypatch.setattr(cli, "devices", lambda: iter([("page-locking", page_locking(driver))]))
        (check,) = [each for each in told("doctor")["machine"] if each["name"] == "page-locking"]
        assert (check["ok"], check["slower"]) == (True, True)
        shown = run("doctor")
    assert shown.exit_code == 0, "all works"
    line = next(line for line in shown.output.splitlines() if "page-locking" in line)
    assert "SLOWER" in line
    text = " ".join(shown.output.split())
    assert "all is well" not in text
    for word in ("page-locked buffers of 64 MiB", "ulimit -l unlimited"):
        assert word in check["detail"]


def test_every_tier_is_tried_and_left_as_it_was(trained: Path) -> None:
    def files() -> dict[Path, bytes]:
        return {path: path.read_bytes() for path in trained.parent.rglob("*") if path.is_file()}

    before = files()
    tiers = told("doctor", trained, "--size", "2 MiB")["tiers"]
    assert set(tiers) == {"ram", "disk", "archive"}
    assert {"open", "large write", "large read", "list", "delete"} <= outcomes(tiers["disk"]).keys()
    assert all(check["ok"] for checks in tiers.values() for check in checks)
    assert files() == before


def test_the_folders_of_a_store_that_is_to_come_are_not_left(config: Path, tmp_path: Path) -> None:
    result = run("doctor", tmp_path / "a" / "store", "--size", "1 MiB")
    assert (result.exit_code, "all is well" in result.stdout) == (0, True), result.output
    assert list(tmp_path.iterdir()) == [config]
    (tmp_path / "a").mkdir()
    run("doctor", tmp_path / "a" / "store", "--size", "1 MiB")
    assert list(tmp_path.rglob("a*")) == [tmp_path / "a"]


def test_a_folder_of_the_store_that_this_user_may_not_use_is_wrong(
    trained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`checkup/` is made anew, so its rights say nothing of theirs."""
    steps = trained.parent / "disk" / "steps"
    monkeypatch.setattr(os, "access", lambda path, mode: path != steps)
    result = run("doctor", trained, "--size", "1 MiB", "--json")
    assert result.exit_code == 1
    tiers = json.loads(result.stdout)["tiers"]
    (folders,) = [check for check in tiers["disk"] if not check["ok"]]
    assert folders["detail"] == f"TierUnavailable: let this user read, write and enter {steps}, and what is in there"
    assert all(check["ok"] for check in tiers["archive"])


def test_it_runs_beside_a_trainer(config: Path, training: SyncStore) -> None:
    result = run("doctor", config, "--size", "1 MiB")
    assert result.exit_code == 0, result.output
    assert "all is well" in result.stdout
    training.verify()


def test_a_tier_that_cannot_be_used_is_named_and_the_others_are_tried(config: Path) -> None:
    (config.parent / "disk").write_text("a file where the tier's folder belongs")
    result = run("doctor", config, "--size", "1 MiB")
    assert result.exit_code == 1
    wrong = [line for line in result.stdout.splitlines() if "WRONG" in line]
    assert len(wrong) == 1
    assert str(config.parent / "disk") in wrong[0]
    assert "all is well" not in result.stdout
    archive = result.stdout.partition("tier archive")[2]
    assert "large read" in archive


def test_a_marker_is_told_of_and_one_that_is_damaged_is_wrong(trained: Path) -> None:
    """Of a store that no command could open it said that all is well."""
    marker = trained.parent / "disk" / "tieredckpt.json"
    checks = told("doctor", trained, "--size", "1 MiB")["tiers"]["disk"]
    (found,) = [each for each in checks if each["name"] == "marker"]
    assert json.loads(marker.read_text())["store"] in found["detail"]
    marker.write_text("{")
    result = run("doctor", trained, "--size", "1 MiB")
    assert result.exit_code == 1
    (wrong,) = [line for line in result.stdout.splitlines() if "WRONG" in line]
    assert "marker" in wrong
    assert "does not mark a tieredckpt store" in wrong


def test_one_tier_may_be_chosen(config: Path) -> None:
    assert set(told("doctor", config, "--tier", "disk", "--size", "1 MiB")["tiers"]) == {"disk"}
    result = run("doctor", config, "--tier", "dsik")
    assert result.exit_code == 2
    assert "archive" in result.output


def test_the_places_of_exports_are_tried(config: Path, tmp_path: Path) -> None:
    good, bad = tmp_path / "exported", tmp_path / "a file"
    with config.open("a") as file:
        file.write(f'\n[exports.good]\nformat = "npz"\nto = "{good}"\n')
    assert all(check["ok"] for check in told("doctor", config, "--size", "1 MiB")["exports"]["good"])
    assert not [path for path in good.rglob("*") if path.is_file()]
    bad.write_text("a file where a folder belongs")
    with config.open("a") as file:
        file.write(f'\n[exports.bad]\nformat = "npz"\nto = "{bad}"\n')
    result = run("doctor", config, "--size", "1 MiB")
    assert result.exit_code == 1
    assert "WRONG" in result.stdout.partition("export bad")[2]
    assert "WRONG" not in result.stdout.partition("export bad")[0]


def test_more_ram_than_there_is_is_told(config: Path) -> None:
    config.write_text(re.sub(r"(?m)^capacity = .*$", 'capacity = "4000 TiB"', config.read_text()))
    result = run("doctor", config, "--tier", "ram")
    assert result.exit_code == 1
    assert "3.91 PiB" in result.stdout


def chfs_tier(config: Path, chfs: Path, **more: object) -> Path:
    """A configuration with one tier, over a look-alike in that directory."""
    config.write_text(to_toml(load({"tiers": {"pmem": {"kind": "chfs", "server": f"directory:{chfs}", **more}}})))
    return config


def test_it_says_which_way_a_tier_goes_to_chfs_and_why(config: Path, tmp_path: Path) -> None:
    if why := missing():
        pytest.skip(why)
    checks = told("doctor", chfs_tier(config, tmp_path / "chfs"), "--size", "1 MiB")["tiers"]["pmem"]
    assert all(check["ok"] for check in checks)
    details = {check["name"]: check["detail"] for check in checks}
    assert details["way"].startswith("worker: ")
    assert details["worker"].startswith("process ")
    assert "look-alike" in details["libchfs"]
    assert details["servers"] == "1"
    assert details["addresses"] == str(tmp_path / "chfs" / "servers" / "0")


@pytest.mark.parametrize("servers", [None, 1])
def test_it_advises_to_say_how_many_servers_there_are_to_be(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, servers: int | None
) -> None:
    if why := missing():
        pytest.skip(why)
    monkeypatch.setattr(choice, "_stable_for", lambda _: 0.1)
    more = {} if servers is None else {"servers": servers}
    checks = told("doctor", chfs_tier(config, tmp_path / "chfs", **more), "--size", "1 MiB")["tiers"]["pmem"]
    advice = [check["detail"] for check in checks if check["name"] == "advice"]
    assert [("servers = 1" in detail) for detail in advice] == ([True] if servers is None else [])


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ({"library": "/nowhere/libchfs.so"}, "/nowhere/libchfs.so"),
        ({"server": "ofi+tcp://127.0.0.1:1", "library": "/nowhere/libchfs.so"}, "ofi+tcp://127.0.0.1:1"),
        ({"server": None}, "CHFS_SERVER"),
    ],
)
def test_it_says_what_chfs_lacks(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: dict[str, Any], told: str
) -> None:
    if why := missing():
        pytest.skip(why)
    monkeypatch.delenv("CHFS_SERVER", raising=False)
    result = run("doctor", chfs_tier(config, tmp_path / "chfs", **more), "--json")
    assert result.exit_code == 1
    way, failed = json.loads(result.stdout)["tiers"]["pmem"]
    assert (way["name"], way["ok"], failed["name"], failed["ok"]) == ("way", True, "open", False)
    assert told in failed["detail"]


def test_it_says_that_the_client_of_chfs_is_missing(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(choice, "_has_driver", lambda: False)
    result = run("doctor", chfs_tier(config, tmp_path / "chfs"), "--json")
    assert result.exit_code == 1
    (way,) = json.loads(result.stdout)["tiers"]["pmem"]
    assert (way["name"], way["ok"]) == ("way", False)
    assert "C++17 compiler" in way["detail"]
