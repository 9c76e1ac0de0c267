"""`ls` and `show`: what a store holds, also while it is written to, damaged or hostile."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from support.command_line import run, told

from tieredckpt import CheckpointStore, SyncStore
from tieredckpt.cli import console
from tieredckpt.cli.console import when
from tieredckpt.cli.ls import print_steps, print_tiers
from tieredckpt.cli.opening import newest_step
from tieredckpt.config import load

HOSTILE = "\x1b]0;owned\x07[bold]\n\u202eloss"


def manifest(config: Path, step: int, tier: str = "disk") -> Path:
    return next((config.parent / tier / "steps").glob(f"{step:010}-*/manifest.ocdbt"))


def test_ls_tells_steps_newest_last_and_where_they_are(trained: Path) -> None:
    found = told("ls", trained)
    assert [(step["step"], step["serial"]) for step in found["steps"]] == [(1, 1), (2, 2), (3, 3)]
    assert {tuple(step["tiers"]) for step in found["steps"]} == {("ram", "disk")}
    assert found["steps"][1]["metrics"] == {"loss": 0.5}
    assert found["steps"][1]["state"] == "live"
    assert [(tier["name"], tier["steps"], tier["healthy"]) for tier in found["tiers"]] == [
        ("ram", 3, True),
        ("disk", 3, True),
        ("archive", 0, True),
    ]


def test_ls_prints_a_row_for_each_step_and_tier(trained: Path) -> None:
    lines = [line.split() for line in run("ls", trained).stdout.splitlines()]
    assert [line[0] for line in lines if line and line[-1] == "live"] == ["1", "2", "3"]
    assert [line[0] for line in lines if "ok" in line] == ["ram", "disk", "archive"]


def test_ls_reads_beside_a_trainer_and_counts_as_it_does(config: Path, training: SyncStore) -> None:
    found = told("ls", config)
    assert [step["step"] for step in found["steps"]] == [1]
    assert found["steps"][0]["metrics"] == {"loss": "nan"}
    mine = {tier.name: (tier.used, tier.steps) for tier in training.tier_infos()}
    assert {tier["name"]: (tier["used"], tier["steps"]) for tier in found["tiers"]} == mine
    assert mine["ram"][0] >= 100 * 64 * 4


def test_looking_changes_nothing(trained: Path) -> None:
    def files() -> dict[Path, tuple[int, bytes]]:
        return {
            path: (path.stat().st_mtime_ns, path.read_bytes()) for path in trained.parent.rglob("*") if path.is_file()
        }

    before = files()
    for verb in (("ls",), ("show",), ("verify", "--all"), ("restore", 1), ("restore",)):
        assert run(verb[0], trained, *verb[1:]).exit_code == 0
    assert files() == before


def test_ls_tells_what_is_off_branch(trained: Path) -> None:
    with CheckpointStore.open(trained).sync() as store:
        store.restore(1)
        store.save(2, {"other": np.ones(3)})
    states = [(step["step"], step["serial"], step["state"]) for step in told("ls", trained)["steps"]]
    assert states == [(1, 1, "live"), (2, 2, "off-branch"), (3, 3, "off-branch"), (2, 4, "live")]
    assert [array["key"] for array in told("show", trained, 2)["arrays"]] == ["other"]
    assert [array["key"] for array in told("show", trained, 2, "--serial", 2)["arrays"]] == [
        "params/w",
        "params/b",
    ]


def test_ls_tells_a_step_that_one_tier_cannot_read(trained: Path) -> None:
    manifest(trained, 2).write_bytes(b"torn")
    step = told("ls", trained)["steps"][1]
    assert (step["tiers"], step["damaged"], step["state"]) == (["ram"], ["disk"], "live, damaged on disk")


def test_ls_tells_a_step_that_no_tier_can_read(trained: Path, shared_memory: Path) -> None:
    for path in shared_memory.rglob("manifest.ocdbt"):
        path.unlink()
    manifest(trained, 3).write_bytes(b"torn")
    steps = told("ls", trained)["steps"]
    assert [step["state"] for step in steps] == ["live", "live", "lost"]
    assert steps[2]["damaged"] == ["disk"]
    assert run("ls", trained).stdout.count("damaged on disk") == 1


def test_an_empty_store_is_no_error_to_list_and_one_to_show(config: Path) -> None:
    with CheckpointStore.open(config).sync():
        pass
    assert "no steps" in run("ls", config).stdout
    assert run("verify", config, "--all").exit_code == 0
    for verb in ("show", "verify", "restore"):
        result = run(verb, config)
        assert result.exit_code == 1
        assert result.stderr.startswith("NotFound: no tier holds a step")


def test_show_tells_all_of_a_step(trained: Path) -> None:
    found = told("show", trained, 2)
    assert found["line"] == [[1, 2]]
    assert found["restored_from"] is None
    assert found["provenance"].keys() >= {"tieredckpt", "python", "numpy", "host", "process"}
    assert found["policy"]["tiers"][1]["retain"] == {"kind": "all"}
    assert found["scalars"] == {"epoch": 2, "note": "first\nsecond"}
    assert {
        array["key"]: (array["dtype"], array["shape"], array["nbytes"], array["chunks"]) for array in found["arrays"]
    } == {
        "params/w": ("float32", [100, 64], 25600, 4),
        "params/b": ("int64", [5], 40, 1),
    }


def test_show_prints_all_of_a_step(trained: Path) -> None:
    text = run("show", trained).stdout
    for part in ("loss=0.333333", "params/w", "100x64", "25 KiB", "never", r"first\nsecond", "live", "serials 1-3"):
        assert part in text


def test_show_names_the_steps_there_are(trained: Path) -> None:
    result = run("show", trained, 7)
    assert result.exit_code == 1
    assert result.stderr == "NotFound: no tier holds step 7 (held: 1, 2, 3)\n"


def test_no_text_of_a_checkpoint_reaches_the_terminal_as_more_than_text(config: Path, tmp_path: Path) -> None:
    with CheckpointStore.open(config).sync() as store:
        store.save(1, {HOSTILE: np.ones(2), "s": HOSTILE}, metrics={HOSTILE: 1.0})
    for arguments in (
        ("ls", config),
        ("show", config),
        ("verify", config),
        ("restore", config),
        ("restore", config, "--keys", HOSTILE),
        ("restore", config, "--to", tmp_path / HOSTILE.replace("\n", "")),
        ("ls", config, "--json"),
        ("show", config, "--json"),
    ):
        output = run(*arguments).output
        assert not set("\x1b\x07\u202e") & set(output)
        assert "[bold]" in output or arguments[0] == "verify"
    assert json.loads(run("show", config, "--json").stdout)["scalars"] == {"s": HOSTILE}


def test_numbers_and_times_stay_whole_on_a_narrow_terminal(
    trained: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with CheckpointStore.open(trained, read_only=True).sync() as store:
        steps, tiers = store.steps(), store.tier_infos()
    many = {"loss": 0.123456, "val_loss": 1.234e-05, "grad_norm": 12.345}
    steps = tuple(dataclasses.replace(step, step=step.step * 10**6, metrics=many) for step in steps)
    for columns in (80, 40):
        monkeypatch.setattr(
            console, "output", lambda columns=columns: Console(width=columns, markup=False, emoji=False)
        )
        print_steps(steps, tiers, ())
        print_tiers(tiers)
        words = capsys.readouterr().out.split()
        assert words.count(when(steps[0].saved_at)) + words.count(when(steps[-1].saved_at)) >= 2
        assert {"1000000", "3000000", "loss=0.123456,", "val_loss=1.234e-05,", "grad_norm=12.345"} <= set(words)
        assert words.count("KiB") >= 3
    assert max(map(len, capsys.readouterr().out.splitlines()), default=0) <= 80


def test_ram_that_was_given_back_in_order_is_no_fault(config: Path) -> None:
    config.write_text(config.read_text().replace('on_close = "keep"', 'on_close = "auto"'))
    with CheckpointStore.open(config).sync() as store:
        store.save(1, {"w": np.ones(4)})
    ram = told("ls", config)["tiers"][0]
    assert (ram["kind"], ram["healthy"], ram["steps"]) == ("ram", True, 0)
    result = run("-v", "ls", config)
    (row,) = [line.split() for line in result.stdout.splitlines() if line.startswith(" ram")]
    assert "not in use" in " ".join(row)
    assert "fail" not in result.output
    assert run("show", config, 7).stderr == "NotFound: no tier holds step 7 (held: 1)\n"


def test_ls_and_show_mark_lossy_copies(tmp_path: Path) -> None:
    place = str(tmp_path / "disk").replace("$", "$$")
    toml = tmp_path / "ckpt.toml"
    toml.write_text(
        f'[tiers.disk]\nkind = "posix"\npath = "{place}"\nretain = {{ kind = "last_n", n = 1 }}\n'
        f'[tiers.archive]\nkind = "posix"\npath = "{place}"\ncodec = "small"\n'
        'lossy = [{ keys = ["w"], max_error = "0.4%" }, { keys = ["half"], drop = true }]\n'
    )
    with CheckpointStore.open_sync(toml) as store:
        for step in (1, 2):
            store.save(step, {"w": np.linspace(step, 9, 4000, dtype=np.float32).reshape(40, 100), "half": np.ones(3)})
            store.flush()
    steps = told("ls", toml)["steps"]
    assert [(step["tiers"], step["lossy"]) for step in steps] == [([], ["archive"]), (["disk"], ["archive"])]
    shown = run("ls", toml).stdout
    assert "archive (lossy)" in shown
    assert "posix (lossy)" in shown
    shown = run("show", toml, 1).stdout
    assert "lossy copy on archive" in shown
    assert "0.00391 of a value" in shown
    assert told("show", toml, 1)["derived"]["archive"]["dropped"] == ["half"]
    refused = run("restore", toml, 1)
    assert refused.exit_code != 0
    assert "lossy" in refused.output


def test_a_store_of_which_lossy_copies_alone_are_left_is_found(tmp_path: Path) -> None:
    toml = tmp_path / "ckpt.toml"
    toml.write_text(
        '[tiers.disk]\nkind = "posix"\npath = "disk"\n'
        '[tiers.archive]\nkind = "posix"\npath = "archive"\ncodec = "small"\n'
        'lossy = [{ keys = ["w"], max_error = "0.4%" }]\n'
    )
    with CheckpointStore.open_sync(toml) as store:
        store.save(1, {"w": np.linspace(1, 9, 4000, dtype=np.float32).reshape(40, 100)})
        store.flush()
    shutil.rmtree(tmp_path / "disk")
    (step,) = told("ls", toml)["steps"]
    assert (step["step"], step["tiers"], step["lossy"]) == (1, [], ["archive"])
    assert newest_step(load(toml)) is None  # of no tier is read what was saved
