"""`diff`: exit code 0 means that both steps are the same, bit for bit; what differs is told by key."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from support.command_line import run, told
from support.scenes import config as store_config
from support.scenes import folder

from tieredckpt import CheckpointStore, SyncStore
from tieredckpt.config import to_toml


def differences(*arguments: object) -> dict[str, Any]:
    """What `diff` prints for programs, of two steps that differ."""
    result = run("diff", *arguments, "--json")
    assert result.exit_code == 1, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def files(root: Path) -> dict[Path, tuple[int, bytes]]:
    return {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in root.rglob("*") if path.is_file()}


def test_steps_that_differ_exit_with_1_and_say_in_what(trained: Path) -> None:
    found = differences(trained, 1, 2)
    assert (found["from"], found["to"]) == ({"step": 1, "serial": 1}, {"step": 2, "serial": 2})
    assert [(each["key"], each["what"]) for each in found["differences"]] == [
        ("params/w", ["values"]),
        ("params/b", ["values"]),
        ("epoch", ["value"]),
    ]
    w, _, epoch = found["differences"]
    assert (w["chunks"], w["differing_chunks"], w["differing_nbytes"]) == (4, 4, 25600)
    assert w["before"] == w["after"] == {"kind": "numpy", "dtype": "float32", "shape": [100, 64]}
    assert (epoch["before"], epoch["after"]) == ({"kind": "int", "value": 1}, {"kind": "int", "value": 2})
    totals = [found[name] for name in ("same_arrays", "differing_arrays", "nbytes", "differing_nbytes")]
    assert totals == [0, 2, 25640, 25640]


def test_the_same_step_exits_with_0(trained: Path) -> None:
    found = told("diff", trained, 2, 2)
    assert found["differences"] == []
    assert (found["same_arrays"], found["nbytes"], found["differing_nbytes"]) == (2, 25640, 0)
    assert run("diff", trained, 2, 2).stdout == "arrays: 2 the same, 0 not; 0 B of 25 KiB differ\n"


def test_a_table_for_people(trained: Path) -> None:
    with CheckpointStore.open(trained).sync() as store:
        w = np.zeros((100, 64), np.float32)
        store.save(4, {"w": w, "s": np.ones(3), "kind": w, "gone": 1.5, "l": [1], "red": "\x1b[31m"})
        w[99, 63] = 1
        store.save(5, {"w": w, "s": np.ones((3, 1)), "kind": "w" * 99, "new": np.ones(2), "l": (1,), "red": "\u202e"})
        store.flush()
    result = run("diff", trained, 4, 5)
    assert result.exit_code == 1
    lines = [" ".join(line.split()) for line in result.stdout.splitlines()]
    assert lines[0] == "from step 4 (serial 4) to step 5 (serial 5)"
    for row in (
        "w values 1 of 4 6.25 KiB",
        "s shape 3 3x1 1 of 1 24 B",
        f"kind kind numpy float32 100x64 str '{'w' * 59}…",
        "gone only in STEP float 1.5",
        "l kind list tuple",
        r"red value '\x1b[31m' '\u202e'",
        "new only in OTHER numpy float64 2 1 of 1 16 B",
        "arrays: 0 the same, 4 not; 6.29 KiB of 25 KiB differ; other leaves and containers: 3 not the same",
    ):
        assert row in lines


def test_a_step_of_another_store(trained: Path, tmp_path: Path) -> None:
    assert run("copy", trained, tmp_path / "copy").exit_code == 0
    assert told("diff", trained, 2, 2, "--other", tmp_path / "copy")["same_arrays"] == 2
    with CheckpointStore.open(tmp_path / "copy").sync() as store:
        store.save(4, {"x": 1})
    assert [each["key"] for each in differences(tmp_path / "copy", 4, 1, "--other", trained)["differences"]] == [
        "x",
        "params/w",
        "params/b",
        "epoch",
        "note",
    ]
    missing = run("diff", trained, 2, 9, "--other", tmp_path / "copy")
    assert missing.exit_code == 1
    assert missing.stderr == f"NotFound: {tmp_path / 'copy'}: no tier holds step 9 (held: 1, 2, 3, 4)\n"
    assert (
        f"{tmp_path / 'none'}: there is no store yet" in run("diff", trained, 2, 2, "--other", tmp_path / "none").stderr
    )


def test_a_store_with_other_chunks_has_its_values_read(trained: Path, tmp_path: Path) -> None:
    other = store_config({"disk": folder(tmp_path / "other")}, chunk_size=4096)
    with CheckpointStore.open(trained, read_only=True).sync() as store, CheckpointStore.open(other).sync() as written:
        restored = store.restore(2)
        assert restored is not None
        written.save(2, restored.tree)
    assert told("diff", trained, 2, 2, "--other", tmp_path / "other")["same_arrays"] == 2
    w, *_ = differences(trained, 1, 2, "--other", tmp_path / "other")["differences"]
    assert (w["what"], w["chunks"], w["differing_chunks"]) == (["values"], 7, 7)


def test_a_number_that_was_saved_on_several_branches(trained: Path) -> None:
    with CheckpointStore.open(trained).sync() as store:
        store.restore(1)
        store.save(2, {"epoch": 2})
    assert [each["what"] for each in differences(trained, 2, 2, "--serial", 2)["differences"]] == [
        *[["only in STEP"]] * 3
    ]
    assert differences(trained, 2, 2, "--other-serial", 2)["from"]["serial"] == 4
    assert told("diff", trained, 2, 2, "--serial", 2, "--other-serial", 2)["to"]["serial"] == 2
    missing = run("diff", trained, 2, 2, "--other-serial", 3)
    assert missing.exit_code == 1
    assert "no tier holds step 2 of serial 3" in missing.stderr


def test_keys_choose_what_is_compared(trained: Path) -> None:
    assert told("diff", trained, 1, 2, "--keys", "note")["same_arrays"] == 0
    found = differences(trained, 1, 2, "--keys", "params/b", "--keys", "note")
    assert [each["key"] for each in found["differences"]] == ["params/b"]
    assert found["nbytes"] == 40
    result = run("diff", trained, 1, 2, "--keys", "notes")
    assert result.exit_code == 1
    assert "no leaf that matches 'notes'; near: 'note'" in result.stderr


def test_beside_a_trainer_nothing_is_changed(training: SyncStore, tmp_path: Path) -> None:
    training.save(2, {"x": np.ones(3)})
    training.flush()
    before = files(tmp_path)
    assert run("diff", tmp_path / "ckpt.toml", 1, 2).exit_code == 1
    assert run("diff", tmp_path / "ckpt.toml", 2, 2, "--other", tmp_path / "ckpt.toml").exit_code == 0
    assert files(tmp_path) == before


def test_a_step_that_only_lossy_copies_are_left_of_is_not_compared(tmp_path: Path) -> None:
    tiers = {
        "disk": folder(tmp_path / "disk", retain={"kind": "last_n", "n": 1}),
        "archive": folder(tmp_path / "archive", codec="small", lossy=[{"keys": ["**"], "max_error": "0.4%"}]),
    }
    (tmp_path / "ckpt.toml").write_text(to_toml(store_config(tiers)))
    with CheckpointStore.open(tmp_path / "ckpt.toml").sync() as store:
        for step in (1, 2):
            store.save(step, {"w": np.linspace(0, 1, 9000, dtype=np.float32)})
            store.flush()
    result = run("diff", tmp_path / "ckpt.toml", 1, 2)
    assert result.exit_code == 1
    assert "no tier holds step 1 (held: 2; a lossy copy is on 'archive'" in result.stderr
    assert run("diff", tmp_path / "ckpt.toml", 2, 2).exit_code == 0


def test_what_is_no_number_is_wrong_usage(trained: Path) -> None:
    assert run("diff", trained, 1).exit_code == 2
    assert run("diff", trained, 1, "x").exit_code == 2
